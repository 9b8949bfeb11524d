"""conftest.py: what says NOT RUN, and where that is a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_passes(): pass
def test_of_a_package():
    raise ModuleNotFoundError("No module named 'trl'")  # as an import does
@pytest.mark.skipif(True, reason="NOT RUN: fewer GPUs than 2")
def test_of_two_gpus(): pass
def test_of_a_library(): pytest.skip("NOT RUN: no library")
@pytest.mark.xfail
def test_known_to_fail(): assert False
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("wish", "failures", "skips"),
    [("", 0, 4), ("fail", 4, 0), ("fail: no trl, fewer GPUs than 2", 1, 3), ("fail: no trl", 2, 2)],
)
def test_what_is_not_run_may_be_a_failure(
    wish: str, failures: int, skips: int, tmp_path: Path
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_others.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'trl.trainer'\")"
    )
    (tmp_path / "conftest.py").symlink_to(Path(__file__).with_name("conftest.py"))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "--continue-on-collection-errors", tmp_path],
        env=os.environ | {"TILELOSS_TEST_NOT_RUN": wish},
        capture_output=True,
        text=True,
    )
    last = run.stdout.splitlines()[-1]
    counts = {word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (\w+)", last)}
    found = counts.get("failed", 0) + counts.get("error", 0)
    assert (found, counts.get("skipped", 0), counts["passed"]) == (failures, skips, 1), run.stdout
