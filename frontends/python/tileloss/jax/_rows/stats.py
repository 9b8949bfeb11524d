"""The numbers that losses are made of, from the row states, and the row outputs (src/core/row_stats.h, row_outputs.h)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.state import RowState


class RowStats(NamedTuple):
    """float32 [N] each; None where the state lacks the array that it is made of."""

    max: Array  # m
    sum: Array  # S, the label's term included
    log_sum: Array  # log S: p_j = exp(z_j - m) / S and log p_j = (z_j - m) - log S, never z_j - lse
    lse: Array  # m + log S
    logp: Array  # of the label
    p: Array  # of the label
    one_minus_p: Array  # R / S: keeps its digits where p is near 1
    entropy: Array | None  # nats
    log_sum_sq_probs: Array | None  # log sum_j p_j^2
    smoothing_sum: Array | None  # sum_j c_j (z_j - m); of z_j where m is infinite
    argmax: Array | None  # int32


def row_stats(state: RowState) -> RowStats:
    """The rounding rules of losses.md: the label stays out of R, so that 1 - p = R / S and logp = -log1p(R) keep their digits
    when p is near 1; m and log S stay apart, so that an offset common to all logits costs nothing.

    Where m is not finite (all -inf, a +inf, a NaN) lse = m says which, and the rest is NaN.
    """
    is_finite = jnp.isfinite(state.max)

    def defined(x: Array) -> Array:
        return jnp.where(is_finite, x, jnp.nan)

    shifted = state.label_logit - state.max
    label_term = jnp.exp(shifted)
    total = state.sum + label_term
    # S - 1 has the digits of log S: either the label's term is the 1, or R holds one, and R - 1 is exact for R <= 2.
    above_one = jnp.where(shifted == 0, state.sum, (state.sum - 1) + label_term)
    log_sum = defined(jnp.log1p(above_one))
    entropy = log_sum_sq_probs = None
    if state.entropy_sum is not None:
        entropy = log_sum - state.entropy_sum / total
    if state.collision_sum is not None:
        # The sum holds the maximum's own term, 1.
        log_sum_sq_probs = jnp.log1p(state.collision_sum - 1) - 2 * log_sum
    return RowStats(
        max=state.max,
        sum=defined(total),
        log_sum=log_sum,
        lse=jnp.where(is_finite, state.max + log_sum, state.max),
        logp=shifted - log_sum,
        p=defined(label_term / total),
        one_minus_p=defined(state.sum / total),
        entropy=entropy,
        log_sum_sq_probs=log_sum_sq_probs,
        smoothing_sum=state.smoothing_sum,
        argmax=state.argmax,
    )


class RowOutputs(NamedTuple):
    """What `logprobs` gives for each row, logp for each label; None: not asked for. Rows that are ignored give 0 (argmax -1).
    With temperature_on "logprob" logp is divided by T."""

    # generated: rows of logprobs
    logp: Array | None = None  # float32: log softmax at the label
    lse: Array | None = None  # float32: log sum_j exp(z_j)
    entropy: Array | None = None  # float32: nats
    argmax: Array | None = None  # int32: lowest index on ties; -1 if the row holds a NaN
    correct: Array | None = None  # bool: argmax == label
    log_sum_sq_probs: Array | None = None  # float32: log sum_j p_j^2
    # float32: mean of z over the valid columns; not together with class_weights
    mean_logit: Array | None = None
    # end of generated


def row_outputs(
    stats: RowStats,
    used: Array,
    labels: Array,
    *,
    classes: int,
    allowed: Array | None = None,
    logp_divisor: Number = 1.0,
) -> RowOutputs:
    """``used`` [N] bool: the rows that count. ``classes``: of the whole vocabulary, padding excluded. ``allowed``: float32 [N],
    those of each row's softmax, of which a row may have none; None: all."""
    divisor: Number = classes
    if allowed is not None:
        stats, divisor = _of_classes(stats, allowed), jnp.maximum(allowed, 1)

    def masked(x: Array | None) -> Array | None:
        return None if x is None else jnp.where(used, x, 0)

    argmax = correct = mean_logit = None
    if stats.argmax is not None:
        argmax = jnp.where(used, stats.argmax, -1)
        correct = used & (stats.argmax == labels)
    if stats.smoothing_sum is not None:
        mean = stats.smoothing_sum / divisor
        mean_logit = jnp.where(jnp.isinf(stats.max), mean, stats.max + mean)
    return RowOutputs(
        logp=jnp.where(used, stats.logp / logp_divisor, 0),
        lse=jnp.where(used, stats.lse, 0),
        entropy=masked(stats.entropy),
        argmax=argmax,
        correct=correct,
        log_sum_sq_probs=masked(stats.log_sum_sq_probs),
        mean_logit=masked(mean_logit),
    )


def _of_classes(stats: RowStats, allowed: Array) -> RowStats:
    """Where none is allowed, what a row of -inf has."""
    argmax, total, is_empty = stats.argmax, stats.smoothing_sum, allowed == 0
    if argmax is not None:
        argmax = jnp.where(is_empty & (stats.max == -jnp.inf), 0, argmax)
    if total is not None:
        total = jnp.where(is_empty, stats.max, total)
    return stats._replace(argmax=argmax, smoothing_sum=total)
