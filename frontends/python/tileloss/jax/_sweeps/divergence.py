"""The divergences, column by column (src/backends/cpu/sweep/divergence_forms.h, src/core/divergence.h).

dD/dz_j = p_j (g_j - mean), mean = sum_k p_k g_k, for a g that is chosen so that p = q gives 0 in every digit. That of the forward
KL, 1 - q/p, has no mean.
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
    """A column's share of D, and p (g - what g is shifted by)."""

    value: Array
    form: Array


def make_divergence(options: Options) -> Divergence:
    return Divergence(options.choice("divergence"), options.plain("beta"))


def times(weight: Array, x: Array) -> Array:
    """weight * x, and 0 where the weight is 0: 0 log 0 = 0."""
    return jnp.where(weight == 0, 0.0, weight * x)


def column_terms(d: Divergence, p: Array, q: Array, log_ratio: Array) -> Terms:
    """``log_ratio``: log p - log q, infinite where one of them is 0, NaN where both are."""
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
    return _terms(
        d,
        p,
        q,
        difference=p - q,
        log_ratio=log_ratio,
        log_p=log_near if is_student_near else log_far,
        log_q=log_far if is_student_near else log_near,
        by_mixture=(p - q) / (divisor * (1 + rest)),
    )


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

    return _terms(
        d,
        p,
        q,
        difference=difference,
        log_ratio=unless_same(student.logp - teacher.logp),
        log_p=unless_same(student.logp - log_m),
        log_q=unless_same(teacher.logp - log_m),
        by_mixture=jnp.where(m == 0, 0.0, difference / m),
    )


def _terms(
    d: Divergence,
    p: Array,
    q: Array,
    *,
    difference: Array,
    log_ratio: Array,
    log_p: Array,
    log_q: Array,
    by_mixture: Array,
) -> Terms:
    """``difference``: p - q. ``log_p``, ``log_q``: log(p/m), log(q/m). ``by_mixture``: (p - q)/m."""
    beta = d.beta
    if d.kind == "total_variation":
        return Terms(jnp.abs(difference) / 2, p * jnp.sign(difference) / 2)
    if d.kind == "forward_kl":
        return Terms(times(q, -log_ratio), difference)
    if d.kind == "reverse_kl":
        reverse = times(p, log_ratio)
        return Terms(reverse, reverse)
    if d.kind == "jeffreys":
        reverse = times(p, log_ratio)
        return Terms(reverse + times(q, -log_ratio), reverse + difference)
    if d.kind == "jsd":
        form = times((1 - beta) * p, log_p)
        return Terms(form + times(beta * q, log_q), form)
    if d.kind == "skew_forward_kl":  # g = (1 - beta) (1 - q/m) = (1 - beta)^2 (p - q)/m
        return Terms(times(q, log_q), times(p, (1 - beta) ** 2 * by_mixture))
    # g = log(p/m) + beta (1 - p/m) = log(p/m) - beta (1 - beta) (p - q)/m
    value = times(p, log_p)
    return Terms(value, value - times(p, beta * (1 - beta) * by_mixture))


def class_terms(d: Divergence, p: Array, q: Array, log_p: Array, log_q: Array) -> Terms:
    """Classes' shares of D, and p dD/dp: of classes whose p need not sum to 1, as those that a sparse teacher knows."""
    beta, share = d.beta, d.share
    forward, reverse = times(q, log_q - log_p), times(p, log_p - log_q)
    if d.kind == "total_variation":
        return Terms(jnp.abs(p - q) / 2, p * jnp.sign(p - q) / 2)
    if d.kind == "forward_kl":
        return Terms(forward, -q)
    if d.kind == "reverse_kl":
        return Terms(reverse, reverse + p)
    if d.kind == "jeffreys":
        return Terms(forward + reverse, reverse + p - q)
    m = p + share * (q - p) if share <= 0.5 else q + d.share_of_p * (p - q)
    of_p, of_q = times(p, log_p - jnp.log(m)), times(q, log_q - jnp.log(m))
    if d.kind == "jsd":
        return Terms((1 - beta) * of_p + beta * of_q, (1 - beta) * of_p)
    p_over_m = jnp.where(m == 0, 0.0, p / jnp.where(m == 0, 1.0, m))
    if d.kind == "skew_forward_kl":
        return Terms(of_q, -(1 - beta) * q * p_over_m)
    return Terms(of_p, of_p + p - beta * p * p_over_m)
