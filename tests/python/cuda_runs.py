"""Tests on CUDA's device in processes of their own, as the library is another: on the host, or on GPUs."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tileloss._core.library import library_path

HERE = Path(__file__).parent
DEVICES = pytest.mark.parametrize("device", ["host", "gpu"])


def gpu_count() -> int:
    """As the driver says; JAX itself would start here."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return 0
    driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def run_on(device: str, *arguments: str | Path, devices: int = 1, **more: str) -> None:
    """A program of Python's, on a library of the kernels as g++ compiled them, or on that of GPUs."""
    folder = library_path().parent
    if device == "host":
        folder /= "cuda_on_host"
        if platform.machine() != "x86_64":
            pytest.skip("NOT RUN: CUDA's threads are fibers of x86-64")
    elif not (folder / "libtileloss_cuda.so").exists() or gpu_count() < devices:
        pytest.skip(f"NOT RUN: no libtileloss_cuda.so, or fewer GPUs than {devices}")
    environment = {n: x for n, x in os.environ.items() if n not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment |= {
        "TILELOSS_LIBRARY": str(folder / "libtileloss.so"),
        "TILELOSS_TEST_DEVICE": device,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    run = subprocess.run(
        [sys.executable, *arguments],
        env=environment | more,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
