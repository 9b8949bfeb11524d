"""What a sweep goes over, and what it is told and gives: the same for every implementation.

An implementation is two functions:

    forward(operand, labels, transform, spec, class_weights) -> RowState
    backward(operand, rows, transform, spec, class_weights) -> an operand of gradients

The columns swept are those from spec.first on, spec.columns of them; what follows is padding: not read, gradient 0. ``labels``:
int32 [N], which of them is the row's label; ELSEWHERE: none (of another shard, or wrong), so that the state's target is
-inf; UNUSED: the row does not count, and its state may hold anything. ``class_weights``: float32 [spec.columns] or None, of the
smoothing sum and its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array
from jax.typing import DTypeLike

from tileloss.jax._rows.coefficients import RowCoefficients
from tileloss.jax._rows.state import RowState

# Labels that are no column.
ELSEWHERE, UNUSED = -1, -2


class Logits(NamedTuple):
    """The logits themselves, [N, V] float32, bfloat16 or float16; their gradient has their dtype."""

    logits: Array


class LmHead(NamedTuple):
    """Logits hidden head^T + bias, which exist a tile at a time. Each gradient has its tensor's dtype, summed in float32."""

    hidden: Array | None  # [N, H]
    head: Array | None  # [V, H], or [H, V] where spec.head_layout says so
    bias: (
        Array | None
    )  # [V]; None: there is none. Of gradients, None also stands for "not asked for"


Operand = Logits | LmHead


class Sums(NamedTuple):
    """Which optional arrays of the row state a forward sweep gathers."""

    entropy_sum: bool = False
    collision_sum: bool = False
    smoothing_sum: bool = False
    argmax: bool = False


class Spec(NamedTuple):
    """What of a sweep is known while tracing."""

    columns: int  # how many of the operand's columns are swept
    first: int = 0  # the first of them (forward only): a slice of the vocabulary
    sums: Sums = Sums()
    head_layout: str = "HV"  # of an LmHead: "HV" [H, V] or "VH" [V, H]
    compute_dtype: DTypeLike | None = (
        None  # of an LmHead: what the products see, bfloat16 or float32
    )
    dhidden_dtype: DTypeLike | None = None  # backward: of an LmHead's dhidden; None: hidden's own
    wanted: tuple[bool, ...] = (True,)  # backward: which of the operand's gradients
    # Backward: whether that coefficient can be other than 0 in any row.
    has_prob_logp: bool = True
    has_uniform: bool = True
    # The mesh axes over which a kernel that XLA cannot partition cuts the rows itself; None: there is one device to know of.
    row_axes: tuple[str, ...] | None = None


class BackwardRows(NamedTuple):
    """What a backward sweep knows of each row, [N]."""

    labels: Array  # as the forward's
    used: Array  # bool: the gradient of the others is exactly 0, whatever their logits hold
    state: RowState  # of the whole vocabulary; where not used it may hold anything
    log_sum: Array  # log p_j = (z_j - state.max) - log_sum
    coefficients: RowCoefficients  # 0 where not used, NaN where the label is wrong
    at_label: Array  # dL/dz at the label, which has its own rounding rule
