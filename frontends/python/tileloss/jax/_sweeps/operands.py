"""What a sweep goes over, and what it is told and gives: the same for every implementation.

An implementation is two functions, and for some calls a third that does the whole in one pass:

    forward(operand, target, spec) -> RowState, or Swept where the target is not labels
    backward(operand, target, rows, spec) -> an operand of gradients

``rows``: BackwardRows, or TargetRows where the target is not labels. The columns swept
are those from spec.first on, spec.columns of them; what follows is padding: not read, gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tileloss._core.row_states import ARRAYS, bits_of_loss, bits_of_outputs
from tileloss._core.slots import SLOTS
from tileloss._core.structs import UINT8
from tileloss._core.views import WORD, words_of
from tileloss.jax._rows.coefficients import RowCoefficients
from tileloss.jax._rows.distillation import DistillationRows
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.state import RowState, identity
from tileloss.jax._sweeps import allowed
from tileloss.jax._sweeps.transform import IDENTITY, LogitTransform

# Labels that are no column.
ELSEWHERE, UNUSED = -1, -2


class Logits(NamedTuple):
    """The logits themselves, [N, V] float32, bfloat16 or float16; their gradient has their dtype."""

    logits: Array


class LmHead(NamedTuple):
    """Logits hidden head^T + hidden_r head_r^T + bias, which exist a tile at a time. Each gradient has its tensor's dtype, summed
    in float32."""

    hidden: Array | None  # [N, H]
    head: Array | None  # [V, H], or [H, V] where spec.head_layout says so
    # [V]; None: there is none. Of gradients, None also stands for "not asked for".
    bias: Array | None
    # The low-rank part, [N, R] and [V, R] or [R, V] as the head lies; both or neither.
    hidden_r: Array | None = None
    head_r: Array | None = None

    def mapped(self, side: str, function: Callable[[Array], Array]) -> LmHead:
        """With the ``function`` of both arrays, as far as there are two, of a ``side``: "hidden" or "head"."""
        found = {name: getattr(self, name) for name in (side, f"{side}_r")}
        return self._replace(**{name: function(x) for name, x in found.items() if x is not None})


Operand = Logits | LmHead


class Target(NamedTuple):
    """What the rows are compared with: labels; or a teacher's logits, some of its columns, or class probabilities, and labels as
    the columns whose share is computed to more digits and which the loss's cross-entropy is about where it has any."""

    # int32 [N]. UNUSED: the row does not count, its logits may hold anything, and so may what is made of them, but its gradient
    # is 0. ELSEWHERE, where the target is labels: none (of another shard, or wrong), so that the state's label_logit is -inf.
    labels: Array
    # By their names in tileloss_args: class_weights, float32 [columns], of the smoothing sum; teacher_logits [N, V] of the
    # student's dtype; teacher_hidden [N, G], teacher_head, which lies as the student's, and perhaps teacher_bias [V];
    # target_probs [N, V]; teacher_ids, int32 [N, K], distinct in a row or negative, and teacher_logprobs [N, K]; allowed, the
    # columns of the operand that are in a row's softmax (allowed.py): of the others z is -inf, and the gradient 0.
    arrays: dict[str, Array]
    # Of the loss, where the target is not labels; the sweeps take from them all but the reduction.
    options: Options | None = None
    transform: LogitTransform = IDENTITY  # of the operand's logits

    @property
    def class_weights(self) -> Array | None:
        return self.arrays.get("class_weights")

    @property
    def allowed(self) -> Array | None:
        return self.arrays.get("allowed")

    def replaced(self, **arrays: Array) -> Target:
        return self._replace(arrays=self.arrays | arrays)

    def smoothing_weight(self, spec: Spec) -> Array | None:
        """The row state's, of the columns that ``spec`` names."""
        if not spec.sums.smoothing_sum:
            return None
        weights, words = self.class_weights, self.allowed
        if words is None:
            return jnp.float32(spec.columns) if weights is None else jnp.sum(weights)
        end = spec.first + spec.columns
        words = words[:, spec.first // WORD : words_of(end)]
        if weights is None:
            found = allowed.count(words, spec.columns)
        else:
            found = allowed.weight(words, weights[: spec.columns])
        return jnp.broadcast_to(found, self.labels.shape)

    def empty(self, sums: Sums) -> RowState:
        """The state of no columns."""
        state = identity(self.labels.shape[0], **sums._asdict())
        if self.allowed is not None and sums.smoothing_sum:
            state = state._replace(smoothing_weight=jnp.zeros(self.labels.shape, jnp.float32))
        return state

    def allowed_tile(self, start: Array | int, width: int) -> Array | None:
        """bool [N, width] or [1, width], of the operand's columns from ``start`` on; None: all are allowed."""
        return None if self.allowed is None else allowed.tile_of(self.allowed, start, width)


class Sums(NamedTuple):
    """Which optional arrays of the row state a forward sweep gathers."""

    entropy_sum: bool = False
    collision_sum: bool = False
    smoothing_sum: bool = False
    argmax: bool = False

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the row state's arrays with these among them."""
        asked = (name for name, is_asked in self._asdict().items() if is_asked)
        return "max", "sum", "label_logit", *asked


class Spec(NamedTuple):
    """What of a sweep is known while tracing."""

    columns: int  # how many of the operand's columns are swept
    first: int = 0  # the first of them (forward only): a slice of the vocabulary
    sums: Sums = Sums()
    # Of a forward where the target is not labels: names of row outputs, "loss" for class probabilities.
    outputs: tuple[str, ...] = ()
    head_layout: str = "HV"  # of an LmHead: "HV" [H, V] or "VH" [V, H]
    # Of an LmHead: what the products see, bfloat16 or float32.
    compute_dtype: DTypeLike | None = None
    # Backward: of an LmHead's dhidden and dhidden_r; None: their tensors'.
    dhidden_dtype: DTypeLike | None = None
    needs_grad: tuple[bool, ...] = (True,)  # backward: which of the operand's gradients
    # Backward: whether that coefficient can be other than 0 in any row.
    has_prob_logp: bool = True
    has_uniform: bool = True
    has_allowed: bool = False  # whether the target has sets of columns
    has_slots: bool = False  # whether rows have several labels
    has_low_rank: bool = False  # whether an LmHead has such a part
    is_shard: bool = False  # whether other devices have the vocabulary's other columns
    # The mesh axes over which a kernel that XLA cannot partition cuts the rows itself; None: there is one device to know of.
    row_axes: tuple[str, ...] | None = None


class SlotGradients(NamedTuple):
    """What a backward sweep is told of several labels a row, besides coefficients that have the sum over all of them."""

    columns: Array  # int32 [N, K]; UNUSED, or in a shard ELSEWHERE: none
    logp_grad: (
        Array  # float32 [N, K]; NaN where the row's label is wrong; those of one column add up
    )
    others: dict[
        str, Array
    ]  # upstream gradients by their names in tileloss_args, float32 [N], 0 where not used


class BackwardRows(NamedTuple):
    """What a backward sweep knows of each row, [N]."""

    used: Array  # bool: the gradient of the others is exactly 0, whatever their logits hold
    state: RowState  # of the whole vocabulary; where not used it may hold anything
    log_sum: Array  # log p_j = (z_j - state.max) - log_sum
    coefficients: RowCoefficients  # 0 where not used, NaN where the label is wrong
    at_label: Array  # dL/dz at the label, which has its own rounding rule
    slots: SlotGradients | None = None  # of several labels a row


def output_dtype(name: str) -> DTypeLike:
    """Of a row output where the target is not labels."""
    return jnp.bool_ if UINT8 in SLOTS[name].dtypes else jnp.float32


class Swept(NamedTuple):
    """What a forward gives where the target is not labels."""

    outputs: dict[str, Array]  # [N], by the names in spec.outputs
    state: Any  # for the backward: a TeacherState of logits compared with logits, else ()


class TeacherState(NamedTuple):
    """[N] arrays. The library leaves zeros, as it makes all sums again."""

    student: RowState
    teacher: RowState
    label: RowState | None  # the student at its label's temperature, where that is one of its own
    # Over the columns but the label's: the divergence, and the mean in its gradient (divergence.py).
    divergence: Array
    mean: Array


class TargetRows(NamedTuple):
    """What a backward knows of each row where the target is not labels."""

    # float32 [N], of the row's loss, reduction and upstream gradient included; NaN makes its gradient NaN. They wait for the
    # forward, as the gradient may lie over the logits.
    weights: Array
    state: Any


def with_outputs(spec: Spec, options: Options, outputs: tuple[str, ...]) -> Spec:
    """With what the sweeps are to give of each row."""
    function = options.function
    if not options.is_of_labels:
        return spec._replace(outputs=_target_outputs(options, outputs))
    sums = _sums(options, outputs)

    def may_be_on(name: str) -> bool:
        return name in function.options and options.may_differ(name, 0)

    return spec._replace(
        sums=sums,
        # What is differentiated through the sums of row outputs has a gradient of that kind.
        has_prob_logp=may_be_on("entropy_coef") if function.is_loss else sums.entropy_sum,
        has_uniform=may_be_on("label_smoothing") if function.is_loss else sums.smoothing_sum,
    )


def _target_outputs(options: Options, outputs: tuple[str, ...]) -> tuple[str, ...]:
    if "label_weight" not in options.function.options:
        return ("loss",)
    needed = {"divergence"} | ({"logp"} if options.may_differ("label_weight", 0) else set())
    return tuple(name for name in DistillationRows._fields if name in {*outputs, *needed})


def _sums(options: Options, outputs: tuple[str, ...]) -> Sums:
    """The optional arrays of the row state that the results are made of."""
    if options.function.is_loss:
        given = (*options.numbers(), *options.arrays)
        bits = bits_of_loss(options.function, given, "metrics" in outputs)
    else:
        bits = bits_of_outputs(outputs)
    return Sums(*(bool(bits >> ARRAYS.index(name) & 1) for name in Sums._fields))
