"""What cuda_on_host.py has, on a GPU. The tests of both find it in cuda_device.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

CudaTensor = Tensor
OTHER = min(1, torch.cuda.device_count() - 1)
BACKEND = "nccl"
START = "spawn"  # of processes: CUDA is used before, and does not live through a fork
# torch's own operators: a GPU's sums have another order than the CPU's.
TOLERANCE_OF_MODELS = 1e-4
BACKWARD_ENDS = 1.0  # s


def to_device(x: Tensor, index: int = 0) -> Tensor:
    return x.detach().to(torch.device("cuda", index), copy=True)


def get(x: Tensor) -> Tensor:
    assert x.is_cuda
    return x.detach().cpu()


def move(module: torch.nn.Module) -> None:
    module.to("cuda:0")


class Traffic:
    """A GPU counts nothing."""

    counts = False
    loaded, stored, queued, operators = 0, 0, 0, [""]

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None: ...


def reads() -> AbstractContextManager[None]:
    return nullcontext()


def installed() -> AbstractContextManager[None]:
    return nullcontext()


class Graph:
    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capture(self) -> Iterator[None]:
        with torch.cuda.graph(self._graph):
            yield

    def replay(self) -> None:
        self._graph.replay()
