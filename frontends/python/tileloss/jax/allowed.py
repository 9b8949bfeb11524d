"""The tokens that a row's softmax runs over."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tileloss._core.views import WORD, check_sets, words_of
from tileloss.jax._devices import Leading
from tileloss.jax._shards import Shards
from tileloss.jax._sweeps.allowed import count


def allowed_from(tokens: Any, offsets: Any = None, vocab_size: int | None = None) -> Array:
    """Sets of tokens as every function's ``allowed`` takes them: int32 [..., ceil(V / 32)], of which bit j mod 32 of word j
    div 32 says whether token j is in the set.

    Args:
        tokens: bool [..., V]; or the tokens of all rows' sets back to back, integers [M]. One that is there twice counts once.
        offsets: with integers: row i's are tokens[offsets[i]:offsets[i + 1]]; [N + 1], from 0 to M.
        vocab_size: with integers: V, of all columns of the logits, padding included.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given. Tokens and offsets that only a traced
            program knows are not looked at: a token out of range is left out.
    """
    array = jnp.asarray(tokens)
    ends = None if offsets is None else jnp.asarray(offsets)
    is_bool = array.dtype == jnp.bool_
    if not is_bool and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"tokens: expected bool or integers, got {array.dtype}")
    if ends is not None and not jnp.issubdtype(ends.dtype, jnp.integer):
        raise TypeError(f"offsets: expected integers, got {ends.dtype}")
    check_sets(array.shape, is_bool, None if ends is None else ends.shape, vocab_size)
    if ends is None or vocab_size is None:
        return _packed(array)
    # A narrow type has no room for V.
    array, ends = array.astype(jnp.int32), ends.astype(jnp.int32)
    if not any(isinstance(x, jax.core.Tracer) for x in (array, ends)):
        _check(array, ends, vocab_size)
    places = jnp.arange(array.size)
    rows = jnp.searchsorted(ends, places, side="right") - 1
    order = jnp.lexsort((array, rows))
    rows, array = rows[order], array[order]
    again = (rows[1:] == rows[:-1]) & (array[1:] == array[:-1])
    is_new = jnp.ones(array.size, bool).at[1:].set(~again)
    is_new &= (array >= 0) & (array < vocab_size) & (rows >= 0)
    bits = jnp.where(is_new, jnp.uint32(1) << (array % WORD).astype(jnp.uint32), 0)
    words = jnp.zeros((ends.size - 1, words_of(vocab_size)), jnp.uint32)
    words = words.at[rows, array // WORD].add(bits.astype(jnp.uint32), mode="drop")
    return lax.bitcast_convert_type(words, jnp.int32)


def checked_allowed(given: Any, rows: Leading, width: int, shards: int) -> Array:
    """The sets as [N, W], or [1, W] where all rows have the same. ``width``: the operand's columns, those of a shard."""
    dtype = getattr(given, "dtype", None)  # JAX makes int32 of an int64
    if dtype != jnp.int32:
        raise TypeError(
            f"allowed: expected int32 words (allowed_from), got {dtype or type(given).__name__}"
        )
    words, last = jnp.asarray(given), words_of(width)
    if words.shape not in ((last,), (prod(rows.shape), last), (*rows.shape, last)):
        raise ValueError(
            f"allowed: expected shape [{last}], one set for all rows, or {[*rows.shape, last]}, a word for {WORD} columns, "
            f"got {list(words.shape)}"
        )
    if shards > 1 and width % WORD:
        raise ValueError(
            f"allowed: expected shards whose first column is a multiple of {WORD}, got shards of {width} columns"
        )
    return words[None] if words.ndim == 1 else rows.flat(words, last)


def allowed_classes(words: Array, rows: int, classes: int, shards: Shards | None) -> Array:
    """float32 [N]: how many classes each row's softmax has. ``classes``: of the whole vocabulary."""
    if shards is None:
        found = count(words, classes)
    else:
        start = lax.axis_index(shards.axis) * shards.width
        found = lax.psum(count(words, classes - start), shards.axis)  # type: ignore[no-untyped-call]
    return jnp.broadcast_to(found, (rows,))


def _check(tokens: Array, offsets: Array, vocab_size: int) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != tokens.size or bool(jnp.any(offsets[1:] < offsets[:-1])):
        raise ValueError(
            f"offsets: expected ascending from 0 to the number of tokens, {tokens.size}, got {first} to {last}"
            + " with a step back" * bool(jnp.any(offsets[1:] < offsets[:-1]))
        )
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if tokens.size and bool(jnp.any(wrong)):
        place = int(jnp.argmax(wrong))
        raise ValueError(
            f"tokens[{place}]: expected 0 to {vocab_size - 1}, got {int(tokens[place])}"
        )


def _packed(mask: Array) -> Array:
    words = words_of(mask.shape[-1])
    missing = words * WORD - mask.shape[-1]
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)])
    octets = jnp.packbits(padded, axis=-1, bitorder="little")
    octets = (
        octets.reshape(-1, 4).astype(jnp.uint32) << jnp.arange(0, WORD, 8, dtype=jnp.uint32)[None]
    )
    bits = jnp.sum(octets, axis=-1, dtype=jnp.uint32).reshape(*mask.shape[:-1], words)
    return lax.bitcast_convert_type(bits, jnp.int32)
