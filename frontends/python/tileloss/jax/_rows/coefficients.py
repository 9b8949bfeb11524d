"""A row's backward in four numbers (src/core/row_coefficients.h; losses.md, "One gradient form for every loss")."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import scaled
from tileloss.jax._rows.stats import RowStats


class RowCoefficients(NamedTuple):
    """dL/dz_j = target [j = y] + p_j (prob + prob_logp log p_j) + uniform u_j, float32 [N] each; u_j is 1 or the class weight.

    prob is held as its sum with target: at a confident label the sum is all that is left of the two, and formed from rounded
    parts it would have no digit right.
    """

    target: Array
    prob_plus_target: Array
    prob_logp: Array
    uniform: Array

    @property
    def prob(self) -> Array:
        return self.prob_plus_target - self.target


class RowResult(NamedTuple):
    """What a loss gives: its value, and what the backward sweep needs."""

    loss: Array  # float32 [], or [N] with reduction or aggregation "none"
    coefficients: RowCoefficients  # 0 where a row is not used


def from_upstream(
    g_logp: Array, g_lse: Array | float, g_entropy: Array, entropy: Array | None
) -> RowCoefficients:
    """From upstream gradients of logp, lse and the entropy H, which may be None only where g_entropy is 0 throughout.

    With temperature_on = logprob the upstream gradient of logp' = logp / T is to be divided by T before.
    """
    from_entropy = jnp.zeros_like(g_logp)
    if entropy is not None:
        from_entropy = jnp.where(g_entropy == 0, 0.0, g_entropy * entropy)
    return RowCoefficients(
        target=g_logp,
        prob_plus_target=g_lse - from_entropy,
        prob_logp=-g_entropy + jnp.zeros_like(g_logp),
        uniform=jnp.zeros_like(g_logp),
    )


def masked_coefficients(
    coefficients: RowCoefficients, used: Array, wrong: Array
) -> RowCoefficients:
    """0 where a row is not used, NaN where its label is ``wrong``."""
    otherwise = jnp.where(wrong, jnp.float32(jnp.nan), jnp.float32(0))
    return RowCoefficients(*(jnp.where(used & ~wrong, c, otherwise) for c in coefficients))


def target_gradient(
    stats: RowStats, coefficients: RowCoefficients, class_weight: Array | float = 1.0
) -> Array:
    """dL/dz at the labels' columns, [N]: from 1 - p = R / S, so that it keeps its digits when p is near 1.

    ``class_weight``: that of the label, [N]. For used rows only: elsewhere the gradient is 0.
    """
    c = coefficients
    of_p = scaled(stats.p, c.prob_plus_target) + jnp.where(
        (c.prob_logp == 0) | (stats.p == 0), 0.0, stats.p * c.prob_logp * stats.logp
    )
    return c.target * stats.one_minus_p + of_p + c.uniform * class_weight
