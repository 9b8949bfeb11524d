"""Row states of parts of a vocabulary: what they are made of, how they merge, and a call's outputs from a merged one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from ctypes import byref

from tileloss._core.functions import Function
from tileloss._core.library import lib, raise_on_error
from tileloss._core.slots import ROW_OUTPUTS, SLOTS, Place
from tileloss._core.structs import RowState

# tileloss_row_state's arrays, as its bits number them: float32, but argmax int64. A number a row, but in the last one, which has
# one for each label.
ARRAYS = (
    "max", "sum", "label_logit", "entropy_sum", "collision_sum", "smoothing_sum", "argmax", "allowed_count", "allowed_weight",
    "label_logits",
)  # fmt: skip
_BITS = {name: 1 << number for number, name in enumerate(ARRAYS)}
_ALWAYS = _BITS["max"] | _BITS["sum"] | _BITS["label_logit"]
# The row output that is the mean of the logits.
(MEAN_OUTPUT,) = (n for n in ROW_OUTPUTS if SLOTS[n].state_arrays & _BITS["smoothing_sum"])


def bits_of_outputs(names: Iterable[str]) -> int:
    """The arrays that these row outputs, and their gradients, are made of."""
    bits = _ALWAYS
    for name in names:
        bits |= SLOTS[name].state_arrays
    return bits


def bits_of_loss(function: Function, options: Iterable[str], wants_metrics: bool) -> int:
    """The arrays that a loss and its gradient are made of, by the options that were given."""
    bits = _ALWAYS
    for name in options:
        bits |= function.options[name].state_arrays
    if wants_metrics and "entropy" in function.metrics:
        bits |= _BITS["entropy_sum"]
    return bits


def bits_of_allowed(has_class_weights: bool) -> int:
    """The arrays that shards' states have besides where rows have tokens of their own."""
    return _BITS["allowed_count"] | (_BITS["allowed_weight"] if has_class_weights else 0)


def bits_of_labels(per_row: int) -> int:
    """The arrays that shards' states have besides where rows have several labels."""
    return _BITS["label_logits"] if per_row > 1 else 0


def float_arrays(bits: int) -> tuple[str, ...]:
    """The names of the float32 arrays among these, in the ABI's order."""
    return tuple(name for name in ARRAYS if bits & _BITS[name] and name != "argmax")


def has_argmax(bits: int) -> bool:
    return bool(bits & _BITS["argmax"])


def new_row_state(
    rows: int,
    addresses: Mapping[str, int],
    smoothing_weight: float,
    place: Place,
    labels_per_row: int,
) -> RowState:
    """``addresses``: of arrays by name. ``smoothing_weight``: the sum of c_j over the columns that the state has seen."""
    state = RowState(struct_size=ctypes.sizeof(RowState), rows=rows, labels_per_row=labels_per_row)
    for name, address in addresses.items():
        setattr(state, name, address)
    state.smoothing_weight = smoothing_weight
    state.device_type, state.device_index = place[:2]
    return state


def merge(into: RowState, part: RowState) -> None:
    """into = into + part."""
    raise_on_error(lib.tileloss_row_state_merge(byref(into), byref(part)))


def address_of(state: RowState) -> int:
    return ctypes.addressof(state)
