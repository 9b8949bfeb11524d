"""What a token's policy term is multiplied by, detached: the correction for an engine that sampled with other probabilities,
r = exp(old - sampler), truncated or masked; and 0 where it is dropped: tokens of off-policy sequences, and those of low entropy.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tileloss.jax._rows.arithmetic import clamp, difference, zero_if_nan
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.policy.sequences import Sequences


def corrected(ratio: Array, options: Options) -> Array:
    """The ratio clamped to [sampler_min, sampler_max], or 0 outside; bounds inclusive, an absent bound is none."""
    low, high = options.plain("sampler_min"), options.plain("sampler_max")
    if options.choice("sampler_correction") == "truncate":
        return clamp(ratio, low, high)
    return jnp.where((ratio < low) | (ratio > high), 0.0, ratio)


def sampler_ratio(
    old: Array, sampler_logp: Array | None, used: Array, sequences: Sequences, options: Options
) -> Array:
    """r [N]: exp of the token's difference, or of its sequence's masked sum; a NaN difference counts 0. 1 without a correction.

    ``old``: old_logp, or the new logp where that is absent.
    """
    if options.choice("sampler_correction") == "off":
        return jnp.ones_like(old)
    assert sampler_logp is not None
    log_ratio = jnp.where(used, zero_if_nan(difference(old, sampler_logp)), 0.0)
    if options.choice("sampler_level") == "sequence":
        log_ratio = sequences.spread(sequences.sum(log_ratio))
    return corrected(jnp.exp(log_ratio), options)


class EntropyMask(NamedTuple):
    factor: Array  # float32 [N]: 1 kept, 0 dropped, NaN if the quantile of the batch is NaN
    kept: Array  # bool [N]: counts in the mean of the bonus


def entropy_mask(entropy: Array | None, used: Array, options: Options) -> EntropyMask:
    """Keeps tokens whose entropy is at least a threshold given by the caller, or the (1 - q) quantile of the tokens in use,
    linearly interpolated."""
    has_quantile = options.is_given("entropy_quantile")
    if not has_quantile and not options.is_given("entropy_threshold"):
        return EntropyMask(jnp.ones(used.shape, jnp.float32), used)
    assert entropy is not None, "an entropy mask needs state.entropy_sum"
    if has_quantile:
        threshold = quantile_threshold(entropy, used, options.plain("entropy_quantile"))
    else:
        threshold = jnp.asarray(options.number("entropy_threshold"), jnp.float32)
    is_nan = jnp.isnan(threshold)
    # A row whose entropy is NaN is not kept: the others' share of the bonus does not depend on it.
    kept = is_nan | (entropy >= threshold)
    factor = jnp.where(is_nan, threshold, kept.astype(jnp.float32))
    return EntropyMask(factor, kept & used)


# How near a place among the sorted entropies must be to a whole number to be one: q = 0.7 of 11 tokens asks for place 3, but in
# double for 3 + 4e-16, which would drop the token at that place.
_PLACE_SLACK = 1e-9


def quantile_threshold(entropy: Array, used: Array, q: float) -> Array:
    """The least entropy in use that is at least the (1 - q) quantile: so no interpolated value has to be rounded, and the tokens
    kept are the same. NaN if one of them is, or if there are none."""
    rows = entropy.shape[0]
    if rows == 0:
        return jnp.float32(jnp.nan)
    count = jnp.sum(used)
    ordered = jnp.sort(jnp.where(used, entropy, jnp.inf))
    # ceil((1 - q) (count - 1)) for every count that there may be, in double: float32 is off by whole places from 2^24 on, and
    # falls on the wrong side of whole numbers before. 4 bytes a row.
    places = np.ceil((1 - q) * np.arange(rows) - _PLACE_SLACK).astype(np.int32)
    threshold = ordered[jnp.asarray(places)[jnp.maximum(count - 1, 0)]]
    has_nan = jnp.any(used & jnp.isnan(entropy))
    return jnp.where(has_nan | (count == 0), jnp.nan, threshold)


def off_policy_sequences(
    before: Array, logp: Array, used: Array, sequences: Sequences, options: Options
) -> Array:
    """bool [N]: whether the mean over the row's sequence of before - logp exceeds off_policy_threshold; NaN counts 0.

    ``before``: sampler_logp, else old_logp, else the new logp.
    """
    threshold = options.plain("off_policy_threshold")
    behind = sequences.sum(jnp.where(used, zero_if_nan(difference(before, logp)), 0.0))
    tokens = jnp.maximum(sequences.sum(used.astype(jnp.float32)), 1.0)
    return sequences.spread(behind / tokens > threshold)
