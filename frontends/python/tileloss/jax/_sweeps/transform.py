"""The logit transform z = softcap(logit_scale x) / T in float32 (src/core/logit_transform.h)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.options import Options


class LogitTransform(NamedTuple):
    logit_scale: float
    softcap: float  # 0: none
    temperature: Number  # 1 where it is not the logits' (temperature_on = logprob)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """A temperature that may be traced is the one leaf."""
        has_leaf = isinstance(self.temperature, Array)
        return (self[2:], self[:2]) if has_leaf else ((), tuple(self))

    def value(self, x: Array) -> Array:
        """z of float32 logits."""
        if not self.softcap:
            return self._factor * x
        return self.softcap / self.temperature * jnp.tanh(self.logit_scale / self.softcap * x)

    def derivative(self, x: Array) -> Array | Number:
        """dz/dx, of x's shape or one number for all."""
        if not self.softcap:
            return self._factor
        cosh = jnp.cosh(self.logit_scale / self.softcap * x)
        return self._factor / (cosh * cosh)

    @property
    def _factor(self) -> Number:
        return self.logit_scale / self.temperature


jax.tree_util.register_pytree_node(
    LogitTransform,
    LogitTransform.tree_flatten,
    lambda known, leaves: LogitTransform(*known, *leaves),
)
IDENTITY = LogitTransform(1.0, 0.0, 1.0)


def make_transform(options: Options) -> LogitTransform:
    on_logits = options.choice("temperature_on") == "logits"
    temperature = options.number("temperature") if on_logits else 1.0
    return LogitTransform(options.plain("logit_scale"), options.plain("softcap"), temperature)


def make_teacher_transform(options: Options) -> LogitTransform:
    """Of "distillation": the student's, but for what is given."""

    def own(name: str) -> float:
        return options.plain(f"teacher_{name}" if options.is_given(f"teacher_{name}") else name)

    temperature = _temperature(options, "teacher_temperature")
    return LogitTransform(own("logit_scale"), own("softcap"), temperature)


def make_label_transform(options: Options) -> LogitTransform | None:
    """Of the cross-entropy of a loss with a teacher, where its temperature is one of its own."""
    if not options.is_given("label_temperature"):
        return None
    temperature = _temperature(options, "label_temperature")
    return make_transform(options)._replace(temperature=temperature)


def _temperature(options: Options, name: str) -> Number:
    """The option of that name; that of the logits where it is not given."""
    return options.number(name if options.is_given(name) else "temperature")
