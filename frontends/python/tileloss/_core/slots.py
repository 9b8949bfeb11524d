"""The tensors of a call: the one table from which the arguments' struct and all that front ends know of it are made.

The library describes its options itself (functions.py) but not yet its tensors. When it does, SLOTS and STATE_READERS come from
there and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Container
from ctypes import Structure, c_int32, c_int64, c_size_t
from typing import NamedTuple

from tileloss._core.structs import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT32,
    INT64,
    UINT8,
    Matrix,
    RowGroups,
    RowState,
    Vector,
)

FLOATS, LABELS = (FLOAT32, BFLOAT16, FLOAT16), (INT64, INT32)
LOSSES = ("cross_entropy", "policy_loss")
ROWS = ("logprobs",)

# What a tensor is to a call. An operand is there in every call of its level, with the logits or with the LM head; inputs go with
# the labels and may be absent; upstreams are the gradients that a backward is given, gradients those that it writes.
OPERAND, INPUT, UPSTREAM, OUTPUT, ROW_OUTPUT, GRADIENT = (
    "operand", "input", "upstream", "output", "row output", "gradient",
)  # fmt: skip


class Slot(NamedTuple):
    """One tensor. `shape`: of N rows, vocabulary V, hidden size H, S sequences, or 1. `dtypes`: others become the first."""

    name: str
    role: str
    shape: str
    dtypes: tuple[int, ...] = (FLOAT32,)
    functions: tuple[str, ...] = ROWS + LOSSES  # fused with the LM head or not


# In the order of tileloss_args; a pair is a field that is no tensor.
_ARGS: tuple[Slot | tuple[str, type], ...] = (
    ("struct_size", c_size_t),
    Slot("logits", OPERAND, "NV", FLOATS),
    Slot("labels", OPERAND, "N", LABELS),
    Slot("token_weights", INPUT, "N", functions=("cross_entropy",)),
    Slot("class_weights", INPUT, "V", functions=("cross_entropy",)),
    Slot("loss_grad", UPSTREAM, "1 or N", functions=LOSSES),
    Slot("logp_grad", UPSTREAM, "N", functions=ROWS),
    Slot("lse_grad", UPSTREAM, "N", functions=ROWS),
    Slot("entropy_grad", UPSTREAM, "N", functions=ROWS),
    Slot("loss", OUTPUT, "1 or N", functions=LOSSES),
    Slot("logp", ROW_OUTPUT, "N"),
    Slot("lse", ROW_OUTPUT, "N"),
    Slot("entropy", ROW_OUTPUT, "N"),
    Slot("argmax", ROW_OUTPUT, "N", (INT64,)),
    Slot("correct", ROW_OUTPUT, "N", (UINT8,)),
    Slot("log_sum_sq_probs", ROW_OUTPUT, "N"),
    Slot("mean_logit", ROW_OUTPUT, "N"),
    Slot("dlogits", GRADIENT, "NV", FLOATS),
    ("row_state", RowState),
    Slot("mask", INPUT, "N", (UINT8, INT32, INT64, FLOAT32), ("policy_loss",)),
    Slot("old_logp", INPUT, "N", functions=("policy_loss",)),
    Slot("ref_logp", INPUT, "N", functions=("policy_loss",)),
    Slot("sampler_logp", INPUT, "N", functions=("policy_loss",)),
    Slot("advantages", INPUT, "S or N", functions=("policy_loss",)),
    Slot("sequence_offsets", INPUT, "S+1", LABELS, ("policy_loss",)),
    Slot("metrics", OUTPUT, "metrics", functions=("policy_loss",)),
    ("sequence_length", c_int64),
    Slot("hidden", OPERAND, "NH", FLOATS),
    Slot("head", OPERAND, "VH", FLOATS),
    Slot("bias", OPERAND, "V", FLOATS),
    Slot("dhidden", GRADIENT, "NH", FLOATS),
    Slot("dhead", GRADIENT, "VH", FLOATS),
    Slot("dbias", GRADIENT, "V", FLOATS),
    ("compute_dtype", c_int32),
    ("accumulate", c_int32),
    ("row_groups", RowGroups),
)
SLOTS = {slot.name: slot for slot in _ARGS if isinstance(slot, Slot)}
_MATRICES = ("NV", "NH", "VH")

# The row state's arrays as a forward saves them for its backward. A backward reads the first three, and this one if what the
# forward was asked for, row outputs or options, is among these.
STATE = ("max", "sum", "target", "entropy_sum")
STATE_READERS = {
    "entropy_sum": ("entropy", "entropy_coef", "entropy_quantile", "entropy_threshold")
}


class Args(Structure):
    _fields_ = [
        (field.name, Matrix if field.shape in _MATRICES else Vector)
        if isinstance(field, Slot)
        else field
        for field in _ARGS
    ]


OFFSETS: dict[str, int] = {field[0]: getattr(Args, field[0]).offset for field in Args._fields_}


def names_of(role: str, function: str) -> tuple[str, ...]:
    return tuple(s.name for s in SLOTS.values() if s.role == role and function in s.functions)


INPUTS = {function: names_of(INPUT, function) for function in (*LOSSES, *ROWS)}
# Row outputs, first those that have a gradient, which is the slot "<name>_grad".
ROW_OUTPUTS = tuple(
    sorted(names_of(ROW_OUTPUT, "logprobs"), key=lambda n: f"{n}_grad" not in SLOTS)
)
DIFFERENTIABLE = tuple(name for name in ROW_OUTPUTS if f"{name}_grad" in SLOTS)


def state_arrays(asked_for: Container[str]) -> int:
    """How many arrays of STATE to save for what was asked of a forward: names of row outputs or of options."""
    wanted = 3
    for number, array in enumerate(STATE[3:], start=4):
        if any(name in asked_for for name in STATE_READERS[array]):
            wanted = number
    return wanted
