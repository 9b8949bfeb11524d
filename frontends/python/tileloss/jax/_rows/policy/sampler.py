"""The correction for an engine that sampled with other probabilities: r = exp(old - sampler), truncated or masked, detached."""

from __future__ import annotations

import jax.numpy as jnp
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
