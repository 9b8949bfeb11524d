"""`pip install .` as a stranger gets it: what the wheel of this tree holds, and that it works where nothing else of ours is."""

import fcntl
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from scikit_build_core import build as backend

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "frontends" / "python" / "tileloss"
sys.path += [str(ROOT / "tests" / "lint"), str(ROOT / "tests" / "install")]
import lint  # noqa: E402
from wheels import output_of, pip_wheel, python_of, run  # noqa: E402


def package_sources() -> set[str]:
    return {
        f"tileloss/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".typed", ".j2", ".css")
    }


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once for all workers. With the build's own flags, so that ccache has every object already. Or that of
    ./dev wheels, which TILELOSS_WHEEL names."""
    if given := os.environ.get("TILELOSS_WHEEL"):
        return Path(given)
    folder = tmp_path_factory.getbasetemp()
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "wheel"
    shared.mkdir(exist_ok=True)
    with open(shared / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(shared.glob("*.whl")):
            done = pip_wheel(shared, "TILELOSS_WARNINGS_ARE_ERRORS=ON")
            assert done.returncode == 0, done.stdout + done.stderr
    (built,) = shared.glob("*.whl")
    return built


def installed(wheel: Path, python: str | Path, folder: Path) -> Path:
    """The bin folder of a fresh environment with nothing but the wheel."""
    output_of(python, "-m", "venv", "--without-pip", folder / "fresh", cwd=folder)
    fresh = folder / "fresh" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", fresh / "python"]
    output_of(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return fresh


def test_one_wheel_for_every_python_3(wheel: Path) -> None:
    version = re.search(
        r"project\(tileloss VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert version
    linux = "manylinux_2_28" if "TILELOSS_WHEEL" in os.environ else "linux"
    assert wheel.name == f"tileloss-{version[1]}-py3-none-{linux}_{os.uname().machine}.whl"


def test_wheel_holds_the_package_and_the_libraries(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    written = "METADATA WHEEL RECORD entry_points.txt licenses/LICENSE licenses/LICENSE-THIRD-PARTY"
    about = {f"{info}/{name}" for name in written.split()}
    assert names == package_sources() | about | {
        "tileloss/lib/libtileloss.so",
        "tileloss/lib/libtileloss_xla.so",
        "tileloss/lib/libtileloss_judge.so",
    }


def test_compiled_files_need_the_run_times_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "tileloss/lib"
    library = folder / "libtileloss.so"
    for file in (library, folder / "libtileloss_judge.so"):
        needed = re.findall(r"^\s+(?:\S*/)?(\S+)", output_of("ldd", file, cwd=tmp_path), re.M)
        assert needed and all(lint.RUN_TIMES.fullmatch(name) for name in needed), (
            f"{file.name} needs {needed}"
        )
        assert str(ROOT).encode() not in file.read_bytes(), f"{file.name} knows where it was built"
    assert not lint.lint_symbols(library, ROOT / "include" / "tileloss" / "tileloss.h")


def test_the_installed_package_works_alone(wheel: Path, tmp_path: Path) -> None:
    fresh = installed(wheel, sys.executable, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    version = wheel.name.split("-")[1]
    assert output_of(fresh / "tileloss", "--version", cwd=empty).strip() == version
    refused = run(fresh / "tileloss", "infos", cwd=empty)
    assert refused.returncode == 2 and "did you mean info?" in refused.stderr
    model = ("gradcheck", "--config", ROOT / "configs" / "gradcheck_ce_tiny_model.yaml")
    (empty / "r.jsonl").write_text('{"tool":"gradcheck"}\n')
    for command in (("report", "r.jsonl", "-o", "r.html"), model, ("info",)):
        lacking = run(fresh / "tileloss", *command, cwd=empty)
        assert lacking.returncode == 3 and "pip install 'tileloss[check]'" in lacking.stderr
    code = "import tileloss; print(tileloss.__version__, tileloss.library_path())"
    library = next(tmp_path.glob("fresh/lib/python3*/site-packages/tileloss/lib/libtileloss.so"))
    assert output_of(fresh / "python", "-c", code, cwd=empty).split() == [version, str(library)]


def test_the_command_checks_a_model_and_makes_a_report(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = (sys.executable, "-m", "tileloss")
    config = ROOT / "configs" / "gradcheck_ce_tiny_model.yaml"
    more = {"cwd": tmp_path, "PYTHONPATH": str(tmp_path)}
    output_of(*command, "gradcheck", "--config", config, "--set=output=r.jsonl", **more)
    assert output_of(*command, "report", "r.jsonl", "-o", "r.html", **more).startswith("Passed")


def test_torch_functions_come_with_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import torch, tileloss, tileloss.torch; z = torch.tensor([[1.0, 2, 3, 4]]); y = torch.tensor([3]);"
        "assert tileloss.library_path().is_relative_to(tileloss.__path__[0]);"
        "torch.testing.assert_close(tileloss.torch.cross_entropy(z, y), torch.nn.functional.cross_entropy(z, y))"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    output_of(sys.executable, "-c", code, cwd=empty, PYTHONPATH=str(tmp_path))


def test_other_pythons_import_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    others = {*range(11, 16)} - {sys.version_info.minor}
    pythons = [python for minor in sorted(others) if (python := python_of(minor))]
    if not pythons:
        pytest.skip("this machine has no other Python from 3.11 on")
    for number, python in enumerate(pythons):
        folder = tmp_path / str(number)
        folder.mkdir()
        fresh = installed(wheel, python, folder)
        code = "import sys, tileloss; print(sys.version_info.minor, tileloss.__version__)"
        minor, version = output_of(fresh / "python", "-c", code, cwd=folder).split()
        assert int(minor) != sys.version_info.minor and version == wheel.name.split("-")[1]


def test_missing_packages_are_named(tmp_path: Path) -> None:
    names = ("fmt", "nlohmann_json")
    done = pip_wheel(tmp_path, *(f"CMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in names))
    assert done.returncode != 0
    assert "apt-get install libfmt-dev nlohmann-json3-dev\n" in done.stdout + done.stderr


def test_sdist_has_what_a_build_reads_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    archive = tarfile.open(tmp_path / backend.build_sdist(str(tmp_path)))
    folder = archive.getnames()[0].split("/")[0]
    names = {name.removeprefix(f"{folder}/") for name in archive.getnames()}
    source = {
        str(path.relative_to(ROOT))
        for room in ("src", "include", "cmake", "frontends/xla")
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    package = {f"frontends/python/{name}" for name in package_sources()}
    files = {
        "CMakeLists.txt",
        "CMakePresets.json",
        "LICENSE",
        "LICENSE-THIRD-PARTY",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
    }
    assert names == source | package | files
    archive.extractall(tmp_path, filter="data")
    configure = [
        "cmake",
        "--preset=release",
        "-DTILELOSS_BUILD_TESTS=OFF",
        "-DSKBUILD=ON",
        "-B",
        tmp_path / "build",
    ]
    output_of(*configure, cwd=tmp_path / folder)
