"""The divergences, column by column (src/core/divergence.h).

dD/dz_j = p_j (g_j - mean), mean = sum_k p_k g_k, for g = dD/dp_j or that and any number: over a softmax one that gives 0 in every
digit where p = q. That of the forward KL, 1 - q/p, has no mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.options import Options
from tileloss.jax._rows.stats import RowStats


class Divergence(NamedTuple):
    kind: str
    beta: float

    @property
    def has_mean(self) -> bool:
        return self.kind != "forward_kl"

    @property
    def share(self) -> float:
        """That of q in the mixture m."""
        return 1 - self.beta if self.kind == "skew_reverse_kl" else self.beta

    @property
    def share_of_p(self) -> float:
        return self.beta if self.kind == "skew_reverse_kl" else 1 - self.beta


class Terms(NamedTuple):
    """A column's share of D, and p g."""

    value: Array
    form: Array


def make_divergence(options: Options) -> Divergence:
    return Divergence(options.choice("divergence"), options.plain("beta"))


def times(weight: Array, x: Array) -> Array:
    """weight * x, and 0 where the weight is 0: 0 log 0 = 0."""
    return weight * jnp.where(weight == 0, 0.0, x)


def _log_ratio(a: Array, b: Array) -> Array:
    """a - b of logarithms; 0 where both are -inf, as each term is 0 there."""
    has_none = (a == -jnp.inf) & (b == -jnp.inf)
    return jnp.where(has_none, 0.0, a) - jnp.where(has_none, 0.0, b)


class _Column(NamedTuple):
    """The numbers that the formulas are made of."""

    p: Array
    q: Array
    difference: Array  # p - q
    log_ratio: Array  # log p - log q: infinite where one of them is 0, any number where both are
    log_p: Array  # log(p/m)
    log_q: Array  # log(q/m)
    by_mixture: Array  # (p - q)/m, but of classes p/m
    # False: classes whose p need not sum to 1, so that their g is dD/dp itself.
    is_softmax: bool = True


def _terms(d: Divergence, x: _Column) -> Terms:
    """Each divergence: its value, g over a softmax, and dD/dp."""
    p, q, beta, is_softmax = x.p, x.q, d.beta, x.is_softmax
    if d.kind == "total_variation":
        return Terms(jnp.abs(x.difference) / 2, p * jnp.sign(x.difference) / 2)
    if d.kind == "forward_kl":
        return Terms(times(q, -x.log_ratio), x.difference if is_softmax else -q)
    if d.kind == "reverse_kl":
        value = times(p, x.log_ratio)
        return Terms(value, value if is_softmax else value + p)
    if d.kind == "jeffreys":
        value = times(p, x.log_ratio)
        form = value + x.difference if is_softmax else value + p - q
        return Terms(value + times(q, -x.log_ratio), form)
    if d.kind == "jsd":
        form = times((1 - beta) * p, x.log_p)
        return Terms(form + times(beta * q, x.log_q), form)
    if d.kind == "skew_forward_kl":  # over a softmax (1 - beta) (1 - q/m) = (1 - beta)^2 (p - q)/m
        value = times(q, x.log_q)
        if is_softmax:
            return Terms(value, times(p, (1 - beta) ** 2 * x.by_mixture))
        return Terms(value, -(1 - beta) * q * x.by_mixture)
    # Over a softmax log(p/m) + beta (1 - p/m) = log(p/m) - beta (1 - beta) (p - q)/m.
    value = times(p, x.log_p)
    if is_softmax:
        return Terms(value, value - times(p, beta * (1 - beta) * x.by_mixture))
    return Terms(value, value + p - beta * p * x.by_mixture)


def column_terms(d: Divergence, p: Array, q: Array, log_ratio: Array) -> Terms:
    """Of a softmax's columns; ``log_ratio``: log p - log q."""
    # The one of p and q of which m has the larger share is near, the other, of which it has w <= 1/2, far: m = a (1 + rest) with
    # a = near, to which the far one's share is a correction, or its part w far where that is more.
    is_student_near = d.share <= 0.5
    near, far, log_far = (p, q, -log_ratio) if is_student_near else (q, p, log_ratio)
    w = max(min(d.share, d.share_of_p), 2.0**-100)
    of_far = w * far
    is_near = of_far < near
    divisor = jnp.where(is_near, near, of_far)
    divisor = jnp.where(divisor == 0, 1.0, divisor)
    rest = jnp.where(is_near, w * (far - near), (1 - w) * near) / divisor
    log_of_mixture = jnp.log1p(rest)
    log_near = jnp.where(is_near, 0.0, -math.log(w) - log_far) - log_of_mixture
    log_far = jnp.where(is_near, log_far, -math.log(w)) - log_of_mixture
    log_p, log_q = (log_near, log_far) if is_student_near else (log_far, log_near)
    by_mixture = (p - q) / (divisor * (1 + rest))
    return _terms(d, _Column(p, q, p - q, log_ratio, log_p, log_q, by_mixture))


def label_terms(d: Divergence, student: RowStats, teacher: RowStats, is_same: Array) -> Terms:
    """The label's, from 1 - p and 1 - q, which keep their digits where a row is confident. ``is_same``: bool [N], whether both
    sides' numbers are to the last bit."""
    p, q = student.p, teacher.p
    # Where both are near 1, only their complements differ.
    of_complements = teacher.one_minus_p - student.one_minus_p
    difference = jnp.where((p > 0.5) & (q > 0.5), of_complements, p - q)
    difference = jnp.where(is_same, 0.0, difference)
    share = d.share
    m = p - share * difference if share <= 0.5 else q + d.share_of_p * difference
    rest = d.share_of_p * student.one_minus_p + share * teacher.one_minus_p
    log_m = jnp.where(m > 0.5, jnp.log1p(-rest), jnp.log(m))

    def unless_same(x: Array) -> Array:
        return jnp.where(is_same, 0.0, x)

    log_ratio = unless_same(_log_ratio(student.logp, teacher.logp))
    log_p, log_q = (unless_same(_log_ratio(side.logp, log_m)) for side in (student, teacher))
    by_mixture = jnp.where(m == 0, 0.0, difference / jnp.where(m == 0, 1.0, m))
    return _terms(d, _Column(p, q, difference, log_ratio, log_p, log_q, by_mixture))


def class_terms(d: Divergence, p: Array, q: Array, log_p: Array, log_q: Array) -> Terms:
    """Of classes whose p need not sum to 1, as those that a sparse teacher knows."""
    m = p + d.share * (q - p) if d.share <= 0.5 else q + d.share_of_p * (p - q)
    log_m = jnp.log(m)
    of_p = jnp.where(m == 0, 0.0, p / jnp.where(m == 0, 1.0, m))
    log_ratio, to_p, to_q = (
        _log_ratio(a, b) for a, b in ((log_p, log_q), (log_p, log_m), (log_q, log_m))
    )
    return _terms(d, _Column(p, q, p - q, log_ratio, to_p, to_q, of_p, False))


def renormalised(log: Array) -> tuple[Array, Array]:
    """Less the logarithm of the row's sum, and whether there is anything to divide by."""
    largest = jnp.max(log, axis=1, keepdims=True)
    has_mass = largest != -jnp.inf
    safe = jnp.where(has_mass, largest, 0.0)
    log_sum = safe + jnp.log(jnp.sum(jnp.exp(log - safe), axis=1, keepdims=True))
    return jnp.where(has_mass, log - log_sum, -jnp.inf), has_mass[:, 0]
