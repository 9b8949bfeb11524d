"""Kernels as nvcc compiles them, run beside the host's compiler's (tests/cuda_on_host/ptx_beside.h).

ptx_test.py all FOLDER PROGRAM FILTER [PROGRAM FILTER]...: programs of tests pass with the PTX of the folder, and run all of its
kernels but those named here. ptx_test.py faults FOLDER PROGRAM: each fault that is put into a copy of the PTX is found.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

KERNEL = "_ZN8tileloss4impl4cuda"
# What these tests do not launch, or only with more than is run beside.
NOT_REACHED = {
    KERNEL + name
    for name in """
10each_indexINS0_6device10RowStageOfINS0_5SweepEEEEEvT_l
10each_indexINS1_12_GLOBAL__N_111SetIdentityEEEvT_l
10each_indexINS1_12_GLOBAL__N_19MergeRowsEEEvT_l
10whole_rowsINS0_7Float16ELb1ELb1ENS0_6device14CoefficientsOfINS0_10PolicyLossEEEEEvNS1_8SweepJobET2_b
10whole_rowsINS0_7Float16ELb1ELb1ENS0_6device14CoefficientsOfINS0_12CrossEntropyEEEEEvNS1_8SweepJobET2_b
10whole_rowsINS0_8Bfloat16ELb1ELb1ENS0_6device14CoefficientsOfINS0_10PolicyLossEEEEEvNS1_8SweepJobET2_b
10whole_rowsIfLb1ELb1ENS0_6device14CoefficientsOfINS0_10PolicyLossEEEEEvNS1_8SweepJobET2_b
10whole_rowsIfLb1ELb1ENS0_6device14CoefficientsOfINS0_12CrossEntropyEEEEEvNS1_8SweepJobET2_b
12forward_rowsINS0_7Float16ELb1ELb1EEEvNS1_8SweepJobE
13backward_rowsINS0_7Float16ELb1ELb1EEEvNS1_8SweepJobENS0_9RowStatesE
13each_then_sumINS0_6device10RowStageOfINS0_5SweepEEENS3_8LossTermENS3_8TakeLossEEEvT_T0_T1_lNS1_8SumPartsE
13each_then_sumINS0_6device10RowStageOfINS0_8LogprobsEEENS3_8LossTermENS3_8TakeLossEEEvT_T0_T1_lNS1_8SumPartsE
13each_then_sumINS1_6NoStepENS1_10WeightTermENS1_10TakeWeightEEEvT_T0_T1_lNS1_8SumPartsE
13forward_blockILb1ELb1EEEvNS1_8SweepJobENS1_11ForwardPartENS1_4RowsItEE
14backward_chunkINS1_13SlopesOfWordsELb1EEEvT_NS1_4RowsINS4_2ToEEE
14backward_chunkINS1_14SlopesOfLogitsINS0_8Bfloat16ELb0EEELb1EEEvT_NS1_4RowsINS6_2ToEEE
14backward_chunkINS1_14SlopesOfLogitsINS0_8Bfloat16ELb1EEELb1EEEvT_NS1_4RowsINS6_2ToEEE
14backward_chunkINS1_15SlopesAsOfWordsELb1EEEvT_NS1_4RowsINS4_2ToEEE
""".split()
}
# A test, a kernel, what of its PTX becomes what, and what is said. The first two are such as the first GPU found: a kernel
# without code, and a function of the host's that is 0 on a device.
FAULTS = [
    ("AllowedShards.*", "10begin_callINS1_9BeginningEEEvT_", KERNEL, "_ZN", "no PTX of the kernel"),
    (
        "AllowedShards.*",
        "13count_allowedENS1_8SweepJobEb",
        r"popc.b32 (\s*%r\d+), %r\d+",
        r"mov.b32 \1, 0",
        "nvcc's",
    ),
    ("*/SpecialValues.*:*/SavedState.*", "12forward_rowsI", "0f3E75FDEE", "0f3E76FDEE", "nvcc's"),
    (
        "*/SpecialValues.*:*/SavedState.*",
        "10whole_rowsI",
        "barrier.cluster.wait.aligned",
        "membar.gl",
        "nvcc's",
    ),
]


def run(program: str, tests: str, folder: str | pathlib.Path) -> tuple[int, str]:
    command = [program, "--gtest_brief=1", f"--gtest_filter={tests}"]
    environment = os.environ | {"TILELOSS_TEST_PTX": str(folder), "TILELOSS_TEST_DEVICE": "cuda"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    return done.returncode, done.stdout + done.stderr


def check_all(folder: str, programs: list[str]) -> int:
    missed: set[str] | None = None
    for program, tests in zip(programs[::2], programs[1::2], strict=True):
        status, said = run(program, tests, folder)
        print(
            "\n".join(
                said.splitlines()[-300:]
                if status
                else re.findall("cuda_on_host: .* of PTX beside.*", said)
            )
        )
        if status != 0:
            return 1
        these = set(re.findall(r"not run as PTX: (\w+)", said))
        missed = these if missed is None else missed & these
    assert missed is not None
    for name in sorted(missed ^ NOT_REACHED):
        print("not run as PTX:" if name in missed else "run now, or lost:", name)
    return 0 if missed == NOT_REACHED else 1


def check_faults(folder: str, program: str) -> int:
    failures = 0
    for tests, kernel, old, new, expected in FAULTS:
        with tempfile.TemporaryDirectory() as copy:
            changes = 0
            for file in pathlib.Path(folder).glob("*.ptx"):
                head, *entries = re.split(r"(?=\.entry )", file.read_text())
                for i, entry in enumerate(entries):
                    if entry.startswith(f".entry {KERNEL}{kernel}"):
                        entries[i], count = re.subn(old, new, entry)
                        changes += count
                (pathlib.Path(copy) / file.name).write_text(head + "".join(entries))
            status, said = run(program, tests, copy)
        lines = said.splitlines()[-4:]
        found = (
            status != 0
            and any(kernel in line for line in lines)
            and any(expected in line for line in lines)
        )
        if changes == 0 or not found:
            print(
                f"not found: {kernel}: {old}: {changes} changes, exit status {status}",
                *lines,
                sep="\n  ",
            )
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(
        check_all(sys.argv[2], sys.argv[3:])
        if sys.argv[1] == "all"
        else check_faults(sys.argv[2], sys.argv[3])
    )
