"""tileloss.torch.distributed as tileloss.torch: functions of whole tensors, which every rank cuts, with the whole gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tileloss.torch import distributed as td


def bounds(columns: int, widths: list[int] | None = None) -> tuple[int, int]:
    """This rank's columns: equal shares, or of these widths."""
    rank, count = dist.get_rank(), dist.get_world_size()
    if widths is None:
        assert columns % count == 0
        widths = [columns // count] * count
    return sum(widths[:rank]), sum(widths[: rank + 1])


class _Cut(torch.autograd.Function):
    """A rank's columns of a tensor; the gradient is gathered from all of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, begin: int, end: int) -> Tensor:
        ctx.shape, ctx.dim, ctx.begin, ctx.end = whole.shape, dim, begin, end
        return whole.narrow(dim, begin, end - begin).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = grad.new_zeros(ctx.shape, dtype=torch.float32)
        whole.narrow(ctx.dim, ctx.begin, ctx.end - ctx.begin).copy_(grad)
        dist.all_reduce(whole)
        return whole.to(grad.dtype), None, None, None


def cut(whole: Tensor, dim: int, widths: list[int] | None = None) -> Tensor:
    part: Tensor = _Cut.apply(whole, dim, *bounds(whole.shape[dim], widths))
    return part


class Whole:
    """`name` of tileloss.torch.distributed with the arguments of tileloss.torch's. `widths`: of the shards; None: equal ones."""

    def __init__(self, name: str, widths: list[int] | None = None, **more: Any) -> None:
        self._function, self._is_linear = getattr(td, name), name.startswith("linear_")
        self._has_teacher_head = name == "linear_distillation"
        self._widths, self._more = widths, more

    def _cut_floats(self, given: Iterable[Any]) -> Iterator[Any]:
        """Class probabilities, a teacher's logits or its head, which have no gradient."""
        place, dim = (2, 0) if self._has_teacher_head else (int(self._is_linear), -1)
        for number, x in enumerate(given):
            is_cut = number == place and isinstance(x, Tensor) and x.is_floating_point()
            yield cut(x, dim, self._widths) if is_cut else x

    def __call__(self, input: Tensor, *given: Any, **options: Any) -> Any:
        if (words := options.get("allowed")) is not None:
            begin, end = bounds(
                input.shape[-1] if not self._is_linear else len(given[0]), self._widths
            )
            options["allowed"] = words[..., begin // 32 : -(-end // 32)]
        given = tuple(self._cut_floats(given))
        if not self._is_linear:
            options.pop("grad_in_forward", None)
            return self._function(cut(input, -1, self._widths), *given, **self._more, **options)
        weight, *rest = given
        bias = options.pop("linear_bias", None)
        if bias is not None:
            options["linear_bias"] = cut(bias, 0, self._widths)
        if (low_rank := options.pop("low_rank", None)) is not None:
            options["low_rank"] = low_rank[0], cut(low_rank[1], 0, self._widths)
        return self._function(input, cut(weight, 0, self._widths), *rest, **self._more, **options)
