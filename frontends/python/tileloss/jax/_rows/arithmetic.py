"""Operations that say what becomes of 0, inf and NaN, as the C++ row stage has them (src/losses/policy/token.h)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

# A number of the options: known while tracing, or a float32 scalar that may change from step to step.
Number = float | Array


def clamp(x: Array, low: Number, high: Number) -> Array:
    """x within [low, high]; a NaN bound is none, and a NaN x stays."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def scaled(x: Array, y: Array) -> Array:
    """x * y, where an exact 0 in x wins over an infinite y, but not over NaN."""
    return jnp.where((x == 0) & jnp.isinf(y), 0.0, x * y)


def difference(a: Array, b: Array) -> Array:
    """a - b; exactly 0 where the two are the same finite number."""
    return jnp.where((a == b) & jnp.isfinite(a), 0.0, a - b)


def zero_if_nan(x: Array) -> Array:
    return jnp.where(jnp.isnan(x), 0.0, x)


def inverse_or_zero(x: Array) -> Array:
    """1 / x, and 0 for x = 0: a denominator of nothing gives nothing."""
    return jnp.where(x == 0, 0.0, 1 / jnp.where(x == 0, 1.0, x))
