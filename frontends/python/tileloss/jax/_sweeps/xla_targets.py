"""The column maths of the targets that are not labels, over logits, in plain XLA: tiles of columns, one after the other. Any
platform. Scratch is a few float32 arrays [N, TILE].

A teacher's logits: the states of both sides, and the student's at its label's temperature where that is one of its own; a sweep
over both for the divergence and the mean in its gradient; one for the gradient.

Some of its columns: the student's states, with the tail "lump" those of the columns that are not known too; the K columns and the
class of all others in float32 arrays [N, K + 1]; a gradient that is p times one number but at the K columns.

Class probabilities: the states; over logits and probabilities L = sum_j t_j (-log p_j) and T = sum_j t_j with
t = c ((1-s) q + s/V); the gradient p_j T - t_j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._devices import varying_alike
from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.distillation import pair_coefficients
from tileloss.jax._rows.state import RowState, identity, merge
from tileloss.jax._rows.stats import RowStats, row_stats
from tileloss.jax._sweeps import allowed, xla
from tileloss.jax._sweeps.allowed import only
from tileloss.jax._sweeps.divergence import (
    Terms,
    class_terms,
    column_terms,
    label_terms,
    make_divergence,
    renormalised,
    times,
)
from tileloss.jax._sweeps.operands import (
    ELSEWHERE,
    Logits,
    Spec,
    Sums,
    Swept,
    Target,
    TargetRows,
    TeacherState,
)
from tileloss.jax._sweeps.transform import (
    LogitTransform,
    make_label_transform,
    make_teacher_transform,
)

ROUNDING = 1e-2  # by which a sum of q may miss 1


def forward(operand: Logits, target: Target, spec: Spec) -> Swept:
    rows = _rows_of(operand, target, spec)
    return Swept(rows.outputs, rows.state)


def backward(operand: Logits, target: Target, rows: TargetRows, spec: Spec) -> Logits:
    """The gradient; in the logits' memory where XLA finds that nobody reads them later. Of another target than logits all sums
    are made again."""
    return _rows_of(operand, target, spec, rows.state).gradient(rows.weights)


def rows_and_grad(
    operand: Logits, target: Target, weights: Array, spec: Spec
) -> tuple[dict[str, Array], Logits]:
    rows = _rows_of(operand, target, spec)
    outputs = rows.outputs
    if "loss" in outputs:
        outputs = {"loss": weights * outputs["loss"]}
    return outputs, rows.gradient(weights)


class _Rows:
    """What the rows come to once logits and target have been swept."""

    outputs: dict[str, Array]
    state: Any = ()

    def __init__(self, operand: Logits, target: Target, spec: Spec) -> None:
        assert target.options is not None
        self.logits, self.labels, self.arrays = operand.logits, target.labels, target.arrays
        self.target = self.opened = target
        if target.allowed is not None:
            self.is_empty = allowed.count(target.allowed, spec.columns) == 0
            self.opened = target.replaced(allowed=allowed.opened(target.allowed, self.is_empty))
        self.transform, self.spec, self.options = target.transform, spec, target.options

    def gradient(self, weights: Array) -> Logits:
        raise NotImplementedError

    def swept(self, logits: Array, transform: LogitTransform, sums: Sums | None = None) -> RowState:
        part = Spec(self.spec.columns, sums=sums or Sums())
        of_both = {name: x for name, x in self.arrays.items() if name == "allowed"}
        target = Target(self.labels, of_both, transform=transform)
        state = xla.forward(Logits(logits), target, part)
        if state.argmax is None or not of_both:
            return state
        return state._replace(argmax=jnp.where(self.is_empty, 0, state.argmax))

    def summed(self, step: Callable[[Terms, Array | int, int], Terms]) -> Terms:
        """Two sums over the columns."""
        empty, _ = varying_alike(
            (Terms(*[jnp.zeros(self.labels.shape, jnp.float32)] * 2), self.labels)
        )
        return xla.over_tiles(self.spec.columns, xla.TILE, step, empty)

    def gradient_over_tiles(
        self, gradient_of: Callable[[Array, Array | int, int], Array]
    ) -> Logits:
        return xla.gradient_over_tiles(
            self.logits, self.opened, self.labels >= 0, self.spec, gradient_of
        )

    def named(self, found: dict[str, Array | None]) -> dict[str, Array]:
        """Those of the spec, for which all that they are made of has been swept."""
        outputs: dict[str, Array] = {}
        for name in self.spec.outputs:
            output = found[name]
            assert output is not None, name
            outputs[name] = output
        return outputs


class _TeacherRows(_Rows):
    """Of distillation: with a cross-entropy of the labels, at a temperature that may be one of its own."""

    def __init__(self, operand: Logits, target: Target, spec: Spec) -> None:
        super().__init__(operand, target, spec)
        self.divergence = make_divergence(self.options)
        self.label_transform = make_label_transform(self.options)
        self.label_ratio: Number = 1.0  # dz/dx there over that of the divergence
        if self.label_transform is not None:
            self.label_ratio = self.transform.temperature / self.label_transform.temperature

    def at_label(self, student: RowStats, swept: RowState | None) -> RowStats:
        return student if swept is None else row_stats(swept)

    def swept_at_label(self) -> RowState | None:
        if self.label_transform is None:
            return None
        return self.swept(self.logits, self.label_transform)


class _LogitsRows(_TeacherRows):
    """A teacher's logits. ``state``: what a forward left."""

    def __init__(
        self,
        operand: Logits,
        target: Target,
        spec: Spec,
        state: TeacherState | None = None,
    ) -> None:
        super().__init__(operand, target, spec)
        self.teacher_logits = self.arrays["teacher_logits"]
        self.teacher_transform = make_teacher_transform(self.options)
        if state is None:
            names = spec.outputs
            has_entropy = "entropy" in names or "teacher_entropy" in names
            # The same sums of either side, so that equal rows have the same bits.
            sums = Sums(entropy_sum=has_entropy, argmax="agreement" in names)
            a = self.swept(self.logits, self.transform, sums)
            b = self.swept(self.teacher_logits, self.teacher_transform, sums)
            label = self.swept_at_label()
        else:
            a, b, label = state.student, state.teacher, state.label
        self.student, self.teacher = row_stats(a), row_stats(b)
        self.label = self.at_label(self.student, label)
        # Whether both sides' numbers are the same to the last bit.
        pairs = zip(self.transform, self.teacher_transform, strict=True)
        is_alike = (a.max == b.max) & (a.sum == b.sum) & (a.label_logit == b.label_logit)
        self.is_alike = is_alike & jnp.all(jnp.stack([jnp.asarray(x == y) for x, y in pairs]))
        # Neither side holds a NaN, a +inf or -inf alone.
        self.is_finite = jnp.isfinite(a.max) & jnp.isfinite(b.max)
        self.label_terms = label_terms(self.divergence, self.student, self.teacher, self.is_alike)
        if state is not None:
            self.state = state
            return
        others = self.summed(self._step)
        self.outputs = self._outputs(others.value)
        # So that a gradient over the logits waits for what the entropies read of them, and XLA need not copy them: of a row
        # where these are NaN the divergence is too.
        divergence = others.value
        for side in (a, b):
            if side.entropy_sum is not None:
                divergence = jnp.where(jnp.isnan(side.entropy_sum), jnp.nan, divergence)
        a, b = (side._replace(entropy_sum=None, argmax=None) for side in (a, b))
        self.state = TeacherState(a, b, label, divergence, others.form)

    def gradient(self, weights: Array) -> Logits:
        state, has_mean = self.state, self.divergence.has_mean
        # NaN where a side is not finite. So the gradient, which may lie over the logits, has to wait for the divergence.
        is_nan = jnp.isnan(self._divergence(state.divergence))
        c = pair_coefficients(self.options, jnp.where(is_nan, jnp.nan, weights))
        # g - mean at the label is formed with the label's own part of the mean taken together with g, as of a confident label the
        # two all but cancel.
        of_form = self.label_terms.form
        if has_mean:
            of_form = of_form * self.student.one_minus_p - times(self.student.p, state.mean)
        at_label = times(c.target, self.label_ratio * self.label.one_minus_p)
        at_label = at_label + times(c.form, of_form)
        mean = (state.mean + self.label_terms.form)[:, None]
        form, target = c.form[:, None], c.target[:, None]

        def gradient_of(x: Array, start: Array | int, width: int) -> Array:
            p, found = self._columns(x, xla.tile(self.teacher_logits, start, width), start)
            centred = found.form - times(p, mean) if has_mean else found.form
            dz = times(form, centred)
            if self.options.may_differ("label_weight", 0):
                dz -= target * self._label_columns(x, p)
            is_label = xla.where_labels(self.labels, start, width)
            return jnp.where(is_label, at_label[:, None], dz)

        return self.gradient_over_tiles(gradient_of)

    def _step(self, sums: Terms, start: Array | int, width: int) -> Terms:
        """The columns but the label's: the divergence, and the mean in its gradient."""
        x, of_teacher = (xla.tile(x, start, width) for x in (self.logits, self.teacher_logits))
        _, found = self._columns(x, of_teacher, start)
        is_label = xla.where_labels(self.labels, start, width)

        def added(total: Array, of_columns: Array) -> Array:
            return total + jnp.sum(jnp.where(is_label, 0.0, of_columns), axis=1)

        mean = added(sums.form, found.form) if self.divergence.has_mean else sums.form
        return Terms(added(sums.value, found.value), mean)

    def _columns(self, x: Array, of_teacher: Array, start: Array | int) -> tuple[Array, Terms]:
        """p [N, width] of a tile, and its terms."""
        is_in = self.target.allowed_tile(start, x.shape[1])

        def shifted_softmax(side: RowStats, z: Array) -> tuple[Array, Array]:
            shifted = only(is_in, z - side.max[:, None], 0.0)
            return shifted, only(is_in, jnp.exp(shifted) * (1 / side.sum)[:, None], 0.0)

        x, of_teacher = (only(is_in, t.astype(jnp.float32), 0.0) for t in (x, of_teacher))
        shifted, p = shifted_softmax(self.student, self.transform.value(x))
        of_q, q = shifted_softmax(self.teacher, self.teacher_transform.value(of_teacher))
        log_sums = self.student.log_sum - self.teacher.log_sum
        log_ratio = only(is_in, (shifted - of_q) - log_sums[:, None], 0.0)
        # A compiler may round the two sides' equal expressions differently.
        is_alike = self.is_alike[:, None] & (x == of_teacher)
        q, log_ratio = jnp.where(is_alike, p, q), jnp.where(is_alike, 0.0, log_ratio)
        return p, column_terms(self.divergence, p, q, log_ratio)

    def _label_columns(self, x: Array, p: Array) -> Array:
        """What stands for p, the divergence's of a tile, in the gradient of the label's cross-entropy by the divergence's z."""
        if self.label_transform is None:
            return p
        shifted = self.label_transform.value(x) - self.label.max[:, None]
        return self.label_ratio * jnp.exp(shifted) * (1 / self.label.sum)[:, None]

    def _divergence(self, of_others: Array) -> Array:
        return jnp.where(self.is_finite, of_others + self.label_terms.value, jnp.nan)

    def _outputs(self, of_others: Array) -> dict[str, Array]:
        student, teacher, agreement = self.student, self.teacher, None
        if student.argmax is not None and teacher.argmax is not None:
            agreement = (student.argmax >= 0) & (student.argmax == teacher.argmax)
        return self.named(
            {
                "divergence": self._divergence(of_others),
                "entropy": student.entropy,
                "teacher_entropy": teacher.entropy,
                "logp": self.label.logp,
                "lse": student.lse,
                "agreement": agreement,
            }
        )


class _ColumnsRows(_TeacherRows):
    """Some of a teacher's columns. Those that are no class are in the arrays [N, K] with the probability 0."""

    def __init__(self, operand: Logits, target: Target, spec: Spec) -> None:
        super().__init__(operand, target, spec)
        self.ids, self.tail = self.arrays["teacher_ids"], self.options.choice("tail")
        transform = self.transform
        if target.allowed is not None:  # the others have no part in either side
            is_in = allowed.contains(target.allowed, jnp.maximum(self.ids, 0))
            self.ids = jnp.where(is_in, self.ids, -1)
        is_there = self.ids >= 0
        columns = jnp.maximum(self.ids, 0)
        self.x = jnp.take_along_axis(self.logits, columns, axis=1).astype(jnp.float32)
        names = spec.outputs
        sums = Sums(entropy_sum="entropy" in names, argmax="agreement" in names)
        self.stats = row_stats(self.swept(self.logits, transform, sums))
        self.label = self.at_label(self.stats, self.swept_at_label())

        shifted = transform.value(self.x) - self.stats.max[:, None]
        log_p = jnp.where(is_there, shifted - self.stats.log_sum[:, None], -jnp.inf)
        of_teacher = self.arrays["teacher_logprobs"].astype(jnp.float32)
        log_q = self.log_q = jnp.where(is_there, of_teacher, -jnp.inf)
        self.p_of_all = jnp.exp(log_p)  # of the whole softmax
        has_both: Array | bool = True
        if self.tail == "lump":
            log_p, log_q = self._with_others(log_p, log_q)
        elif self.tail == "renormalise":
            log_p, has_p = renormalised(log_p)
            log_q, has_q = renormalised(log_q)
            has_both = has_p & has_q | ~jnp.any(is_there, axis=1)
        self.p, q = jnp.exp(log_p), jnp.exp(log_q)
        self.terms: Terms = class_terms(self.divergence, self.p, q, log_p, log_q)
        is_finite = jnp.isfinite(self.stats.max) & has_both
        self.value = jnp.where(is_finite, jnp.sum(self.terms.value, axis=1), jnp.nan)
        self.outputs = self.named(
            {
                "divergence": self.value,
                "entropy": self.stats.entropy,
                "teacher_entropy": -jnp.sum(times(q, log_q), axis=1),
                "logp": self.label.logp,
                "lse": self.stats.lse,
                "agreement": self._agreement(),
            }
        )

    def gradient(self, weights: Array) -> Logits:
        used = self.labels >= 0
        c = pair_coefficients(self.options, jnp.where(jnp.isnan(self.value), jnp.nan, weights))
        sum_of_forms = jnp.sum(self.terms.form, axis=1)
        # dD/dz of a column that is not known, over its p.
        of_others = jnp.zeros_like(sum_of_forms)
        if self.tail != "renormalise":
            of_others = -sum_of_forms
        if self.tail == "lump":
            p = self.p[:, -1]
            of_others += jnp.where(p == 0, 0.0, self.terms.form[:, -1] / jnp.where(p == 0, 1, p))
        target = self.label_ratio * c.target
        of_divergence = times(c.form, of_others)
        at_label = times(target, self.label.one_minus_p) + times(of_divergence, self.stats.p)
        # dL/dz of all columns as if none were known: probabilities, each times a number of the row.
        parts = [_Part(self.transform, self.stats, of_divergence - c.target)]
        if self.label_transform is not None:
            parts = [
                _Part(self.transform, self.stats, of_divergence),
                _Part(self.label_transform, self.label, -target),
            ]

        def gradient_of(x: Array, start: Array | int, width: int) -> Array:
            dz = sum(times(part.factor[:, None], part.probabilities(x)) for part in parts)
            is_label = xla.where_labels(self.labels, start, width)
            return jnp.where(is_label, at_label[:, None], dz)

        gradient = self.gradient_over_tiles(gradient_of).logits
        is_label, count = self.ids == self.labels[:, None], self.ids.shape[1]
        p_of_label = self.p_of_all
        if self.label_transform is not None:
            p_of_label = _Part(self.label_transform, self.label, target).probabilities(self.x)
        of_label = jnp.where(is_label, self.label.one_minus_p[:, None], -p_of_label)
        of_form = self.terms.form[:, :count] - self.p[:, :count] * sum_of_forms[:, None]
        dz = times(target[:, None], of_label) + times(c.form[:, None], of_form)
        dx = jnp.where(used[:, None], dz * self.transform.derivative(self.x), 0.0)
        return Logits(_at(gradient, self.ids, dx.astype(gradient.dtype)))

    def _agreement(self) -> Array | None:
        if self.stats.argmax is None:
            return None
        is_largest = self.log_q == jnp.max(self.log_q, axis=1)[:, None]
        is_largest &= self.ids >= 0
        of_teacher = jnp.min(jnp.where(is_largest, self.ids, self.spec.columns), axis=1)
        return self.stats.argmax == of_teacher

    def _with_others(self, log_p: Array, log_q: Array) -> tuple[Array, Array]:
        """With one class more, of all other columns."""
        known, of_others = jnp.sum(jnp.exp(log_p), axis=1), self._stats_of_others()
        log_mass = (of_others.max - self.stats.max) + (of_others.log_sum - self.stats.log_sum)
        log_mass = jnp.where(jnp.isfinite(of_others.max), log_mass, -jnp.inf)
        # What is left of 1 where little is taken off it, so that all of them add up to 1; else the sum.
        log_mass = jnp.where(known < 0.5, jnp.log1p(-jnp.minimum(known, 0.5)), log_mass)
        left = jnp.maximum(1 - jnp.sum(jnp.exp(log_q), axis=1), 0)
        # Where p has nothing left, every column known say, q may not have lost the rest by rounding.
        left = jnp.where((of_others.max == -jnp.inf) & (left < ROUNDING), 0, left)

        def joined(of_known: Array, of_tail: Array) -> Array:
            return jnp.concatenate([of_known, of_tail[:, None]], axis=1)

        return joined(log_p, log_mass), joined(log_q, jnp.log(left))

    def _stats_of_others(self) -> RowStats:
        """Of the columns that are not known, by a sweep that takes the others for -inf."""
        nowhere = jnp.full_like(self.labels, ELSEWHERE)

        def step(state: RowState, start: Array | int, width: int) -> RowState:
            is_in = self.target.allowed_tile(start, width)
            x = only(is_in, xla.tile(self.logits, start, width).astype(jnp.float32), 0.0)
            z = _at(self.transform.value(x), self.ids - start, jnp.full(self.ids.shape, -jnp.inf))
            return merge(state, xla.tile_state(z, nowhere, start, Sums(), None, is_in))

        empty, _ = varying_alike((identity(self.labels.shape[0]), self.labels))
        return row_stats(xla.over_tiles(self.spec.columns, xla.TILE, step, empty))


class _ProbabilityRows(_Rows):
    """Class probabilities."""

    def __init__(self, operand: Logits, target: Target, spec: Spec) -> None:
        super().__init__(operand, target, spec)
        # s/V, over the classes that are allowed.
        smoothing, words = self.options.plain("label_smoothing"), target.allowed
        self.smoothed: Number = smoothing / spec.columns
        if words is not None:
            self.smoothed = smoothing / jnp.maximum(allowed.count(words, spec.columns), 1)[:, None]
        self.smoothing = smoothing
        self.stats = stats = row_stats(self.swept(self.logits, self.transform))
        rows = jnp.arange(self.labels.size)
        self.of_label = self._weighed(
            self.arrays["target_probs"][rows, self.labels][:, None],
            None if target.class_weights is None else target.class_weights[self.labels][:, None],
            None if words is None else allowed.contains(words, self.labels[:, None]),
        )[:, 0]

        def step(sums: Terms, start: Array | int, width: int) -> Terms:
            is_in = target.allowed_tile(start, width)
            x = only(is_in, xla.tile(self.logits, start, width).astype(jnp.float32), 0.0)
            is_label = jnp.arange(width)[None] == (self.labels - start)[:, None]
            t = jnp.where(is_label, 0.0, self._tile(start, width))
            loss = jnp.sum(times(t, -only(is_in, self._log_p(x), -jnp.inf)), axis=1)
            return Terms(sums.value + loss, sums.form + jnp.sum(t, axis=1))

        loss, self.others = self.summed(step)
        loss += times(self.of_label, -stats.logp)
        self.total = self.others + self.of_label
        is_finite = jnp.isfinite(self.stats.max) & jnp.isfinite(self.total)
        self.outputs = {"loss": jnp.where(is_finite, loss, jnp.nan)}

    def gradient(self, weights: Array) -> Logits:
        of_rows = jnp.where(jnp.isnan(self.outputs["loss"]), jnp.nan, weights)[:, None]
        # So that it keeps its digits where the class has all the weight, and p is near 1.
        at_label = self.others * self.stats.p - self.of_label * self.stats.one_minus_p

        def gradient_of(x: Array, start: Array | int, width: int) -> Array:
            dz = jnp.exp(self._log_p(x)) * self.total[:, None] - self._tile(start, width)
            is_label = jnp.arange(width)[None] == (self.labels - start)[:, None]
            return times(of_rows, jnp.where(is_label, at_label[:, None], dz))

        return self.gradient_over_tiles(gradient_of)

    def _log_p(self, x: Array) -> Array:
        z = self.transform.value(x)
        return (z - self.stats.max[:, None]) - self.stats.log_sum[:, None]

    def _tile(self, start: Array | int, width: int) -> Array:
        """t of a tile."""
        q = xla.tile(self.arrays["target_probs"], start, width)
        weights = xla.weights_of_tile(self.target, start, width)
        return self._weighed(q, weights, self.target.allowed_tile(start, width))

    def _weighed(self, q: Array, weights: Array | None, is_in: Array | None) -> Array:
        smooth = (1 - self.smoothing) * q.astype(jnp.float32) + (
            self.smoothed if is_in is None else jnp.where(is_in, self.smoothed, 0.0)
        )
        return smooth if weights is None else smooth * weights


def _rows_of(operand: Logits, target: Target, spec: Spec, state: Any = None) -> _Rows:
    assert target.options is not None
    loss = target.options.function.loss
    if loss == "distillation":
        return _LogitsRows(operand, target, spec, state)
    rows = _ColumnsRows if loss == "sparse_distillation" else _ProbabilityRows
    return rows(operand, target, spec)


class _Part(NamedTuple):
    """A row's probabilities, times a number of the row."""

    transform: LogitTransform
    stats: RowStats
    factor: Array

    def probabilities(self, x: Array) -> Array:
        shifted = self.transform.value(x) - self.stats.max[:, None]
        return jnp.exp(shifted - self.stats.log_sum[:, None])


def _at(x: Array, columns: Array, values: Array) -> Array:
    """x [N, V] with ``values`` [N, K] at those of ``columns`` that it has."""
    width = x.shape[1]
    columns = jnp.where((columns >= 0) & (columns < width), columns, width)
    return x.at[jnp.arange(x.shape[0])[:, None], columns].set(values, mode="drop")
