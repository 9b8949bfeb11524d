"""tileloss.torch on CUDA tensors: run on the host in a process of its own, as the library is another; traced in this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tileloss._core.library import library_path

ROOT = Path(__file__).parents[2]


def run_on_the_host(*arguments: str | Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("NOT RUN: CUDA's threads are fibers of x86-64")
    library = library_path().parent / "cuda_on_host/libtileloss.so"
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"TILELOSS_LIBRARY": str(library), "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.full
def test_cuda_tensors_run_on_the_host() -> None:
    files = map(Path(__file__).with_name, ("cuda_losses.py", "cuda_models.py"))
    run_on_the_host("-m", "pytest", "-q", "-n0", *files)


@pytest.mark.full
def test_two_ranks_each_on_a_device_of_its_own(tmp_path: Path) -> None:
    run_on_the_host(Path(__file__).with_name("cuda_ranks.py"), tmp_path)
    first, second = (torch.load(tmp_path / f"2-{rank}.pt") for rank in range(2))
    for case, (failure, found, gradients) in first.items():
        assert failure is None, f"rank 0, {case}: {failure}"
        assert second[case][0] is None, f"rank 1, {case}: {second[case][0]}"
        for mine, other in ((found, second[case][1]), (gradients, second[case][2])):
            for name, x in mine.items():
                torch.testing.assert_close(
                    x, other[name], rtol=0, atol=0, equal_nan=True, msg=f"{case}: {name}"
                )
