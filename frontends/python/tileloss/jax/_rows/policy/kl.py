"""Estimators of the KL to the reference policy from one token (src/losses/policy/kl.h).

With d = ref - logp and the optional clamps of d and of the estimate:

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1;  dk1/dlogp = 1, dk2/dlogp = -d, dk3/dlogp = 1 - exp(d); 0 beyond a clamp

Source: Schulman 2020, "Approximating KL divergence"; the clamps as in verl.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.options import Options


class Kl(NamedTuple):
    """float32 [N] each; a value of NaN (d is NaN, or k3 of an infinite d) has a gradient of NaN."""

    value: Array
    dlogp: Array


def estimate_kl(difference: Array, options: Options) -> Kl:
    bound, largest = options.plain("kl_log_ratio_clamp"), options.plain("kl_clamp")
    is_clamped = jnp.abs(difference) > bound  # false when it is off
    d = jnp.where(is_clamped, jnp.copysign(jnp.float32(bound), difference), difference)
    kl = ESTIMATORS[options.choice("kl_estimator")](d)
    is_capped = jnp.abs(kl.value) > largest
    dlogp = jnp.where(is_clamped | is_capped, 0.0, kl.dlogp)
    return Kl(
        value=jnp.where(is_capped, jnp.copysign(jnp.float32(largest), kl.value), kl.value),
        dlogp=jnp.where(jnp.isnan(kl.value), kl.value, dlogp),
    )


def _k1(d: Array) -> Kl:
    return Kl(-d, jnp.ones_like(d))


def _k2(d: Array) -> Kl:
    return Kl(d * d / 2, -d)


def _k3(d: Array) -> Kl:
    # expm1(d) - d has lost all digits at d = 1e-7: below 1/2 its series, whose first omitted term is 2e-9 of the sum.
    series = jnp.zeros_like(d)
    for power in range(9, 1, -1):
        series = series * d + 1 / math.factorial(power)
    return Kl(jnp.where(jnp.abs(d) < 0.5, d * d * series, jnp.expm1(d) - d), -jnp.expm1(d))


ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3}
