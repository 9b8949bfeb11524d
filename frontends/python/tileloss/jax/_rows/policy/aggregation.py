"""From per-token losses to one: each token's weight (src/losses/aggregation.h)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import inverse_or_zero
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.policy.sequences import Sequences


def token_weights(tokens: Array, sequences: Sequences, options: Options) -> Array:
    """float32, [] or [N]. ``tokens``: n_b [B], those in use of each sequence; with M of all, B sequences, empty ones included.

    Counts are floored at 1; what the caller gives (num_items) is not, and 0 of it gives 0.
    """
    aggregation, count = options.choice("aggregation"), max(sequences.count, 1)
    if aggregation == "seq_mean_token_mean":
        return sequences.spread(1 / (count * jnp.maximum(tokens, 1.0)))
    if aggregation == "token_mean":
        return _over_items(jnp.maximum(jnp.sum(tokens), 1.0), options)
    if aggregation == "seq_mean_token_sum_norm":
        given = options.integer("max_length")
        longest = given if given > 0 else sequences.length
        return jnp.float32(1 / max(sequences.count * longest, 1))
    if aggregation == "seq_mean_token_sum":
        return jnp.float32(1 / count)
    if aggregation == "sum":
        return _over_items(jnp.float32(1), options)
    assert aggregation == "none", aggregation
    return jnp.float32(1)


def _over_items(otherwise: Array, options: Options) -> Array:
    if not options.is_given("num_items"):
        return 1 / otherwise
    return inverse_or_zero(jnp.asarray(options.number("num_items"), jnp.float32))
