"""Options by name as an operator takes them: tileloss._core.options, with tensors of one element as scalars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tileloss._core import options
from tileloss._core.functions import FUNCTIONS, Function
from tileloss._core.structs import Scalar
from tileloss.torch._dtensor import local_rows
from tileloss.torch._tensors import CPU, refuse_transforms

Value = float | int | bool | str | Tensor | None
_NUMBERS = (int, float, torch.SymFloat, torch.SymInt)


class Options(NamedTuple):
    names: str
    values: list[float]
    scalars: Tensor | None


def encode(function: str, given: Mapping[str, Value], preset: str = "") -> Options:
    """``given``: options by their names in losses.md; None: the default, or the preset's."""
    described, compiling = FUNCTIONS[function], torch.compiler.is_compiling()
    tensors: dict[str, Tensor] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            tensors[name] = _as_scalar(described, name, local_rows(name, value))
        elif compiling and isinstance(value, float) and _changes(described, name, value, preset):
            # As one of `values` a changing number would be a constant of the graph, compiled anew at each change; torch.compile
            # keeps it symbolic where it is a factor.
            number = described.number(name, value, _NUMBERS)
            tensors[name] = torch.ones(1, dtype=torch.float32, device=CPU) * number
    if tensors:
        given = {name: value for name, value in given.items() if name not in tensors}
    names, values = options.encode(described, given, preset, list(tensors), _NUMBERS)
    scalars = list(tensors.values())
    joined = None if not scalars else scalars[0] if len(scalars) == 1 else torch.cat(scalars)
    return Options(names, values, joined)


def _as_scalar(function: Function, name: str, value: Tensor) -> Tensor:
    function.option(name)
    if value.numel() != 1:
        raise ValueError(
            f"{name}: expected a number or a tensor of one element, got shape {list(value.shape)}"
        )
    refuse_gradient(name, value)
    return value.detach().to(device="cpu", dtype=torch.float32).reshape(1)


def _changes(function: Function, name: str, value: float, preset: str) -> bool:
    option = function.option(name)
    return option.kind is Scalar and (bool(preset) or value != option.default)


def refuse_gradient(name: str, tensor: Tensor) -> None:
    """Raises where autograd would expect a gradient of ``tensor`` and get none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor without gradient, as it is not differentiated (detach it), got one that requires it"
        )
    refuse_transforms(tensor)
