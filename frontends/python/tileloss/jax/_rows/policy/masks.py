"""Tokens dropped from the policy term: those of off-policy sequences, and those of low entropy. Detached."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tileloss.jax._rows.arithmetic import difference, zero_if_nan
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.policy.sequences import Sequences


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
