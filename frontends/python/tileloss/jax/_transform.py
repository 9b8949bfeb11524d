"""The logit transform z = softcap(logit_scale x) / T in float32 (src/core/logit_transform.h)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.options import Options


class LogitTransform(NamedTuple):
    scale: Number  # without softcap: logit_scale / T, the one factor
    inner: float  # logit_scale / c; 0: no softcap
    outer: Number  # c / T

    def value(self, x: Array) -> Array:
        """z of float32 logits."""
        return self.outer * jnp.tanh(self.inner * x) if self.inner else self.scale * x

    def derivative(self, x: Array) -> Array | Number:
        """dz/dx, of x's shape or one number for all."""
        if not self.inner:
            return self.scale
        cosh = jnp.cosh(self.inner * x)
        return self.scale / (cosh * cosh)


def make_transform(options: Options) -> LogitTransform:
    on_logits = options.choice("temperature_on") == "logits"
    temperature = options.number("temperature") if on_logits else 1.0
    scale, softcap = options.plain("logit_scale"), options.plain("softcap")
    inner = scale / softcap if softcap > 0 else 0.0
    return LogitTransform(scale / temperature, inner, softcap / temperature)
