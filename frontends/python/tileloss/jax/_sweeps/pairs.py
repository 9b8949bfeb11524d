"""What a sweep over a student's and a teacher's logits is told and gives: the same for every implementation.

An implementation is three functions:

    forward(pair, labels, options, spec) -> ({row output: [N]}, PairState)
    backward(pair, labels, weights, state, options, spec) -> the gradient of pair.logits
    value_and_grad(pair, labels, weights, options, spec) -> ({row output: [N]}, the gradient of pair.logits)

``labels``: int32 [N], a column whose share is computed to more digits, and which cross-entropy is about where there is any; or
UNUSED: the row does not count, its logits may hold anything, its gradient is 0 and its outputs are to be ignored. ``weights``:
float32 [N], what a row's loss is multiplied by, reduction and upstream gradient included; NaN makes the row's gradient NaN.
``options``: of "distillation"; the sweeps take from it all but the reduction.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from tileloss.jax._rows.state import RowState


class Pair(NamedTuple):
    """Both [N, V], of one dtype: float32, bfloat16 or float16. The gradient has it too."""

    logits: Array
    teacher: Array


class PairSpec(NamedTuple):
    """What of a sweep is known while tracing."""

    columns: int  # how many are swept; what follows is padding: not read, gradient 0
    outputs: tuple[str, ...]  # of the forward: names of `DistillationRows`


class PairState(NamedTuple):
    """What a forward leaves to its backward, [N] arrays. "cpu" leaves the divergence and zeros, as it makes all sums again."""

    student: RowState
    teacher: RowState
    # Over the columns but the label's: the divergence, and the mean in its gradient (divergence.py).
    divergence: Array
    mean: Array
