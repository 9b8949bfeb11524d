"""The wheels of ./dev wheels, in build/wheels, as strangers install them. Their package: tests/python/test_install.py."""

import json
import os
import platform
import re
import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pip
import pytest
from wheels import GLIBC, ROOT, output_of, python_of, run

WHEELS = sorted((ROOT / "build" / "wheels").glob("*.whl"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-[a-z0-9-]+\.so\.\d|libtileloss\.so")
# What another object may find in each.
EXPORTED = {
    "libtileloss.so": r"tileloss_\w+|TILELOSS_0",
    "libtileloss_xla.so": r"tileloss_xla_\w+|TILELOSS_0",
    "libtileloss_cuda.so": r"tileloss_cuda_backend|TILELOSS_0",
    "libtileloss_judge.so": r"tileloss_judge|TILELOSS_0",
}


def architecture(wheel: Path) -> str:
    return wheel.stem.rpartition("2_28_")[2]


def emulator(wheel: Path) -> list[str]:
    """What runs the wheel's programs here: nothing, or qemu with the cross compiler's C library."""
    name = architecture(wheel)
    return [] if name == platform.machine() else [f"qemu-{name}", "-L", f"/usr/{name}-linux-gnu"]


def number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def unpacked(wheel: Path, folder: Path) -> list[Path]:
    """Its compiled files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    compiled = [path for path in files if path.read_bytes()[:4] == b"\x7fELF"]
    for path in compiled:
        path.chmod(0o755)  # pip does this
    return compiled


@pytest.fixture(params=WHEELS, ids=lambda wheel: wheel.name)
def wheel(request: pytest.FixtureRequest) -> Path:
    given: Path = request.param
    return given


def test_there_are_an_sdist_and_wheels() -> None:
    assert WHEELS and list((ROOT / "build" / "wheels").glob("tileloss-*.tar.gz"))


def test_runs_on_old_systems_with_no_other_package(wheel: Path, tmp_path: Path) -> None:
    """Exactly the versions of glibc's functions that the name promises, and no run time of GCC's."""
    assert re.fullmatch(r"tileloss(_cuda13)?-[\d.]+-py3-none-manylinux_2_28_\w+\.whl", wheel.name)
    compiled = unpacked(wheel, tmp_path)
    assert compiled
    for file in compiled:
        assert (
            f"Machine:{architecture(wheel)}".replace("_", "-").lower()
            in re.sub(
                r" |Advanced Micro Devices ", "", output_of("readelf", "-h", file, cwd=tmp_path)
            )
            .replace("_", "-")
            .lower()
        )
        dynamic = output_of("readelf", "-dW", file, cwd=tmp_path)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        assert needed and all(NEEDED.fullmatch(name) for name in needed), (file.name, needed)
        versions = set(
            re.findall(r"Name: (\w+?)_([\d.]+) ", output_of("readelf", "-VW", file, cwd=tmp_path))
        )
        wanted = {(name, version) for name, version in versions if name != "TILELOSS"}
        assert {name for name, _ in wanted} == {"GLIBC"}, (file.name, wanted)
        newest = max((version for _, version in wanted), key=number)
        print(f"{file.name}: GLIBC_{newest}")
        assert number(newest) <= number(GLIBC), (file.name, newest)
        defined = output_of("nm", "-D", "--defined-only", file, cwd=tmp_path).splitlines()
        names = {line.split()[-1].split("@")[0] for line in defined}
        strange = {name for name in names if not re.fullmatch(EXPORTED[file.name], name)}
        assert not strange, (file.name, sorted(strange)[:9])


def test_libraries_run(wheel: Path, tmp_path: Path) -> None:
    """Those of another architecture in qemu."""
    files = {path.name: path for path in unpacked(wheel, tmp_path)}
    if "libtileloss_judge.so" not in files:
        pytest.skip("it has none of the CPU")
    emulated = emulator(wheel)
    compiler = f"{architecture(wheel)}-linux-gnu-gcc"
    includes = ("-I", ROOT / "include", "-I", ROOT / "src")
    output_of(
        compiler,
        ROOT / "tests/install/judge.c",
        *includes,
        "-o",
        tmp_path / "judge",
        "-ldl",
        cwd=tmp_path,
    )
    library = files["libtileloss.so"]
    sources = (ROOT / "examples" / "cross_entropy.c", library)
    flags = (*includes, f"-Wl,-rpath,{library.parent}", "-o", tmp_path / "example")
    output_of(compiler, *sources, *flags, cwd=tmp_path)
    printed = output_of(*emulated, tmp_path / "example", cwd=tmp_path)
    assert printed == "loss 0.5405, dlogits[0][3] -0.1405\n"

    def ask(**config: str) -> subprocess.CompletedProcess[str]:
        children = [{"key": key, "kind": "scalar", "text": text} for key, text in config.items()]
        request = {
            "do": "gradcheck",
            "name": "wheel",
            "strict": True,
            "config": {"children": children},
        }
        judge = (tmp_path / "judge", files["libtileloss_judge.so"], json.dumps(request))
        # By one thread: a process that qemu forked cannot start another.
        return run(*emulated, *judge, cwd=tmp_path, TILELOSS_NUM_THREADS="1")

    size = {"batch_size": "2", "seq_len": "2", "vocab_size": "151936", "dtype": "bf16"}
    done = ask(loss="cross_entropy", **size)
    assert done.returncode == 0 and '"failures":[]' in done.stdout, done.stdout + done.stderr
    # What a C++ library's run time is for: an exception that is caught, and static objects.
    refused = ask(loss="cross_entropi", **size)
    assert refused.returncode == 2 and "'cross_entropi' is none of" in refused.stdout


# What the command needs to check and time.
COMMAND = ["ml-dtypes", "numpy", "pyyaml", "rich", "safetensors"]


def native_wheels() -> list[Path]:
    return [wheel for wheel in WHEELS if architecture(wheel) == platform.machine()]


def oldest(extra: str) -> list[str]:
    """The oldest releases that an extra allows."""
    allowed = PROJECT["optional-dependencies"][extra]
    return [f"{requirement.replace('>=', '==')}.*" for requirement in allowed]


def run_examples(say: Callable[..., str], *python: str | Path) -> None:
    for example, least in (("train_pytorch.py", 0.1), ("train_jax.py", 0.5)):
        printed = say(*python, ROOT / "examples" / example)
        assert float(printed.split()[-1]) < least, printed


@pytest.mark.parametrize("minor, packages", [(11, "oldest"), (13, "newest")])
def test_fresh_environment(minor: int, packages: str, tmp_path: Path) -> None:
    """pip install with torch and JAX, the README's examples, gradcheck; uninstalled, nothing is left."""
    wheels = native_wheels()
    python = python_of(minor)
    if not python or not any(wheel.name.startswith("tileloss-") for wheel in wheels):
        pytest.skip(f"no Python 3.{minor} here, or no wheel of tileloss for this machine")
    fresh = tmp_path / "fresh"

    def say(*command: str | Path) -> str:
        more = {"PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
        return output_of(*command, cwd=tmp_path, **more)

    say(python, "-m", "venv", fresh)
    program, python, pip = (
        fresh / "bin" / "tileloss",
        fresh / "bin" / "python",
        fresh / "bin" / "pip",
    )
    pins = [*oldest("torch"), *oldest("jax")] if packages == "oldest" else ["torch", "jax"]
    pins += COMMAND
    say(pip, "install", "--quiet", "--no-compile", *pins)
    before = files_of(fresh)
    say(pip, "install", "--no-compile", "--no-index", *wheels)
    print(re.findall(r"^(?:torch|jax|tileloss\S*)(?:==| @).*", say(pip, "freeze"), re.M))
    config = ROOT / "configs" / "gradcheck_ce_qwen2.5_1.5b.yaml"
    assert say(program, "gradcheck", "--config", config, "--set", "seq_len=33").endswith("PASS\n")
    small = ("--tokens", "64", "--vocab", "32000", "--dtype", "bf16")
    assert "cross_entropy" in say(program, "bench", "--loss", "cross_entropy", *small)
    run_examples(say, python)
    # Of torch's own float32 gradients a case that is right without AVX-512, too.
    audit = ("--impl", "torch,tileloss-torch", "--case", "ce/fp32")
    assert "pass" in say(python, "-m", "tileloss", "audit", *audit)
    names = ["tileloss"]
    if any("cuda13" in wheel.name for wheel in wheels):
        names.insert(0, "tileloss-cuda13")
        # Opened and asked: its version is the library's; there is a GPU, or there is none.
        devices = say(program, "info")
        assert "cannot open" not in devices and "expected version" not in devices, devices
    say(pip, "uninstall", "--yes", *names)
    assert files_of(fresh) == before
    shutil.rmtree(fresh)


def test_fresh_environment_in_an_emulator(wheel: Path, tmp_path: Path) -> None:
    """As above with Python, pip, and the oldest torch and JAX of another architecture."""
    if not emulator(wheel):
        pytest.skip("it is of this machine's architecture")
    # Debian's, which ./dev unpacks there; and our pip, which is Python alone.
    system = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tileloss" / "arm64"
    folders = ":".join(f"{system}/{lib}/aarch64-linux-gnu" for lib in ("lib", "usr/lib"))
    tools, fresh = tmp_path / "tools", tmp_path / "fresh"
    tools.mkdir()
    (tools / "pip").symlink_to(pip.__path__[0])
    python = (*emulator(wheel), "-E", f"LD_LIBRARY_PATH={folders}", fresh / "bin" / "python")
    run_pip = (*python, "-m", "pip")

    def say(*command: str | Path, **more: str) -> str:
        settings = {"PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
        return output_of(*command, cwd=tmp_path, **settings, **more)

    say(*python[:-1], system / "usr/bin/python3.11", "-m", "venv", "--without-pip", fresh)
    pins = [*oldest("torch"), *oldest("jax"), *COMMAND]
    say(*run_pip, "install", "--quiet", "--no-compile", *pins, PYTHONPATH=str(tools))
    before = files_of(fresh)
    say(*run_pip, "install", "--no-compile", "--no-index", wheel, PYTHONPATH=str(tools))
    run_examples(say, *python)
    info = say(*python, "-m", "tileloss", "info")
    assert re.search(r"^chosen +neon_bf16 ", info, re.M), info
    say(*run_pip, "uninstall", "--yes", "tileloss", PYTHONPATH=str(tools))
    assert files_of(fresh) == before
    shutil.rmtree(fresh)


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
