"""Constexpr functions of the host's that kernels call, as nvcc lets them (--expt-relaxed-constexpr). Where such a function
comes to a builtin that devices lack, nvcc leaves out all that leads there and says nothing: std::countr_zero(word) was 32.

host_functions.py NVCC FLAG... FILE.cu...: without that flag nvcc names each call; prints those of functions that are not known
to be right, exit code 1 where there are any.
"""

import re
import subprocess
import sys

RELAXED = "--expt-relaxed-constexpr"
# What was seen to be right in PTX, and calls no other: numbers' limits, formats and comparisons, lambdas, constants' types.
KNOWN = {
    "bit_cast",
    "from_float",
    "infinity",
    "max",
    "min",
    "operator int",
    "operator()",
    "quiet_NaN",
    "to_float",
}
CALL = re.compile(
    r'^(\S+\(\d+\)): .*\bcalling a constexpr __host__ function\("([^"]+)"\) from', re.M
)


def calls(nvcc: str, flags: list[str], source: str) -> set[tuple[str, str]]:
    """Where, and of what; empty where nvcc says something else."""
    command = [nvcc, *flags, "-ptx", "-Xcudafe", "--error_limit=100000", source, "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True)
    found = set(CALL.findall(said.stdout + said.stderr))
    if not found:
        raise SystemExit(f"{source}: expected calls of the host's functions:\n{said.stderr}")
    return found


def main() -> int:
    nvcc, *arguments = sys.argv[1:]
    flags = [a for a in arguments if not a.endswith(".cu") and a != RELAXED]
    sources = [a for a in arguments if a.endswith(".cu")]
    found = {call for source in sources for call in calls(nvcc, flags, source)}
    new = sorted(call for call in found if call[1] not in KNOWN)
    for place, name in new:
        print(f"{place}: {name}, a function of the host's: look at its PTX first")
    unused = sorted(KNOWN - {name for _, name in found})
    for name in unused:
        print(f"host_functions.py: no kernel calls {name}")
    return 1 if new or unused else 0


if __name__ == "__main__":
    sys.exit(main())
