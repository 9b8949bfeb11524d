"""The sweeps of distillation from a teacher of which some columns are known, over logits, in plain XLA
(src/backends/cpu/sweep/known_columns.h): the row states, with the tail "lump" those of the other columns too, the K columns and
the class of all others in float32 arrays [N, K + 1], and a gradient that is p times one number but at the K columns.

Any platform. Scratch is a few float32 arrays [N, TILE]. A backward of its own makes all of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._devices import varying_alike
from tileloss.jax._rows.distillation import pair_coefficients
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.state import RowState, identity, merge
from tileloss.jax._rows.stats import RowStats, row_stats
from tileloss.jax._sweeps import xla
from tileloss.jax._sweeps.divergence import Terms, class_terms, make_divergence, times
from tileloss.jax._sweeps.operands import ELSEWHERE, Logits, Operand, Spec, Sums
from tileloss.jax._sweeps.pairs import Pair, PairSpec, State
from tileloss.jax._sweeps.transform import LogitTransform, make_label_transform, make_transform

ROUNDING = 1e-2  # by which a sum of q may miss 1


def forward(
    pair: Pair, labels: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], State]:
    rows = _Rows(pair, labels, options, spec)
    outputs = rows.outputs(spec)
    return outputs, outputs[spec.outputs[0]]


def backward(
    pair: Pair, labels: Array, weights: Array, state: State, options: Options, spec: PairSpec
) -> Operand:
    assert isinstance(state, Array)
    # As the gradient may lie over the logits, it has to wait for the forward.
    weights = jnp.where(jnp.isnan(state), jnp.nan, weights)
    return _Rows(pair, labels, options, spec).gradient(weights, options)


def value_and_grad(
    pair: Pair, labels: Array, weights: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], Operand]:
    rows = _Rows(pair, labels, options, spec)
    return rows.outputs(spec), rows.gradient(weights, options)


class _Rows:
    """What the rows come to once the logits have been swept. Columns that are no class are in the arrays [N, K] with the
    probability 0."""

    def __init__(self, pair: Pair, labels: Array, options: Options, spec: PairSpec) -> None:
        assert isinstance(pair.student, Logits)
        self.logits, self.labels, self.columns = pair.student.logits, labels, spec.columns
        self.ids, self.tail = pair.beside["teacher_ids"], options.choice("tail")
        self.transform = make_transform(options)
        is_there = self.ids >= 0
        columns = jnp.maximum(self.ids, 0)
        self.x = jnp.take_along_axis(self.logits, columns, axis=1).astype(jnp.float32)
        sums = Sums(entropy_sum="entropy" in spec.outputs, argmax="agreement" in spec.outputs)
        part = Spec(spec.columns, sums=sums)
        self.state = xla.forward(pair.student, labels, self.transform, part, None)
        self.stats = row_stats(self.state)
        # The student as its label's cross-entropy sees it, and dz/dx there over its own.
        self.label_transform, self.label_ratio = make_label_transform(options), jnp.float32(1)
        self.label = self.stats
        if self.label_transform is not None:
            of_label = Spec(spec.columns)
            at_label = xla.forward(pair.student, labels, self.label_transform, of_label, None)
            self.label = row_stats(at_label)
            ratio = self.transform.temperature / self.label_transform.temperature
            self.label_ratio = jnp.asarray(ratio, jnp.float32)

        shifted = self.transform.value(self.x) - self.stats.max[:, None]
        log_p = jnp.where(is_there, shifted - self.stats.log_sum[:, None], -jnp.inf)
        of_teacher = pair.beside["teacher_logprobs"].astype(jnp.float32)
        log_q = self.log_q = jnp.where(is_there, of_teacher, -jnp.inf)
        self.p_of_all = jnp.exp(log_p)  # of the whole softmax
        has_both: Array | bool = True
        if self.tail == "lump":
            log_p, log_q = self._with_others(log_p, log_q, is_there)
        elif self.tail == "renormalise":
            log_p, has_p = _renormalised(log_p)
            log_q, has_q = _renormalised(log_q)
            has_both = has_p & has_q | ~jnp.any(is_there, axis=1)
        self.p, self.q = jnp.exp(log_p), jnp.exp(log_q)
        self.terms: Terms = class_terms(make_divergence(options), self.p, self.q, log_p, log_q)
        self.teacher_entropy = -jnp.sum(times(self.q, log_q), axis=1)
        is_finite = jnp.isfinite(self.stats.max) & has_both
        self.divergence = jnp.where(is_finite, jnp.sum(self.terms.value, axis=1), jnp.nan)

    def outputs(self, spec: PairSpec) -> dict[str, Array]:
        found: dict[str, Array | None] = {
            "divergence": self.divergence,
            "entropy": self.stats.entropy,
            "teacher_entropy": self.teacher_entropy,
            "logp": self.label.logp,
            "lse": self.stats.lse,
        }
        if self.stats.argmax is not None:
            is_largest = self.log_q == jnp.max(self.log_q, axis=1)[:, None]
            is_largest &= self.ids >= 0
            none = self.columns
            of_teacher = jnp.min(jnp.where(is_largest, self.ids, none), axis=1)
            found["agreement"] = self.stats.argmax == of_teacher
        outputs: dict[str, Array] = {}
        for name in spec.outputs:
            output = found[name]
            assert output is not None, name
            outputs[name] = output
        return outputs

    def gradient(self, weights: Array, options: Options) -> Operand:
        """dL/dlogits; in the logits' memory where XLA finds that nobody reads them later."""
        used = self.labels >= 0
        c = pair_coefficients(options, jnp.where(jnp.isnan(self.divergence), jnp.nan, weights))
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
        gradient = self._spread(parts, at_label)

        is_label, count = self.ids == self.labels[:, None], self.ids.shape[1]
        p_of_label = self.p_of_all
        if self.label_transform is not None:
            p_of_label = _Part(self.label_transform, self.label, target).probabilities(self.x)
        of_label = jnp.where(is_label, self.label.one_minus_p[:, None], -p_of_label)
        of_form = self.terms.form[:, :count] - self.p[:, :count] * sum_of_forms[:, None]
        dz = times(target[:, None], of_label) + times(c.form[:, None], of_form)
        dx = jnp.where(used[:, None], dz * self.transform.derivative(self.x), 0.0)
        return Logits(_at(gradient, self.ids, dx.astype(gradient.dtype)))

    def _spread(self, parts: Sequence[_Part], at_label: Array) -> Array:
        """dL/dlogits of rows whose dL/dz is the sum of the parts, but at their labels."""
        dtype = self.logits.dtype

        def step(buffer: Array, start: Array | int, width: int) -> Array:
            x = xla.tile_to_replace(buffer, start, width, dtype).astype(jnp.float32)
            dz = sum(times(part.factor[:, None], part.probabilities(x)) for part in parts)
            is_label = jnp.arange(width) == (self.labels - start)[:, None]
            dx = jnp.where(is_label, at_label[:, None], dz) * self.transform.derivative(x)
            dx = jnp.where((self.labels >= 0)[:, None], dx, 0.0)
            return xla.stored(buffer, dx.astype(dtype), start)

        gradient = xla.in_place(
            lambda buffer: xla.over_tiles(self.columns, xla.TILE, step, buffer), self.logits
        )
        return gradient.at[:, self.columns :].set(0)

    def _with_others(self, log_p: Array, log_q: Array, is_there: Array) -> tuple[Array, Array]:
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
            z = self.transform.value(xla.tile(self.logits, start, width).astype(jnp.float32))
            z = _at(z, self.ids - start, jnp.full(self.ids.shape, -jnp.inf))
            return merge(state, xla.tile_state(z, nowhere, start, Sums(), None))

        empty, _ = varying_alike((identity(self.labels.shape[0]), self.labels))
        return row_stats(xla.over_tiles(self.columns, xla.TILE, step, empty))


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


def _renormalised(log: Array) -> tuple[Array, Array]:
    """Less the logarithm of the row's sum, and whether there is anything to divide by."""
    largest = jnp.max(log, axis=1, keepdims=True)
    has_mass = largest != -jnp.inf
    safe = jnp.where(has_mass, largest, 0.0)
    log_sum = safe + jnp.log(jnp.sum(jnp.exp(log - safe), axis=1, keepdims=True))
    return jnp.where(has_mass, log - log_sum, -jnp.inf), has_mass[:, 0]
