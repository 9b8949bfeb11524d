"""What the hottest kernel is in machine code: cross_entropy's value and gradient in one go, default options, bfloat16.

sass_test.py CUBIN [NVDISASM]: prints what it counts, fails where a bar is missed; NOT RUN without nvdisasm.
"""

import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

KERNEL = re.compile(r"whole_rowsI\w*8Bfloat16ELb1ELb0E\w*CrossEntropy")
COLUMNS = 32  # of a thread's round: 4 groups of 8
MOST_INSTRUCTIONS = 11  # a column, all three loops together
MOST_REGISTERS = 65536 // (2 * 384)  # two blocks a multiprocessor
# From the cluster's first barrier to its second, where all threads wait for one of them, instructions and those of doubles.
MOST_SERIAL, MOST_SERIAL_OF_DOUBLES = 320, 60
DOUBLES = re.compile(r"\b(?:D(?:ADD|MUL|FMA|SETP|MNMX)|[FI]2F\.\S*F64|F2I\S*F64|MUFU\.\w+64H?)")
# What that thread does there, in this order: reads what the others have seen, adds it up, exp(), 1 / sum, what is the row's in
# float: the maximum, its factor, the label's gradient; writes.
SERIAL = [
    re.compile(mark)
    for mark in (
        r"\bLD\.E",
        "SHFL",
        r"DADD .*e\+15",
        r"MUFU\.RCP64H",
        *3 * (r"F2F\.F32\.F64",),
        r"\bST\.E",
    )
]
MEMORY = re.compile(r"\b(?:LD[GSL]?|ST[GSL]?|LDGSTS|ATOM\w*|RED)\b")
LIMITS = pathlib.Path(__file__).parents[3] / "src/backends/cuda/limits.h"


Lines = list[tuple[str, str]]  # a label or an instruction
Branches = dict[int, int]  # from line to line


def parsed(code: str) -> tuple[Lines, Branches]:
    lines = re.findall(r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", code, re.M)
    labels = {label: i for i, (label, _) in enumerate(lines) if label}
    branches: Branches = {}
    for i, (_, instruction) in enumerate(lines):
        if to := re.search(r"\bBRA.*\((\.L_x_\d+)\)", instruction):
            branches[i] = labels[to[1]]
    return lines, branches


def loops(lines: Lines, branches: Branches) -> list[list[str]]:
    """Of each loop that has no other in it, the instructions of its shortest way round: where nothing rare is to be done."""
    backward = [(to, i) for i, to in branches.items() if to < i]
    innermost = [
        a for a in backward if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in backward)
    ]
    return [shortest_way(lines, branches, *loop) for loop in innermost]


def shortest_way(
    lines: Lines, branches: Branches, first: int, last: int, marks: Sequence[re.Pattern] = ()
) -> list[str]:
    """From line to line or along forward branches, from the first to the last of these lines, past all marks in their order."""
    ways = {(last, len(marks)): [lines[last][1]]}  # from a line, with so many marks behind it
    for i in range(last - 1, first - 1, -1):
        text = lines[i][1]
        on = [] if re.match(r"BRA\s+`", text) else [i + 1]
        on += [branches[i]] if i in branches and i < branches[i] <= last else []
        for passed in range(len(marks) + 1):
            here = passed + int(passed < len(marks) and bool(marks[passed].search(text)))
            following = [ways[j, here] for j in on if (j, here) in ways]
            if following:
                ways[i, passed] = ([text] if text else []) + min(following, key=len)
    return ways.get((first, 0), [])


def main() -> int:
    cubin = pathlib.Path(sys.argv[1])
    disassembler = shutil.which(sys.argv[2] if len(sys.argv) > 2 else "nvdisasm")
    if disassembler is None or not cubin.exists():
        print("NOT RUN: there is no " + ("nvdisasm" if cubin.exists() else cubin.name))
        return 0
    text = subprocess.run([disassembler, cubin], check=True, capture_output=True, text=True).stdout
    sections = re.split(r"^\s*\.section\s+", text, flags=re.M)
    # griddepcontrol.wait, then launch_dependents, in every kernel.
    for kernel in (s for s in sections if s.startswith(".text.")):
        before, waits, after = kernel.partition("ACQBULK")
        assert waits and "PREEXIT" in after, f"never waits: {kernel.splitlines()[0]}"
        assert not MEMORY.search(before), f"memory before it waits: {kernel.splitlines()[0]}"
    code = next(s for s in sections if s.startswith(".text.") and KERNEL.search(s.splitlines()[0]))
    lines, branches = parsed(code)

    def only(what: str, **counts: int) -> list[str]:
        """The loop that has so many of these instructions."""
        names = {name.replace("_", "."): n for name, n in counts.items()}
        fitting = [
            x
            for x in loops(lines, branches)
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
    begin, end = (
        [i for i, (_, text) in enumerate(lines) if part in text][nth]
        for part, nth in (("UCGABAR_WAIT", 0), ("UCGABAR_ARV", 1))
    )
    serial = shortest_way(lines, branches, begin, end, SERIAL)
    of_doubles = sum(bool(DOUBLES.search(x)) for x in serial)
    print("between the barriers:", len(serial), "instructions, of doubles", of_doubles)
    assert 0 < len(serial) <= MOST_SERIAL and of_doubles <= MOST_SERIAL_OF_DOUBLES
    limit = re.search(r"kSharedOfWholeRow = (\d+)", LIMITS.read_text())
    shared = re.findall(r"^\.nv\.shared\.\w*whole_rows\w*:\s+\.zero\s+(\d+)", text, re.M)
    print("bytes of shared memory:", ", ".join(sorted(set(shared))))
    assert limit and 0 < max(int(n) for n in shared) <= int(limit[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
