"""Kernels that the host launches and nvcc made no code of, which it says nothing about: where its own compiler takes an `if
constexpr` the other way than the host's, say. Such a launch fails on every GPU, as an "invalid resource handle".

lost_kernels.py FILE...: libtileloss_cuda.so, or objects of it, not stripped; prints them, exit code 1 where there are any.
"""

import pathlib
import re
import subprocess
import sys

# A kernel is a function of the host's, too. With its code nvcc leaves the kernel's name, without the L of what is a file's own.
STUB = re.compile(r" [tT] (_ZN8tileloss4impl4cuda)L(\w+)$", re.M)


def lost(path: str) -> list[str]:
    symbols = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
    stubs, code = STUB.findall(symbols), pathlib.Path(path).read_bytes()
    if not stubs:
        raise SystemExit(f"{path}: expected kernels, found none")
    return [name for space, name in stubs if f"{space}{name}\0".encode() not in code]


def main() -> int:
    found = [(path, name) for path in sys.argv[1:] for name in lost(path)]
    for path, name in found:
        print(f"{path}: no code of the kernel {name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
