"""The tokens that a row's softmax runs over, as bits: int32 [N, W], or [1, W], one set for all rows, W = ceil(V / 32). Column j
is bit j mod 32 of word j div 32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from tileloss._core.views import WORD, words_of


def tile_of(words: Array, start: Array | int, width: int) -> Array:
    """bool [N, width] or [1, width]: whether columns from ``start`` on, a multiple of 32, are in the sets."""
    here = lax.dynamic_slice_in_dim(words, start // WORD, words_of(width), axis=1)
    bits = here[:, :, None] >> jnp.arange(WORD, dtype=jnp.int32)[None, None]
    return (bits & 1).astype(bool).reshape(words.shape[0], here.shape[1] * WORD)[:, :width]


def contains(words: Array, columns: Array) -> Array:
    """bool [N, K]: whether the ``columns`` [N, K] are in the sets."""
    whole = jnp.broadcast_to(words, (columns.shape[0], words.shape[1]))
    here = jnp.take_along_axis(whole, columns // WORD, axis=1)
    return (here >> (columns % WORD)) & 1 == 1


def count(words: Array, columns: Array | int) -> Array:
    """float32 [N] or [1]: how many of the first ``columns`` are in the sets."""
    left = jnp.clip(columns - WORD * jnp.arange(words.shape[1]), 0, WORD).astype(jnp.uint32)
    some = (jnp.uint32(1) << left % WORD) - 1
    read = jnp.where(left == WORD, jnp.uint32(0xFFFFFFFF), some)
    bits = lax.population_count(lax.bitcast_convert_type(words, jnp.uint32) & read[None])
    return jnp.sum(bits.astype(jnp.int32), axis=1).astype(jnp.float32)


def weight(words: Array, weights: Array) -> Array:
    """float32 [N] or [1]: the sum of the ``weights`` [columns] of the columns in the sets."""
    padded = jnp.pad(weights, (0, words.shape[1] * WORD - weights.shape[0])).reshape(-1, WORD)

    def step(bit: Array, total: Array) -> Array:
        has = (words >> bit) & 1 == 1
        return total + jnp.sum(jnp.where(has, padded[:, bit][None], 0.0), axis=1)

    first = jnp.sum(jnp.where(words & 1 == 1, padded[:, 0][None], 0.0), axis=1)
    return lax.fori_loop(1, WORD, step, first)


def opened(words: Array, is_empty: Array) -> Array:
    """The sets with all columns in those that are empty, ``is_empty`` [N]: their gradient is NaN, as that of a row of -inf."""
    return jnp.where(is_empty[: words.shape[0], None], -1, words)


def only(is_in: Array | None, x: Array, otherwise: Array | float) -> Array:
    """x at the columns of a tile that ``is_in`` names; None: all of them."""
    return x if is_in is None else jnp.where(is_in, x, otherwise)
