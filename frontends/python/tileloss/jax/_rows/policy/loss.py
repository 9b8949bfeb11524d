"""The GRPO family, put together (src/losses/policy_loss.h). For each token in use, with D = logp - old, rho = exp(D) or its
sequence's, A the advantage:

    loss = sum_t a_t [ f_t l(rho_t, logp_t, A_t) + beta KL_t ] - entropy bonus

a_t the aggregation's weight, f_t = off-policy mask * entropy mask * sampler ratio (detached), KL_t times rho with kl_importance.
Coefficients, u_t the upstream gradient:

    token level:    dloss/dlogp_t = u_t a_t [ f_t (l_logp + rho l_rho) + beta (rho (KL_logp + KL), or KL_logp) ]
    sequence level: rho_b = exp(sum D / n_b), so l_rho and KL reach every token of b: dloss/dlogp_t = u_t a_t [ f_t l_logp +
                    beta (rho_b KL_logp, or KL_logp) ] + (rho_b / n_b) sum_t' u_t' a_t' [ f_t' l_rho,t' + beta KL_t' ]
    dloss/dH_t = -u_t entropy_coef * (1 / tokens kept, or a_t)

In float32 a ratio beyond e^88 is inf, where the C++ row stage, in double, still has a number: a clipped or saturated branch takes
it, a loss that is a multiple of it is beyond float32 anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import Number, clamp, difference, scaled
from tileloss.jax._rows.coefficients import RowResult, from_upstream, masked_coefficients
from tileloss.jax._rows.inputs import read, read_rows
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.policy.factors import (
    EntropyMask,
    entropy_mask,
    off_policy_sequences,
    sampler_ratio,
)
from tileloss.jax._rows.policy.kinds import (
    Numbers,
    Token,
    TokenLoss,
    read_numbers,
    token_loss,
    uses_ratio,
    vespo_log_weight,
    vespo_phi,
)
from tileloss.jax._rows.policy.kl import Kl, estimate_kl
from tileloss.jax._rows.policy.metrics import TokenRecords, metrics
from tileloss.jax._rows.policy.sequences import Sequences, token_weights
from tileloss.jax._rows.state import RowState


class PolicyResult(NamedTuple):
    result: RowResult
    # float32 [M], in the order of the library's names; None: not asked for. Without state.entropy_sum that of the entropy is NaN.
    metrics: Array | None


def policy_loss(
    state: RowState,
    labels: Array,
    advantages: Array,
    options: Options,
    *,
    classes: int,
    mask: Array | None = None,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    sampler_logp: Array | None = None,
    sequence_offsets: Array | None = None,
    sequence_length: int = 0,
    places: Array | None = None,
    loss_grad: Array | None = None,
    wants_metrics: bool = True,
) -> PolicyResult:
    """The loss, the rows' coefficients and the step's metrics.

    Args:
        state: of the rows' transformed logits, [N]; with an entropy bonus or mask, and for the metric, with entropy_sum.
        labels: integers [N]; rows with ignore_index count nowhere.
        advantages: [B] or [N], as options' advantage_level says.
        options: of "policy_loss".
        classes: of the whole vocabulary, padding excluded.
        mask: [N]; rows with 0 count nowhere, whatever the other inputs hold there.
        old_logp: float32 [N]; None: the new logp itself, detached (rho = 1, with gradient).
        ref_logp, sampler_logp: float32 [N].
        sequence_offsets: integers [B+1], may be traced; else ``sequence_length`` T of [B, T] rows; neither: one sequence.
        places: integers [N], of the rows in those sequences; default: their own.
        loss_grad: the upstream gradient, of the loss's shape; default 1.
    """
    rows = read_rows(state, labels, options, classes=classes, mask=mask)
    used = rows.used
    sequences = Sequences(labels.shape[0], sequence_offsets, sequence_length, places)
    advantages = advantages.astype(jnp.float32)
    if options.choice("advantage_level") == "sequence":
        advantages = sequences.spread(advantages)

    def given(x: Array | None) -> Array | None:
        return None if x is None else read(x, used)

    tokens = _Tokens(
        used=used,
        logp=rows.stats.logp / rows.logp_divisor,
        entropy=rows.stats.entropy,
        advantage=read(advantages, used),
        old=given(old_logp),
        ref=given(ref_logp),
        sampler=given(sampler_logp),
        upstream=jnp.float32(1) if loss_grad is None else loss_grad.astype(jnp.float32),
    )
    numbers = read_numbers(options)
    terms = _terms(tokens, numbers, sequences, options)
    entropy = (
        tokens.entropy if tokens.entropy is not None else jnp.full(used.shape, jnp.nan, jnp.float32)
    )

    loss = _where_weighted(terms.weight, scaled(terms.factor, terms.policy.loss) + _kl_term(terms))
    bonus = _entropy_bonus(tokens, terms, options)
    g_entropy = jnp.zeros_like(loss)
    if bonus is not None:
        loss -= jnp.where(bonus == 0, 0.0, bonus * entropy)
        g_entropy -= tokens.upstream * bonus
    loss = jnp.where(used, loss, 0.0)
    if options.choice("aggregation") != "none":
        loss = jnp.sum(loss)

    g_logp = _logp_gradient(tokens, terms, sequences, options) / rows.logp_divisor
    coefficients = from_upstream(g_logp, 0.0, g_entropy, None if bonus is None else entropy)
    result = RowResult(loss, masked_coefficients(coefficients, used, rows.wrong))
    if not wants_metrics:
        return PolicyResult(result, None)
    records = TokenRecords(
        used=used,
        kl=_metric_kl(tokens, terms, options),
        entropy=entropy,
        ratio=terms.ratio,
        sampler_ratio=terms.sampler_ratio,
        phi=terms.phi,
        advantage=tokens.advantage,
        is_dropped=terms.is_dropped,
    )
    return PolicyResult(result, metrics(records, numbers, sequences, options))


class _Tokens(NamedTuple):
    """The inputs, [N] each, 0 where a row does not count."""

    used: Array
    logp: Array
    entropy: Array | None
    advantage: Array
    old: Array | None
    ref: Array | None
    sampler: Array | None
    upstream: Array  # [] or [N]


class _Terms(NamedTuple):
    """A token's parts, before they are put together."""

    weight: Array  # the aggregation's, [] or [N]
    factor: Array  # f
    ratio: Array
    ratio_slope: Array  # d log rho / dlogp, without a sequence's 1 / n_b: 0 beyond log_ratio_clamp
    sampler_ratio: Array
    phi: Array
    is_dropped: Array
    policy: TokenLoss
    kl: Kl
    entropy_mask: EntropyMask
    beta: Number
    has_importance: bool
    is_sequence_level: bool
    sequence_tokens: Array  # [B], floored at 1


def _terms(t: _Tokens, numbers: Numbers, sequences: Sequences, options: Options) -> _Terms:
    kind = options.choice("kind")
    counts = sequences.sum(t.used.astype(jnp.float32))
    at_least_one = jnp.maximum(counts, 1.0)
    log_ratio, slope = _log_ratio(t, options)
    is_sequence_level = options.choice("ratio_level") == "sequence"
    if is_sequence_level:
        means = sequences.sum(jnp.where(t.used, log_ratio, 0.0)) / at_least_one
        ratio = jnp.exp(sequences.spread(means))
    else:
        ratio = jnp.exp(log_ratio)

    old = t.logp if t.old is None else t.old
    correction = sampler_ratio(old, t.sampler, t.used, sequences, options)
    is_dropped = jnp.zeros_like(t.used)
    if options.is_given("off_policy_threshold"):
        before = old if t.sampler is None else t.sampler
        is_behind = off_policy_sequences(before, t.logp, t.used, sequences, options)
        is_dropped = is_behind & (t.advantage < 0)
    by_entropy = entropy_mask(t.entropy, t.used, options)
    factor = jnp.where(is_dropped, 0.0, 1.0) * by_entropy.factor
    phi = jnp.ones_like(ratio)
    if kind == "vespo":
        # The sampler ratio is in phi, in place of the multiplication.
        shares = jnp.where(t.used, vespo_log_weight(log_ratio, correction), 0.0)
        phi = vespo_phi(sequences.spread(sequences.sum(shares)), t.advantage, options)
    else:
        factor = factor * correction
    kl = Kl(jnp.zeros_like(ratio), jnp.zeros_like(ratio))
    if t.ref is not None:
        kl = estimate_kl(difference(t.ref, t.logp), options)
    return _Terms(
        weight=token_weights(counts, sequences, options),
        factor=factor,
        ratio=ratio,
        ratio_slope=slope,
        sampler_ratio=correction,
        phi=phi,
        is_dropped=is_dropped,
        policy=token_loss(kind, Token(t.logp, ratio, t.advantage, phi), numbers),
        kl=kl,
        entropy_mask=by_entropy,
        beta=options.number("beta"),
        has_importance=options.may_differ("beta", 0) and options.flag("kl_importance"),
        is_sequence_level=is_sequence_level,
        sequence_tokens=at_least_one,
    )


def _log_ratio(t: _Tokens, options: Options) -> tuple[Array, Array]:
    """D [N], clamped, and dD/dlogp: 0 beyond the clamp. Without old_logp D is 0 with gradient."""
    if t.old is None:
        return jnp.where(jnp.isnan(t.logp), t.logp, 0.0), jnp.ones_like(t.logp)
    bound, d = options.plain("log_ratio_clamp"), difference(t.logp, t.old)
    return clamp(d, -bound, bound), jnp.where(jnp.abs(d) > bound, 0.0, 1.0)


def _where_weighted(weight: Array, x: Array) -> Array:
    """weight * x, and 0 for a weight of 0, whatever x is."""
    return jnp.where(weight == 0, 0.0, weight * x)


def _times_beta(terms: _Terms, x: Array) -> Array:
    """beta * x, and 0 for a beta of 0, whatever x is."""
    if isinstance(terms.beta, Array):
        return jnp.where(terms.beta == 0, 0.0, terms.beta * x)
    return terms.beta * x if terms.beta != 0 else jnp.zeros_like(x)


def _kl_term(terms: _Terms) -> Array:
    value = terms.kl.value
    return _times_beta(terms, terms.ratio * value if terms.has_importance else value)


def _metric_kl(t: _Tokens, terms: _Terms, options: Options) -> Array | None:
    if t.ref is None:
        return None
    value = terms.kl.value
    return terms.ratio * value if options.flag("kl_importance") else value


def _entropy_bonus(t: _Tokens, terms: _Terms, options: Options) -> Array | None:
    """What a token's entropy counts for, times entropy_coef; None: there is no bonus."""
    if not options.may_differ("entropy_coef", 0):
        return None
    if options.choice("entropy_reduction") == "as_loss":
        weight = terms.weight
    else:
        kept = jnp.sum(terms.entropy_mask.kept, dtype=jnp.float32)
        weight = terms.entropy_mask.factor / jnp.maximum(kept, 1.0)
    coef = options.number("entropy_coef")
    return jnp.where(jnp.float32(coef) == 0, 0.0, coef * weight) + jnp.zeros_like(t.logp)


def _logp_gradient(t: _Tokens, terms: _Terms, sequences: Sequences, options: Options) -> Array:
    # A ratio that the loss is not made of may be NaN, and has no share in the gradient either.
    has_ratio, has_importance = uses_ratio(options.choice("kind")), terms.has_importance
    policy, kl, ratio = terms.policy, terms.kl, terms.ratio
    own = scaled(terms.factor, policy.dlogp)
    of_kl = ratio * kl.dlogp if has_importance else kl.dlogp
    if not terms.is_sequence_level:
        if has_ratio:
            through = scaled(terms.factor, scaled(policy.dratio, ratio))
            own += scaled(terms.ratio_slope, through)
        if has_importance:
            of_kl += scaled(terms.ratio_slope, ratio * kl.value)
    own += _times_beta(terms, of_kl)
    g = _where_weighted(terms.weight, own * t.upstream)
    if terms.is_sequence_level and (has_ratio or has_importance):
        slope = scaled(terms.factor, policy.dratio)
        if has_importance:
            slope += _times_beta(terms, kl.value)
        shares = jnp.where(t.used, _where_weighted(terms.weight, slope) * t.upstream, 0.0)
        reaching = sequences.spread(sequences.sum(shares) / terms.sequence_tokens)
        g += scaled(terms.ratio_slope, scaled(reaching, ratio))
    return g
