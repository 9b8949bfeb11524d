"""Options by name for the row stage: names, defaults, choices, presets and ranges are the library's own (tileloss._core)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from ctypes import addressof, byref, c_float, sizeof
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tileloss._core import calls
from tileloss._core.functions import FLAG, FUNCTIONS, Function, Struct, copied
from tileloss._core.library import lib, raise_on_error
from tileloss._core.slots import ARGUMENTS, SLOTS, Args
from tileloss._core.structs import FLOAT32, FORWARD, Plan, Scalar
from tileloss.jax._rows.arithmetic import Number

_FINITE = (np.finfo(np.float32).min, np.finfo(np.float32).max)


class Options(NamedTuple):
    """The options of one call: choices and plain numbers known while tracing, scalars perhaps traced."""

    function: Function
    struct: Struct  # what was given as Python numbers; not to be written to
    arrays: dict[str, Any]  # float32 [] of the scalars that were given as arrays

    def number(self, name: str) -> Number:
        """A number; NaN stands for "not given", but not in an array."""
        if name in self.arrays:
            return self.arrays[name]
        return float(self._read(name))

    def plain(self, name: str) -> float:
        """A number that is no scalar of the ABI, and so always known."""
        return float(self._read(name))

    def integer(self, name: str) -> int:
        return int(self._read(name))

    def choice(self, name: str) -> str:
        return self.function.option(name).choices[int(self._read(name))]

    def flag(self, name: str) -> bool:
        assert self.function.option(name).choices == FLAG
        return bool(self._read(name))

    def is_given(self, name: str) -> bool:
        """Of options whose NaN means "not given"; an array counts as given."""
        return name in self.arrays or not math.isnan(self.plain(name))

    def may_differ(self, name: str, off: float) -> bool:
        """Whether it can be other than ``off``: what an array holds only the call knows."""
        return name in self.arrays or self.plain(name) != off

    @property
    def is_of_labels(self) -> bool:
        """Whether the rows are compared with labels and nothing else."""
        return not ARGUMENTS[self.function.name].target

    @property
    def is_per_row(self) -> bool:
        """Whether a loss is one for each row, not reduced."""
        by = "reduction" if "reduction" in self.function.options else "aggregation"
        return self.choice(by) == "none"

    def numbers(self) -> dict[str, float]:
        """The numbers that differ from the function's defaults, arrays apart; choices and flags by their numbers."""
        read = {name: float(self._read(name)) for name in self.function.options}
        return {
            name: value
            for name, value in read.items()
            if not math.isnan(value) and value != self.function.option(name).default
        }

    def within_ranges(self) -> tuple[Options, list[Array]]:
        """The options, with another number in place of an array that is out of its range, which `check` cannot know, or NaN; and
        of each array, as bool [], whether it is in its range."""
        arrays, are_right = {}, []
        for name, x in self.arrays.items():
            option = self.function.option(name)
            least, most = np.clip((option.minimum, option.maximum), *_FINITE)
            is_right = (x > least if option.exclusive_minimum else x >= least) & (x <= most)
            other = max(least, 0) + 1 if option.may_be_absent else option.default
            arrays[name] = jnp.where(is_right, x, np.float32(other))
            are_right.append(is_right)
        return self._replace(arrays=arrays), are_right

    def without_values(self) -> Options:
        """Which options are arrays is still known, but not the arrays."""
        return self._replace(arrays=dict.fromkeys(self.arrays))

    def _read(self, name: str) -> float:
        option = self.function.option(name)
        value = option.kind.from_buffer(self.struct, option.offset).value  # type: ignore[attr-defined]
        return value


def resolve(function: str, given: Mapping[str, Any] | None = None, preset: str = "") -> Options:
    """``given``: options by their names in docs/users/losses.md; None: the default, or the preset's.

    Choices are strings, flags bools, numbers Python's; what the ABI has as scalars (temperature, num_items, beta, ...) may be
    arrays of one element, traced or not.

    Raises:
        TypeError, ValueError: an unknown option, choice or preset, or an array where the ABI wants a number. Ranges are looked at
            by `check`.
    """
    described = FUNCTIONS[function]
    struct = described.new_options(preset)
    arrays: dict[str, Array] = {}
    for name, value in (given or {}).items():
        if value is None:
            continue
        if isinstance(value, np.generic) or (
            isinstance(value, np.ndarray) and described.option(name).kind is not Scalar
        ):
            value = value.item() if value.size == 1 else value
        if isinstance(value, (jax.Array, np.ndarray)):
            arrays[name] = _as_scalar(described, name, value)
        else:
            described.set_value(struct, name, described.number(name, value))
    return Options(described, struct, arrays)


def _as_scalar(function: Function, name: str, value: Any) -> Array:
    if function.option(name).kind is not Scalar:
        scalars = [n for n, option in function.options.items() if option.kind is Scalar]
        raise TypeError(
            f"{name}: expected a number, got an array (only {', '.join(scalars)} can be arrays)"
        )
    if value.size != 1:
        raise ValueError(
            f"{name}: expected a number or an array of one element, got shape {list(value.shape)}"
        )
    return jnp.asarray(value, jnp.float32).reshape(())


def check(
    given: Options,
    *,
    rows: int,
    columns: int,
    vectors: Mapping[str, int] | None = None,
    target: Mapping[str, Sequence[int]] | None = None,
    sequence_length: int = 0,
    has_labels: bool = True,
    outputs: Iterable[str] = (),
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Has the library look at a call before anything is traced further: ranges, sizes, what options must agree on.

    It is planned as a forward of float32 logits [rows, columns], or of a head that makes them, without data. ``vectors``: the
    sizes of the inputs besides labels, by their names in tileloss_args (mask, old_logp, advantages, class_weights, ...).
    ``target``: the shapes of what the rows are compared with besides, likewise (teacher_logits, teacher_head, ...).
    ``outputs``: of a loss, names of row outputs. ``renamed``: names in tileloss_args -> the caller's own, for errors.

    Raises:
        ValueError: as `tileloss.torch`'s: the argument, what was expected, what was given.
    """
    function, args = given.function, calls.new_args()
    if function.is_linear:
        calls.set_matrix(args, "hidden", 0, FLOAT32, (rows, 1), (1, 1))
        calls.set_matrix(args, "head", 0, FLOAT32, (columns, 1), (1, 1))
    else:
        calls.set_matrix(args, "logits", 0, FLOAT32, (rows, columns), (max(columns, 1), 1))
    for name, shape in (target or {}).items():
        _plan_tensor(args, name, shape, columns)
    of_labels = {"labels": rows} if has_labels else {}
    for name, size in {**of_labels, **(vectors or {}), **dict.fromkeys(outputs, rows)}.items():
        _plan_vector(args, name, size)
    if function.is_loss:
        _plan_vector(args, "loss", rows if given.is_per_row else 1)
    else:
        _plan_vector(args, "logp", rows)
    if sequence_length:
        args.sequence_length = sequence_length
    struct, place = copied(given.struct), c_float(1)
    for name in given.arrays:
        function.set_pointer(struct, name, addressof(place))
    plan = Plan(sizeof(Plan))
    status = lib.tileloss_make_plan(
        function.encoded, FORWARD, byref(args), struct, None, None, byref(plan)
    )
    raise_on_error(status, renamed)


def _plan_tensor(args: Args, name: str, shape: Sequence[int], columns: int) -> None:
    if SLOTS[name].rank == 1:
        return _plan_vector(args, name, shape[0])
    if name == "teacher_head":  # either way round
        shape = (columns, sum(shape) - columns)
    calls.set_matrix(args, name, 0, SLOTS[name].dtypes[0], shape, (max(shape[1], 1), 1))


def _plan_vector(args: Args, name: str, size: int) -> None:
    calls.set_vector(args, name, 0, SLOTS[name].dtypes[0], size, 1)
