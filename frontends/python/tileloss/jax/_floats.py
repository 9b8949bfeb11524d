"""Arrays of float types that a public function was given, and the pair of an LM head's low-rank part."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from tileloss._core.slots import MOST_RANKS
from tileloss._core.views import kind_of


def floats(name: str, x: Any) -> Array:
    array = jnp.asarray(x)
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {array.dtype}")
    if not all(isinstance(n, int) for n in array.shape):
        raise ValueError(
            f"{name}: expected a shape of known sizes (jax.export: no symbolic ones), got [{', '.join(map(str, array.shape))}]"
        )
    return array


def checked_low_rank(
    given: Any, rows: tuple[int, ...], vocab: int, layout: str
) -> tuple[Array, Array]:
    """hidden_r [*rows, R] and head_r, which lies as the head does.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    kinds = "[..., R] and [R, V]" if layout == "HV" else "[..., R] and [V, R]"
    if not isinstance(given, (tuple, list)) or len(given) != 2 or any(x is None for x in given):
        raise TypeError(f"low_rank: expected None or two arrays, {kinds}, got {kind_of(given)}")
    hidden, head = (floats(f"low_rank[{i}]", x) for i, x in enumerate(given))
    if hidden.ndim == 0 or hidden.shape[:-1] != rows:
        expected = ", ".join(map(str, [*rows, "R"]))
        raise ValueError(f"low_rank[0]: expected shape [{expected}], got {list(hidden.shape)}")
    if not 1 <= (rank := hidden.shape[-1]) <= MOST_RANKS:
        raise ValueError(f"low_rank[0]: expected a last dimension of 1 to {MOST_RANKS}, got {rank}")
    expected_head = (rank, vocab) if layout == "HV" else (vocab, rank)
    if head.shape != expected_head:
        raise ValueError(
            f"low_rank[1]: expected shape {list(expected_head)} of head_layout {layout!r}, got {list(head.shape)}"
        )
    return hidden, head
