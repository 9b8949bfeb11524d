#!/usr/bin/env python3
"""Packs the kit: a folder that needs nothing of the machine where it is unpacked but glibc, a driver, and Python with PyTorch and
JAX. run.py has what it does there. Exit code 1 where it is too large, or a file names a path of this machine."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 50 << 20  # with a checkout what 64 MiB hold
FOLDERS = {"frontends/python/tileloss": "site/tileloss", "tests/python": "tests/python", "tests/data": "tests/data",
           "configs": "configs", "benchmarks": "benchmarks"}  # fmt: skip
FILES = {"LICENSE": "LICENSE", "tests/kit/run.py": "run",
         "tests/backends/cuda/small_model.txt": "small_model.txt",
         **{f"tests/kit/{name}.py": f"{name}.py" for name in ("first", "rows", "steps", "versions")}}  # fmt: skip

BINARIES = {**{name: f"site/tileloss/lib/{name}" for name in ("libtileloss.so", "libtileloss_xla.so", "libtileloss_judge.so")},
            "api_test": "bin/api_test"}  # fmt: skip


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout


def copy_tracked(source: str, destination: Path) -> None:
    """A file, or what git knows of a folder, and files that it does not ignore."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", source).splitlines():
        if not (ROOT / name).exists():
            continue  # deleted, not committed yet
        target = destination / Path(name).relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)


def pack(build: Path, cuda: Path, peers: Path | None, output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    for source, destination in FOLDERS.items():
        copy_tracked(source, output / destination)
    for source, destination in FILES.items():
        shutil.copy(ROOT / source, output / destination)
    shutil.copy(build / "cuda_suites.txt", output / "suites.txt")
    (output / "run").chmod(0o755)
    # Or pytest would look for a configuration around the kit.
    (output / "pytest.ini").write_text(
        "[pytest]\nmarkers = full: in a checkout, of the second tier\n"
    )
    binaries = {build / name: destination for name, destination in BINARIES.items()}
    binaries[cuda] = "site/tileloss/lib/libtileloss_cuda.so"
    for binary, destination in binaries.items():
        target = output / destination
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["strip", "-o", target, binary], check=True)
    # Its name in the XLA handler; api_test looks for the CUDA library beside itself.
    (output / "site/tileloss/lib/libtileloss.so.0").symlink_to("libtileloss.so")
    (output / "bin/libtileloss_cuda.so").symlink_to("../site/tileloss/lib/libtileloss_cuda.so")
    if peers is not None:
        shutil.copy(peers, output / "peers.tar.xz")
    state = " with changes" if git("status", "--porcelain") else ""
    version = re.search(
        r"project\(tileloss VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert version
    (output / "facts").write_text(
        f"{version[1]}, commit {git('rev-parse', '--short', 'HEAD').strip()}{state}\n"
    )


def faults(output: Path) -> list[str]:
    files = [path for path in output.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files)
    print(f"kit: {size / 2**20:.1f} MiB in {len(files)} files, {output}")
    found = [
        f"{path.relative_to(output)} names {ROOT}"
        for path in files
        if str(ROOT).encode() in path.read_bytes()
    ]
    if size > LARGEST_BYTES:
        found.append(f"expected at most {LARGEST_BYTES >> 20} MiB, got {size / 2**20:.1f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="pack")
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--cuda", type=Path, required=True, help="libtileloss_cuda.so")
    parser.add_argument("--peers", type=Path, help="an archive of other packages")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    pack(options.build, options.cuda, options.peers, options.output)
    found = faults(options.output)
    for fault in found:
        print(f"kit: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
