"""What a sweep over a student and what it is held against is told and gives: the same for every implementation.

An implementation is three functions:

    forward(pair, labels, options, spec) -> ({row output: [N]}, state)
    backward(pair, labels, weights, state, options, spec) -> an operand of the student's gradients
    value_and_grad(pair, labels, weights, options, spec) -> ({row output: [N]}, an operand of the student's gradients)

``labels``: int32 [N], a column whose share is computed to more digits, and which cross-entropy is about where there is any; or
UNUSED: the row does not count, its logits may hold anything, its gradient is 0 and its outputs are to be ignored. ``weights``:
float32 [N], what a row's loss is multiplied by, reduction and upstream gradient included; NaN makes the row's gradient NaN.
``options``: of the function, "distillation" or another of _core's WANTED, or "linear_" and that; the sweeps take from it all but
the reduction. ``state``: of the same type whoever swept.
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.operands import Operand, Spec


class Pair(NamedTuple):
    """The student, and what it is held against."""

    student: Operand
    # By their names in tileloss_args: teacher_logits [N, V] of the student's dtype; or teacher_hidden [N, G], teacher_head, which
    # lies as the student's, and perhaps teacher_bias [V]; or target_probs [N, V], and perhaps class_weights, float32 [columns];
    # or teacher_ids, int32 [N, K], distinct in a row or negative, and teacher_logprobs [N, K].
    beside: dict[str, Array]


class PairSpec(NamedTuple):
    """What of a sweep is known while tracing."""

    student: Spec  # columns, a head's layout, what the products see, which gradients are wanted
    # Of the forward: names of row outputs. Class probabilities have "loss", which value_and_grad gives times the weights.
    outputs: tuple[str, ...]

    @property
    def columns(self) -> int:
        """How many are swept; what follows is padding: not read, gradient 0."""
        return self.student.columns


class PairState(NamedTuple):
    """What a forward over logits leaves to its backward, [N] arrays. "cpu" leaves the divergence and zeros, as it makes all sums
    again."""

    student: RowState
    teacher: RowState
    label: RowState | None  # the student at its label's temperature, where that is one of its own
    # Over the columns but the label's: the divergence, and the mean in its gradient (divergence.py).
    divergence: Array
    mean: Array


# Of other functions than "distillation" a backward makes all sums again: the first row output.
State = PairState | Array
