"""The library's functions and their options, as the library itself describes them (tileloss_get_function_info).

Options travel as a string of names beside a list of numbers, as a framework's operators have no place for a dictionary:
"preset:names of values;names of scalars". The numbers are ``values``, which a tracer may hold symbolically, so that the struct is
made no sooner than the call; what the caller gave as tensors of one element is a float32 array of ``scalars``. An integer too
large for a double is part of its name: "ignore_index=9223372036854775807".
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_char, c_double, c_int32, c_int64
from functools import lru_cache
from typing import Any, NamedTuple

from tileloss._core.library import lib, raise_on_error
from tileloss._core.structs import FunctionInfo, Scalar

_TYPES: dict[int, type] = {0: c_double, 1: c_int64, 2: Scalar, 3: c_int32}
FLAG = ("false", "true")
Struct = ctypes.Array[c_char]
_EXACT = 2**53  # integers up to here are doubles


class Option(NamedTuple):
    """One option of a function, in plain Python: torch.compile traces through the look-ups."""

    offset: int
    kind: type
    choices: tuple[str, ...]
    default: float  # NaN: not given
    usual: float | str  # the default as a caller writes it
    may_be_absent: bool  # the default stands for "not given"
    state_arrays: int  # bits of the row state that the loss or its backward may need if it is given
    minimum: float
    maximum: float
    exclusive_minimum: bool


class Function:
    """A registered function of the library: its options by name, its presets, its metrics."""

    def __init__(self, info: FunctionInfo) -> None:
        self.name: str = info.name.decode()
        self.encoded: bytes = info.name
        self.loss: str = info.loss.decode()  # the same from logits and fused with the LM head
        self.is_linear = bool(info.is_linear)
        self.info = info  # with the tensors it takes: slots.py
        self.tensors = tuple(t.name.decode() for t in info.tensors[: info.num_tensors])
        self.options_size: int = info.options_size
        self.is_loss = bool(info.is_loss)
        self.presets = info.presets.decode().split("|") if info.presets else []
        self.metrics = info.metrics.decode().split("|") if info.metrics else []
        self.options: dict[str, Option] = {}
        for i in range(info.num_fields):
            field = info.fields[i]
            kind, default = _TYPES[field.type], field.default_value
            choices = tuple(field.choices.decode().split("|")) if field.choices else ()
            usual = choices[int(default)] if choices else default
            if kind is c_int64:
                usual = int(default)
            self.options[field.name.decode()] = Option(
                field.offset,
                kind,
                choices,
                default,
                usual,
                bool(field.has_absent),
                field.state_arrays,
                field.minimum,
                field.maximum,
                bool(field.exclusive_minimum),
            )

    def option(self, name: str) -> Option:
        if name not in self.options:
            raise TypeError(
                f"{self.name}: expected an option among {', '.join(self.options)}, got {name!r}"
            )
        return self.options[name]

    def choice(self, name: str, value: str) -> int:
        """The index of a choice, e.g. reduction "sum" -> 1."""
        choices = self.option(name).choices
        if value not in choices:
            expected = f"one of {', '.join(choices)}" if choices else "a number"
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
        return choices.index(value)

    def number(self, name: str, value: Any, numbers: tuple[type[Any], ...] = (int, float)) -> Any:
        """What stands for an option's value, of one of the types ``numbers``; raises if it can be none."""
        if isinstance(value, str):
            return float(self.choice(name, value))
        option = self.option(name)
        if not isinstance(value, numbers):
            raise TypeError(
                f"{name}: expected a number or a tensor of one element, got {type(value).__name__}"
            )
        if option.choices and not (isinstance(value, bool) and option.choices == FLAG):
            raise TypeError(f"{name}: expected one of {', '.join(option.choices)}, got {value}")
        if value != value:  # to the library a NaN is an option that was not given
            raise ValueError(f"{name}: expected a number, got nan")
        if option.kind is c_int64 and not -_EXACT <= value <= _EXACT:
            if not isinstance(value, int):
                raise TypeError(f"{name}: expected an integer, got {value}")
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"{name}: expected an integer of 64 bits, got {value}")
        return value

    def is_exact(self, name: str, value: float) -> bool:
        """Whether a double holds the value: an integer beyond 2^53 may be none."""
        return self.options[name].kind is not c_int64 or -_EXACT <= value <= _EXACT

    def new_options(self, preset: str) -> Struct:
        """An options struct: the defaults, or those of ``preset`` when it is not ""."""
        options = ctypes.create_string_buffer(self.options_size)
        size = self.options_size
        if preset:
            status = lib.tileloss_options_preset(self.encoded, preset.encode(), options, size)
        else:
            status = lib.tileloss_options_init(self.encoded, options, size)
        raise_on_error(status)
        return options

    def _place(self, options: Struct, name: str) -> Any:
        option = self.option(name)
        return option.kind.from_buffer(options, option.offset)  # type: ignore[attr-defined]

    def is_choice(self, options: Struct, name: str, value: str) -> bool:
        return bool(self._place(options, name).value == self.choice(name, value))

    def set_value(self, options: Struct, name: str, value: float) -> None:
        place = self._place(options, name)
        if isinstance(place, (c_int32, c_int64)):
            if value != int(value):
                raise TypeError(f"{name}: expected an integer, got {value}")
            value = int(value)
        place.value = value

    def set_pointer(self, options: Struct, name: str, address: int) -> None:
        """Has the library read the option where ``address`` points: one float32."""
        place = self._place(options, name)
        if not isinstance(place, Scalar):
            scalars = [n for n, option in self.options.items() if option.kind is Scalar]
            raise TypeError(
                f"{name}: expected a number, got a tensor (only {', '.join(scalars)} can be tensors)"
            )
        place.pointer = address


def _all_functions() -> dict[str, Function]:
    found = {}
    for i in range(lib.tileloss_function_count()):
        info = FunctionInfo(struct_size=ctypes.sizeof(FunctionInfo))
        raise_on_error(lib.tileloss_get_function_info(i, ctypes.byref(info)))
        function = Function(info)
        found[function.name] = function
    return found


FUNCTIONS = _all_functions()
# Not for callers: those of a vocabulary cut into shards, which the front ends find themselves, and those of the LM head:
# compute_dtype is an argument of its own, and gradients are added up by the framework.
_NOT_PUBLIC = frozenset({"vocab_start", "vocab_total", "compute_dtype", "accumulate"})


# By function: the names of the options that a caller may give.
PUBLIC_OPTIONS = {
    name: dict.fromkeys(option for option in function.options if option not in _NOT_PUBLIC)
    for name, function in FUNCTIONS.items()
}

# What cross_entropy is where class probabilities stand for labels; by name, with their defaults, the options that it lacks.
OF_PROBABILITIES = "soft_cross_entropy"
_OF_LABELS = {
    name: option.usual
    for name, option in FUNCTIONS["cross_entropy"].options.items()
    if name not in FUNCTIONS[OF_PROBABILITIES].options
}


# ------------------------------------------------------------------------------------------------ options by name


def options_of_probabilities(given: Mapping[str, Any]) -> dict[str, Any]:
    """cross_entropy's as OF_PROBABILITIES takes them; raises where one that it lacks is not at its default."""
    for name, usual in _OF_LABELS.items():
        if given.get(name, usual) != usual:
            default = f"{usual:g}" if isinstance(usual, float) else usual
            raise ValueError(
                f"{name}: expected {default} with class probabilities, got {given[name]}"
            )
    return {name: value for name, value in given.items() if name not in _OF_LABELS}


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
        option = function.options.get(name) or function.option(name)
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


def scalar_names(names: str) -> tuple[str, ...]:
    """The options whose numbers travel apart, in their order."""
    return _parse(names).scalars


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
