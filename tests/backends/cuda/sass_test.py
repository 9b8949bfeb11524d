"""What the hottest kernel's loops are in machine code: cross_entropy's value and gradient in one go, default options, bfloat16.

sass_test.py CUBIN [NVDISASM]: prints what it counts, fails where a bar is missed; NOT RUN without nvdisasm.
"""

import pathlib
import re
import shutil
import subprocess
import sys

KERNEL = re.compile(r"whole_rowsI\w*8Bfloat16ELb1E\w*CrossEntropy")
COLUMNS = 32  # of a thread's round: 4 groups of 8
MOST_INSTRUCTIONS = 11  # a column, all three loops together
MOST_REGISTERS = 65536 // (2 * 384)  # two blocks a multiprocessor
LIMITS = pathlib.Path(__file__).parents[3] / "src/backends/cuda/limits.h"


def loops(code: str) -> list[list[str]]:
    """Of each loop that has no other in it, the instructions of its shortest way round: where nothing rare is to be done."""
    lines = re.findall(r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", code, re.M)
    labels = {label: i for i, (label, _) in enumerate(lines) if label}
    branches: dict[int, int] = {}
    for i, (_, instruction) in enumerate(lines):
        if to := re.search(r"\bBRA.*\((\.L_x_\d+)\)", instruction):
            branches[i] = labels[to[1]]
    backward = [(to, i) for i, to in branches.items() if to < i]
    innermost = [
        a for a in backward if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in backward)
    ]
    return [shortest_way(lines, branches, *loop) for loop in innermost]


def shortest_way(
    lines: list[tuple[str, str]], branches: dict[int, int], first: int, last: int
) -> list[str]:
    """From line to line or along forward branches, from the first to the last of these lines."""
    ways = {last: [lines[last][1]]}
    for i in range(last - 1, first - 1, -1):
        text = lines[i][1]
        on = [] if i in branches and text.startswith("BRA") else [i + 1]
        on += [branches[i]] if i in branches and i < branches[i] <= last else []
        following = [ways[j] for j in on if j in ways]
        if following:
            ways[i] = ([text] if text else []) + min(following, key=len)
    return ways.get(first, [])


def main() -> int:
    cubin = pathlib.Path(sys.argv[1])
    disassembler = shutil.which(sys.argv[2] if len(sys.argv) > 2 else "nvdisasm")
    if disassembler is None or not cubin.exists():
        print("NOT RUN: there is no " + ("nvdisasm" if cubin.exists() else cubin.name))
        return 0
    text = subprocess.run([disassembler, cubin], check=True, capture_output=True, text=True).stdout
    sections = re.split(r"^\s*\.section\s+", text, flags=re.M)
    code = next(s for s in sections if s.startswith(".text.") and KERNEL.search(s.splitlines()[0]))

    def only(what: str, **counts: int) -> list[str]:
        """The loop that has so many of these instructions."""
        names = {name.replace("_", "."): n for name, n in counts.items()}
        fitting = [
            x
            for x in loops(code)
            if all(sum(name in i for i in x) == n for name, n in names.items())
        ]
        assert len(fitting) == 1, f"{what}: expected one loop with {names}, got {len(fitting)}"
        return fitting[0]

    copying = only("copies", LDGSTS_E_BYPASS_128=4)
    forward = only("forward", MUFU_EX2=COLUMNS, LDS_128=4, STG=0)
    backward = only("backward", MUFU_EX2=COLUMNS, LDS_128=4, STG_E_128=4)
    parts = [len(x) / COLUMNS for x in (copying, forward, backward)]
    print(
        "instructions a column: copies {:.2f}, forward {:.2f}, backward {:.2f}".format(*parts),
        f"in all {sum(parts):.2f}",
    )
    assert sum(parts) <= MOST_INSTRUCTIONS
    assert not re.search(r"\b(STL|LDL)\b", code), "local memory"
    registers = max(int(r) for r in re.findall(r"\bR(\d+)\b", code)) + 1
    print("registers:", registers)
    assert registers <= MOST_REGISTERS
    # One of them in two branches would be two barriers.
    barriers = [len(re.findall(rf"\bUCGABAR_{part}\b", code)) for part in ("ARV", "WAIT")]
    assert barriers == [2, 2], f"cluster barriers: {barriers}"
    limit = re.search(r"kSharedOfWholeRow = (\d+)", LIMITS.read_text())
    shared = re.findall(r"^\.nv\.shared\.\w*whole_rows\w*:\s+\.zero\s+(\d+)", text, re.M)
    print("bytes of shared memory:", ", ".join(sorted(set(shared))))
    assert limit and 0 < max(int(n) for n in shared) <= int(limit[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
