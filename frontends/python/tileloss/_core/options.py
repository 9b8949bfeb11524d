"""Options by name on their way to the library: a string of names beside a list of numbers.

A framework's operators have no place for a dictionary. The string is "preset:names of values;names of scalars": the numbers
travel as ``values`` (which a tracer may hold symbolically), what the caller gave as tensors of one element as a float32 array of
``scalars``. An integer too large for a double is part of its name: "ignore_index=9223372036854775807".
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_char
from functools import lru_cache
from typing import Any, NamedTuple

from tileloss._core.functions import Function

Struct = ctypes.Array[c_char]


def encode(
    function: Function,
    given: Mapping[str, Any],
    preset: str = "",
    scalars: Sequence[str] = (),
    numbers: tuple[type[Any], ...] = (int, float),
) -> tuple[str, list[float]]:
    """(names, values). ``given``: options by name; None: the default, or the preset's. ``scalars``: the names of what travels
    apart. ``numbers``: the types that pass for one."""
    names: list[str] = []
    values: list[float] = []
    for name, value in given.items():
        if value is None:
            continue
        option = function.option(name)
        if not preset and type(value) is type(option.usual) and value == option.usual:
            continue
        number = function.number(name, value, numbers)
        if not function.is_exact(name, number):
            names.append(f"{name}={number}")
        elif preset or number != option.default:
            names.append(name)
            values.append(number)
    return f"{preset}:{','.join(names)};{','.join(scalars)}", values


class _Key(NamedTuple):
    preset: str
    names: tuple[str, ...]
    integers: tuple[tuple[str, int], ...]  # those that are not among the values
    scalars: tuple[str, ...]
    given: frozenset[str]  # all of these


@lru_cache(maxsize=256)
def _parse(names: str) -> _Key:
    preset, _, rest = names.partition(":")
    plain, _, others = rest.partition(";")
    named = [name.partition("=") for name in plain.split(",") if name]
    scalars = tuple(filter(None, others.split(",")))
    return _Key(
        preset,
        tuple(name for name, _, value in named if not value),
        tuple((name, int(value)) for name, _, value in named if value),
        scalars,
        frozenset((*(name for name, _, _ in named), *scalars)),
    )


@lru_cache(maxsize=256)
def _struct(function: Function, names: str, values: tuple[float, ...]) -> Struct:
    key = _parse(names)
    options = function.new_options(key.preset)
    for name, value in (*zip(key.names, values, strict=True), *key.integers):
        function.set_value(options, name, value)
    return options


def to_struct(
    function: Function, names: str, values: Sequence[float], scalars: int | None = None
) -> Struct:
    """The options struct, not to be written to. ``scalars``: where their float32 numbers are, which must outlive the call."""
    options = _struct(function, names, tuple(values))
    if scalars is None:
        return options
    options = copied(options)
    for i, name in enumerate(_parse(names).scalars):
        function.set_pointer(options, name, scalars + 4 * i)
    return options


def copied(options: Struct) -> Struct:
    return type(options).from_buffer_copy(options)


def given_names(names: str) -> frozenset[str]:
    """The options that were given by name, a preset's apart."""
    return _parse(names).given


def by_name(
    function: Function, names: str, values: Sequence[float], scalars: Sequence[float]
) -> dict[str, object]:
    """The options that were given, as a caller writes them."""
    key = _parse(names)
    found: dict[str, object] = {
        **dict(key.integers),
        **dict(zip(key.scalars, scalars, strict=True)),
    }
    for name, value in zip(key.names, values, strict=True):
        choices = function.option(name).choices
        found[name] = choices[int(value)] if choices else value
    return found


def is_per_row(function: Function, names: str, values: Sequence[float]) -> bool:
    """Whether the loss is one number a row: reduction or aggregation "none". Touches no struct, as ``values`` may be symbolic."""
    name = "reduction" if "reduction" in function.options else "aggregation"
    plain = _parse(names).names
    if name not in plain:
        return False
    return function.option(name).choices[int(values[plain.index(name)])] == "none"
