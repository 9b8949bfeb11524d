"""The sweeps of distillation from a teacher of which some columns are known, over logits, in plain XLA
(src/backends/cpu/sweep/known_columns.h): the row states, with the tail "lump" those of the other columns too, the K columns and
the class of all others in float32 arrays [N, K + 1], and a gradient that is p times one number but at the K columns.

Any platform. Scratch is a few float32 arrays [N, TILE]. A backward of its own makes all of it again.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tileloss.jax._devices import varying_alike
from tileloss.jax._rows.coefficients import RowCoefficients, target_gradient
from tileloss.jax._rows.distillation import pair_coefficients
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.state import RowState, identity, merge
from tileloss.jax._rows.stats import RowStats, row_stats
from tileloss.jax._sweeps import xla
from tileloss.jax._sweeps.divergence import Terms, class_terms, make_divergence, times
from tileloss.jax._sweeps.operands import (
    ELSEWHERE,
    BackwardRows,
    Logits,
    Operand,
    Spec,
    Sums,
)
from tileloss.jax._sweeps.pairs import Pair, PairSpec, State
from tileloss.jax._sweeps.transform import make_transform

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
            "logp": self.stats.logp,
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
        zero = jnp.zeros_like(of_others)
        coefficients = RowCoefficients(c.target, times(c.form, of_others), zero, zero)
        rows = BackwardRows(
            labels=self.labels,
            used=used,
            state=self.state,
            log_sum=self.stats.log_sum,
            coefficients=coefficients,
            at_label=target_gradient(self.stats, coefficients),
        )
        part = Spec(self.columns, has_prob_logp=False, has_uniform=False)
        gradient = xla.backward(Logits(self.logits), rows, self.transform, part, None).logits

        is_label, count = self.ids == self.labels[:, None], self.ids.shape[1]
        of_label = jnp.where(is_label, self.stats.one_minus_p[:, None], -self.p_of_all)
        of_form = self.terms.form[:, :count] - self.p[:, :count] * sum_of_forms[:, None]
        dz = times(c.target[:, None], of_label) + times(c.form[:, None], of_form)
        dx = jnp.where(used[:, None], dz * self.transform.derivative(self.x), 0.0)
        return Logits(_at(gradient, self.ids, dx.astype(gradient.dtype)))

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
