"""tileloss.torch on CUDA tensors, on the host and on GPUs, in processes of their own, as the library is another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuda_runs import DEVICES, HERE, run_on


@pytest.mark.full
@DEVICES
def test_losses_and_models(device: str) -> None:
    run_on(device, "-m", "pytest", "-q", "-n0", HERE / "cuda_losses.py", HERE / "cuda_models.py")


@pytest.mark.full
@DEVICES
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_each_on_a_device_of_its_own(device: str, backend: str, tmp_path: Path) -> None:
    if (device, backend) == ("host", "nccl"):
        pytest.skip("NOT RUN: NCCL wants GPUs")
    run_on(device, HERE / "cuda_ranks.py", tmp_path, backend, devices=2)
    first, second = (torch.load(tmp_path / f"2-{rank}.pt") for rank in range(2))
    for case, (failure, found, gradients) in first.items():
        assert failure is None, f"rank 0, {case}: {failure}"
        assert second[case][0] is None, f"rank 1, {case}: {second[case][0]}"
        for mine, other in ((found, second[case][1]), (gradients, second[case][2])):
            for name, x in mine.items():
                torch.testing.assert_close(
                    x, other[name], rtol=0, atol=0, equal_nan=True, msg=f"{case}: {name}"
                )
