"""Distillation's sweeps in plain XLA: tiles of columns of both sides, one after the other. Any platform.

Two forwards, the student's and the teacher's, and the student's at its label's temperature where that is one of its own, then one
sweep over both for the divergence and the mean in its gradient, and one for the gradient. Scratch is a few float32 arrays
[N, TILE].
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._devices import varying_alike
from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.distillation import pair_coefficients
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.state import RowState
from tileloss.jax._rows.stats import RowStats, row_stats
from tileloss.jax._sweeps import xla
from tileloss.jax._sweeps.divergence import (
    Terms,
    column_terms,
    label_terms,
    make_divergence,
    times,
)
from tileloss.jax._sweeps.operands import Logits, Operand, Spec, Sums
from tileloss.jax._sweeps.pairs import Pair, PairSpec, PairState
from tileloss.jax._sweeps.transform import (
    LogitTransform,
    make_label_transform,
    make_teacher_transform,
    make_transform,
)


def forward(
    pair: Pair, labels: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], PairState]:
    logits, of_teacher = _both_logits(pair)
    sums = Sums(
        entropy_sum="entropy" in spec.outputs or "teacher_entropy" in spec.outputs,
        argmax="agreement" in spec.outputs,
    )
    both = _Both(options)
    # The same sums of either side, so that equal rows have the same bits.
    part = Spec(spec.columns, sums=sums)
    student = xla.forward(Logits(logits), labels, both.student, part, None)
    teacher = xla.forward(Logits(of_teacher), labels, both.teacher, part, None)
    label = None
    if both.label is not None:
        label = xla.forward(Logits(logits), labels, both.label, Spec(spec.columns), None)
    empty, _ = varying_alike((Terms(*[jnp.zeros(labels.shape, jnp.float32)] * 2), labels))
    rows = both.rows(PairState(student, teacher, label, *empty))

    def step(sums: Terms, start: Array | int, width: int) -> Terms:
        tiles = (xla.tile(x, start, width) for x in (logits, of_teacher))
        _, found = rows.columns(*tiles)
        is_label = jnp.arange(width) == (labels - start)[:, None]

        def added(total: Array, of_columns: Array) -> Array:
            return total + jnp.sum(jnp.where(is_label, 0.0, of_columns), axis=1)

        mean = added(sums.form, found.form) if both.divergence.has_mean else sums.form
        return Terms(added(sums.value, found.value), mean)

    of_others = xla.over_tiles(spec.columns, xla.TILE, step, empty)
    state = PairState(student, teacher, label, *of_others)
    found = _outputs(rows, state, spec)
    # So that a gradient over the logits waits for what the entropies read of them, and XLA need not copy them: of a row where
    # these are NaN the divergence is too.
    divergence = of_others.value
    for side in (student, teacher):
        if side.entropy_sum is not None:
            divergence = jnp.where(jnp.isnan(side.entropy_sum), jnp.nan, divergence)
    return found, PairState(_lean(student), _lean(teacher), label, divergence, of_others.form)


def backward(
    pair: Pair, labels: Array, weights: Array, state: PairState, options: Options, spec: PairSpec
) -> Operand:
    """The gradient; in the logits' memory where XLA finds that nobody reads them later."""
    logits, of_teacher = _both_logits(pair)
    both = _Both(options)
    rows, has_mean = both.rows(state), both.divergence.has_mean
    # NaN where a side is not finite. So the gradient, which may lie over the logits, has to wait for the divergence.
    is_spoiled = jnp.isnan(_divergence(rows, state))
    c = pair_coefficients(options, jnp.where(is_spoiled, jnp.nan, weights))
    at_label = _gradient_at_label(rows, state, c.form, c.target)
    mean = (state.mean + rows.label.form)[:, None]
    form, target = c.form[:, None], c.target[:, None]

    def step(buffer: Array, start: Array | int, width: int) -> Array:
        x = xla.tile_to_replace(buffer, start, width, logits.dtype)
        p, found = rows.columns(x, xla.tile(of_teacher, start, width))
        centred = found.form - times(p, mean) if has_mean else found.form
        dz = times(form, centred)
        if options.may_differ("alpha", 0):
            dz -= target * rows.label_columns(x, p)
        is_label = jnp.arange(width) == (labels - start)[:, None]
        dz = jnp.where(is_label, at_label[:, None], dz)
        dx = dz * both.student.derivative(x.astype(jnp.float32))
        return xla.stored(buffer, jnp.where(_used(labels), dx, 0.0).astype(x.dtype), start)

    gradient = xla.in_place(
        lambda buffer: xla.over_tiles(spec.columns, xla.TILE, step, buffer), logits
    )
    return Logits(gradient.at[:, spec.columns :].set(0))


def value_and_grad(
    pair: Pair, labels: Array, weights: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], Operand]:
    found, state = forward(pair, labels, options, spec)
    return found, backward(pair, labels, weights, state, options, spec)


def _both_logits(pair: Pair) -> tuple[Array, Array]:
    assert isinstance(pair.student, Logits)
    return pair.student.logits, pair.beside["teacher_logits"]


def _lean(state: RowState) -> RowState:
    """What a backward needs of it."""
    return state._replace(entropy_sum=None, argmax=None)


def _used(labels: Array) -> Array:
    return (labels >= 0)[:, None]


class _Rows(NamedTuple):
    """What is known of each row of both sides, [N], once both have been swept."""

    both: _Both
    student: RowStats
    teacher: RowStats
    at_label: RowStats  # the student's, at its label's temperature
    label: Terms
    is_finite: Array  # neither side holds a NaN, a +inf or -inf alone
    is_alike: Array  # both sides' numbers are the same to the last bit

    def columns(self, x: Array, of_teacher: Array) -> tuple[Array, Terms]:
        """p [N, width] of a tile, and its terms."""

        def of_side(side: RowStats, z: Array) -> tuple[Array, Array]:
            shifted = z - side.max[:, None]
            return shifted, jnp.exp(shifted) * (1 / side.sum)[:, None]

        x, of_teacher = x.astype(jnp.float32), of_teacher.astype(jnp.float32)
        shifted, p = of_side(self.student, self.both.student.value(x))
        of_q, q = of_side(self.teacher, self.both.teacher.value(of_teacher))
        log_sums = self.student.log_sum - self.teacher.log_sum
        log_ratio = (shifted - of_q) - log_sums[:, None]
        # A compiler may round the two sides' equal expressions differently.
        is_alike = self.is_alike[:, None] & (x == of_teacher)
        q, log_ratio = jnp.where(is_alike, p, q), jnp.where(is_alike, 0.0, log_ratio)
        return p, column_terms(self.both.divergence, p, q, log_ratio)

    def label_columns(self, x: Array, p: Array) -> Array:
        """What stands for p, the divergence's of a tile, in the gradient of the label's cross-entropy by the divergence's z."""
        transform = self.both.label
        if transform is None:
            return p
        shifted = transform.value(x.astype(jnp.float32)) - self.at_label.max[:, None]
        return self.both.label_ratio * jnp.exp(shifted) * (1 / self.at_label.sum)[:, None]


class _Both:
    """What the options say of the student, of the teacher and of their divergence."""

    def __init__(self, options: Options) -> None:
        self.student = make_transform(options)
        self.teacher = make_teacher_transform(options)
        self.label = make_label_transform(options)
        self.divergence = make_divergence(options)

    @property
    def label_ratio(self) -> Number:
        """dz/dx of the label's cross-entropy over that of the divergence."""
        return 1.0 if self.label is None else self.student.temperature / self.label.temperature

    def rows(self, state: PairState) -> _Rows:
        a, b = state.student, state.teacher
        student, teacher = row_stats(a), row_stats(b)
        is_alike = (a.max == b.max) & (a.sum == b.sum) & (a.target == b.target)
        is_alike &= _are_equal(self.student, self.teacher)
        return _Rows(
            both=self,
            student=student,
            teacher=teacher,
            at_label=student if state.label is None else row_stats(state.label),
            label=label_terms(self.divergence, student, teacher, is_alike),
            is_finite=jnp.isfinite(a.max) & jnp.isfinite(b.max),
            is_alike=is_alike,
        )


def _are_equal(a: LogitTransform, b: LogitTransform) -> Array:
    numbers = [jnp.asarray(x == y) for x, y in zip(a, b, strict=True)]
    return jnp.all(jnp.stack(numbers))


def _divergence(rows: _Rows, state: PairState) -> Array:
    return jnp.where(rows.is_finite, state.divergence + rows.label.value, jnp.nan)


def _outputs(rows: _Rows, state: PairState, spec: PairSpec) -> dict[str, Array]:
    student, teacher = rows.student, rows.teacher
    found: dict[str, Array | None] = {
        "divergence": _divergence(rows, state),
        "entropy": student.entropy,
        "teacher_entropy": teacher.entropy,
        "logp": rows.at_label.logp,
        "lse": student.lse,
    }
    if student.argmax is not None and teacher.argmax is not None:
        found["agreement"] = (student.argmax >= 0) & (student.argmax == teacher.argmax)
    outputs: dict[str, Array] = {}
    for name in spec.outputs:
        output = found[name]
        assert output is not None, name
        outputs[name] = output
    return outputs


def _gradient_at_label(rows: _Rows, state: PairState, form: Array, target: Array) -> Array:
    """dL/dz at the labels' columns: g - mean there is formed with the label's own part of the mean taken together with g, as of a
    confident label the two all but cancel."""
    student, of_form = rows.student, rows.label.form
    if rows.both.divergence.has_mean:
        of_form = of_form * student.one_minus_p - times(student.p, state.mean)
    of_target = rows.both.label_ratio * rows.at_label.one_minus_p
    return times(target, of_target) + times(form, of_form)
