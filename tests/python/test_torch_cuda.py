"""tileloss.torch on CUDA tensors: run on the host in a process of its own, as the library is another; traced in this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tileloss._core.library import library_path

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_cuda_tensors_run_on_the_host() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("NOT RUN: CUDA's threads are fibers of x86-64")
    library = library_path().parent / "cuda_on_host/libtileloss.so"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", Path(__file__).with_name("cuda_losses.py")],
        env=os.environ | {"TILELOSS_LIBRARY": str(library)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
