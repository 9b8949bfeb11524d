"""Options by name on their way through an operator: a string of names beside a list of numbers and a tensor of scalars.

An operator's schema has no place for a dictionary. ``Options.names`` is "preset:names of values;names of scalars"; the numbers
travel as ``values`` (which torch.compile may hold symbolically) and what the caller gave as 0-d tensors as ``scalars``. An
integer too large for a double is part of its name: "ignore_index=9223372036854775807".
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int64
from functools import lru_cache
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from tileloss._library import FUNCTIONS, Function, Scalar
from tileloss.torch._tensors import CPU

_FLAG = ("false", "true")
_EXACT = 2**53  # integers up to here are doubles, which `values` holds

Value = float | int | bool | str | Tensor | None


class Options(NamedTuple):
    names: str
    values: list[float]
    scalars: Tensor | None


def encode(function: str, given: Mapping[str, Value], preset: str = "") -> Options:
    """``given``: options by their names in losses.md; None: the default, or the preset's."""
    names: list[str] = []
    values: list[float] = []
    tensor_names: list[str] = []
    tensors: list[Tensor] = []
    described, compiling = FUNCTIONS[function], torch.compiler.is_compiling()
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"{name}: expected a number or a tensor of one element, got shape {list(value.shape)}"
                )
            refuse_gradient(name, value)
            tensor_names.append(name)
            tensors.append(value.detach().to(device="cpu", dtype=torch.float32).reshape(1))
            continue
        option = described.option(name)
        if isinstance(value, str):
            value = float(described.choice(name, value))
        elif not _is_number(value):
            raise TypeError(
                f"{name}: expected a number or a tensor of one element, got {type(value).__name__}"
            )
        elif option.choices and not (isinstance(value, bool) and option.choices == _FLAG):
            raise TypeError(f"{name}: expected one of {', '.join(option.choices)}, got {value}")
        elif value != value:  # to the library a NaN is an option that was not given
            raise ValueError(f"{name}: expected a number, got nan")
        elif option.kind is c_int64 and not -_EXACT <= value <= _EXACT:
            names.append(_large_integer(name, value))
            continue
        if not preset and value == option.default:
            continue
        if compiling and option.kind is Scalar and isinstance(value, float):
            # As one of `values` a changing number would be a constant of the graph, compiled anew at each change; torch.compile
            # keeps it symbolic where it is a factor.
            tensor_names.append(name)
            tensors.append(torch.ones(1, dtype=torch.float32, device=CPU) * value)
            continue
        names.append(name)
        values.append(value)
    key = f"{preset}:{','.join(names)};{','.join(tensor_names)}"
    scalars = None if not tensors else tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return Options(key, values, scalars)


def refuse_gradient(name: str, tensor: Tensor) -> None:
    """Raises where autograd would expect a gradient of ``tensor`` and get none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor without gradient, as it is not differentiated (detach it), got one that requires it"
        )


def _large_integer(name: str, value: float) -> str:
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {value}")
    return f"{name}={value}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, torch.SymFloat, torch.SymInt))


class _Key(NamedTuple):
    preset: str
    names: tuple[str, ...]
    integers: tuple[tuple[str, int], ...]  # those that are not among the values
    tensor_names: tuple[str, ...]


@lru_cache(maxsize=256)
def _parse(names: str) -> _Key:
    preset, _, rest = names.partition(":")
    plain, _, tensors = rest.partition(";")
    named = [name.partition("=") for name in plain.split(",") if name]
    return _Key(
        preset,
        tuple(name for name, _, value in named if not value),
        tuple((name, int(value)) for name, _, value in named if value),
        tuple(filter(None, tensors.split(","))),
    )


@lru_cache(maxsize=256)
def _struct(
    function: Function, names: str, values: tuple[float, ...]
) -> ctypes.Array[ctypes.c_char]:
    key = _parse(names)
    options = function.new_options(key.preset)
    for name, value in (*zip(key.names, values, strict=True), *key.integers):
        function.set_value(options, name, value)
    return options


def to_struct(
    function: Function, names: str, values: Sequence[float], scalars: Tensor | None
) -> ctypes.Array[ctypes.c_char]:
    """The options struct. It points into ``scalars``, which must outlive the call."""
    options = _struct(function, names, tuple(values))
    if scalars is None:
        return options
    options = type(options).from_buffer_copy(options)
    for i, name in enumerate(_parse(names).tensor_names):
        function.set_pointer(options, name, scalars.data_ptr() + 4 * i)
    return options


def is_given(names: str, name: str) -> bool:
    """Whether an option was given by name, a preset's apart."""
    key = _parse(names)
    return name in (*key.names, *key.tensor_names, *(integer for integer, _ in key.integers))


def choice_of(function: Function, names: str, values: Sequence[float], name: str) -> str | None:
    """What was chosen for an option, None if nothing was. Touches no struct, as ``values`` may be symbolic."""
    plain = _parse(names).names
    return function.option(name).choices[int(values[plain.index(name)])] if name in plain else None
