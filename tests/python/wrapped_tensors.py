"""Stand-ins for the quantized weights of torchao and NF4: wrapper subclasses, which have no memory of their own."""

from __future__ import annotations

from typing import Any

import torch


class Quantized(torch.Tensor):
    """Eighths as int8, which say that they are ``dtype``; operations but the bookkeeping of Parameter are refused."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.codes = codes

    def dequantize(self) -> torch.Tensor:
        return self.codes.to(self.dtype) / 8

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return type(self).__name__

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].dtype)
        if function is torch.ops.aten.t.default:  # of torch.nn.functional.linear
            return args[0].dequantize().t()
        raise NotImplementedError(str(function))


class NormalFloat(Quantized):
    """As torchao's NF4Tensor, whose `dequantize` is of something else."""

    @staticmethod
    def dequantize(value: torch.Tensor, weight: Any) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError

    def get_original_weight(self) -> torch.Tensor:
        return self.codes.to(self.dtype) / 8


class Opaque(Quantized):
    """Without a way to what it stands for."""

    dequantize = torch.Tensor.dequantize  # type: ignore[assignment]


def quantized(shape: tuple[int, ...], kind: type[Quantized] = Quantized) -> torch.nn.Parameter:
    codes = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(5))
    return torch.nn.Parameter(kind(codes.to(torch.int8)), requires_grad=False)
