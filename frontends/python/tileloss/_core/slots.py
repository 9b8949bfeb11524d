"""The tensors of a call, as the library itself describes them (tileloss_get_function_info).

The one table from which the arguments' struct and all that front ends know of it are made.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from ctypes import Structure, c_int64, c_size_t, c_void_p
from typing import Any, NamedTuple

from tileloss._core.functions import FUNCTIONS, Function
from tileloss._core.structs import (
    BFLOAT16,
    CPU,
    FLOAT16,
    FLOAT32,
    INT32,
    INT64,
    UINT8,
    Matrix,
    RowGroups,
    RowState,
    TensorInfo,
    Vector,
)

# What a tensor is to a call, as the ABI numbers it; an operand is an input that is there in every call of its level: the
# matrices that it takes, their bias and the labels.
INPUT, UPSTREAM, OUTPUT, ROW_OUTPUT, GRADIENT = range(5)

MOST_RANKS = 512  # columns of hidden_r and head_r, as the C ABI takes them
OPERAND = -1
_OPERANDS = ("labels", "bias", "teacher_bias", "hidden_r", "head_r")
# The operands of the side that learns, from logits and fused with the LM head; the others, but the labels, are of the target.
MATRICES = {False: ("logits",), True: ("hidden", "head", "bias", "hidden_r", "head_r")}
# What an input becomes of a type that its slot does not take: the first of these that it does.
_PREFERENCE = (UINT8, FLOAT32, BFLOAT16, FLOAT16, INT64, INT32)


class Place(NamedTuple):
    """Where the tensors of a call lie, and where its work is queued."""

    device_type: int = CPU
    device_index: int = 0
    stream: int = 0
    # Memory for the call's workspace, that many bytes, which outlives the call: its address. None: the library's own.
    allocate: Callable[[int], int] | None = None


class Slot(NamedTuple):
    """One tensor. `shape`: in tileloss_tensor's letters. `dtypes`: others become the first."""

    name: str
    role: int
    shape: str
    dtypes: tuple[int, ...]
    state_arrays: int  # of a row output: bits of the row state that it is made of
    offset: int
    rank: int


def _is_operand(name: str, info: TensorInfo) -> bool:
    is_matrix = info.rank == 2 and bool(info.is_required)
    return info.role == INPUT and (is_matrix or name in _OPERANDS)


def _all_slots() -> dict[str, Slot]:
    infos = {}
    for function in FUNCTIONS.values():
        for info in function.info.tensors[: function.info.num_tensors]:
            infos[info.name.decode()] = info
    return {
        name: Slot(
            name,
            OPERAND if _is_operand(name, info) else info.role,
            info.shape.decode(),
            tuple(dtype for dtype in _PREFERENCE if info.dtypes >> dtype & 1),
            info.state_arrays,
            info.offset,
            info.rank,
        )
        for name, info in infos.items()
    }


SLOTS = _all_slots()
_ANY = next(iter(FUNCTIONS.values())).info
_MEMBERS: list[tuple[int, str, Any]] = sorted(
    [
        (0, "struct_size", c_size_t),
        (_ANY.row_state_offset, "row_state", c_void_p),
        (_ANY.sequence_length_offset, "sequence_length", c_int64),
        (_ANY.row_groups_offset, "row_groups", RowGroups),
        (_ANY.pair_state_offset, "pair_state", c_void_p),
        (_ANY.labels_per_row_offset, "labels_per_row", c_int64),
        *((s.offset, s.name, Matrix if s.rank == 2 else Vector) for s in SLOTS.values()),
    ]
)


class Args(Structure):
    _fields_ = [(name, kind) for _, name, kind in _MEMBERS]
    place = Place()
    kept_row_state: RowState | None = (
        None  # what row_state points to, if calls.set_row_state made it
    )


OFFSETS = {name: offset for offset, name, _ in _MEMBERS}

# The row state's arrays as a forward saves them for its backward. A backward reads the first three, and this one if what the
# forward was asked for, row outputs or options, is among these.
STATE = ("max", "sum", "label_logit", "entropy_sum")


def _readers(array: int) -> frozenset[str]:
    options = {
        name
        for function in FUNCTIONS.values()
        for name, option in function.options.items()
        if option.state_arrays >> array & 1
    }
    outputs = {
        s.name for s in SLOTS.values() if s.role == ROW_OUTPUT and s.state_arrays >> array & 1
    }
    return frozenset(options | outputs)


STATE_READERS = {name: _readers(array) for array, name in enumerate(STATE) if array >= 3}


class Arguments(NamedTuple):
    """The tensors of a function's calls, by what they are to it."""

    matrices: tuple[str, ...]
    # What the rows are compared with where that is more than labels, which may then be left out.
    target: tuple[str, ...]
    inputs: tuple[str, ...]  # what else goes with the rows
    row_outputs: tuple[str, ...]
    slots: tuple[str, ...]  # what an operator takes, in its order


def _arguments(function: Function) -> Arguments:
    matrices = MATRICES[function.is_linear]

    def of(role: int) -> tuple[str, ...]:
        return tuple(name for name in function.tensors if SLOTS[name].role == role)

    target = tuple(name for name in of(OPERAND) if name not in (*matrices, "labels"))
    slots = (*matrices, *target, "labels", *of(INPUT))
    return Arguments(matrices, target, of(INPUT), of(ROW_OUTPUT), slots)


ARGUMENTS = {name: _arguments(function) for name, function in FUNCTIONS.items()}
# logprobs' row outputs, first those that have a gradient, which is the slot "<name>_grad".
ROW_OUTPUTS = tuple(
    sorted(ARGUMENTS["logprobs"].row_outputs, key=lambda name: f"{name}_grad" not in SLOTS)
)
DIFFERENTIABLE = tuple(name for name in ROW_OUTPUTS if f"{name}_grad" in SLOTS)


def state_arrays(asked_for: Container[str]) -> int:
    """How many arrays of STATE to save for what was asked of a forward: names of row outputs or of options."""
    wanted = 3
    for number, array in enumerate(STATE[3:], start=4):
        if any(name in asked_for for name in STATE_READERS[array]):
            wanted = number
    return wanted
