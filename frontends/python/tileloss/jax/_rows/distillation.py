"""Distillation's row stage (src/losses/distillation.h), with token weights w:

    loss_i = w_i [ label_weight (-logp_i) + divergence_weight s D_i ],  s = 1 or T^2

mean divides by the sum of w_i of the rows in use, or by num_items when given; a denominator of 0 gives 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import Number, inverse_or_zero
from tileloss.jax._rows.inputs import read
from tileloss.jax._rows.options import Options


class DistillationRows(NamedTuple):
    """Numbers of each row, [...] as the rows lie; None: not asked for. Whatever either side has is the student's; logp is of the
    label, which is to be given. 0 where a row does not count. None is differentiable."""

    # generated: rows of distillation
    divergence: Array | None = None  # float32: the divergence alone, neither weighted nor scaled
    entropy: Array | None = None  # float32: nats
    teacher_entropy: Array | None = None  # float32: nats, of the classes that the divergence sees
    agreement: Array | None = None  # bool: whether both have the same argmax
    logp: Array | None = None  # float32: log softmax at the label
    lse: Array | None = None  # float32: log sum_j exp(z_j)
    # end of generated


class PairCoefficients(NamedTuple):
    """dL/dz_j = form p_j (g_j - mean) + target ([j = y] - p_j), float32 [N] each."""

    form: Array
    target: Array


class RowWeights(NamedTuple):
    """A row's loss is multiplied by token * factor."""

    token: Array  # w, float32 [N]; 0 where a row does not count
    factor: Array  # the reduction's, float32 []

    @property
    def row_scales(self) -> Array:
        return self.token * self.factor


class WeightedRows(NamedTuple):
    """The rows of a loss whose target is not labels, [N]."""

    used: Array  # bool
    wrong: Array  # bool: used, but with a label or a teacher's columns that cannot be
    weights: RowWeights

    @property
    def factors(self) -> Array:
        """What the sweeps are to multiply each row's gradient by."""
        return jnp.where(self.wrong, jnp.nan, self.weights.row_scales)

    def results(
        self,
        options: Options,
        found: dict[str, Array],
        names: Iterable[str],
        *,
        is_weighted: bool = False,
    ) -> dict[str, Array]:
        """The loss, and those of the row outputs ``found`` by the sweeps that ``names`` names. ``is_weighted``: whether a "loss"
        among them is times `factors`."""
        if "loss" in found:
            weighted = found["loss"] if is_weighted else self.weights.row_scales * found["loss"]
            loss = jnp.where(self.weights.factor == 0, 0.0, weighted)
        else:
            parts = {n: self._masked(found[n]) for n in ("divergence", "logp") if n in found}
            loss = row_losses(options, parts["divergence"], parts.get("logp"), self.weights)
        loss = self._masked(loss)
        named = {name: self._masked(found[name]) for name in names}
        return {"loss": loss if options.is_per_row else jnp.sum(loss), **named}

    def _masked(self, x: Array) -> Array:
        """0 where a row does not count, NaN where it is wrong."""
        if x.dtype == jnp.bool_:
            return x & self.used & ~self.wrong
        return jnp.where(self.used, jnp.where(self.wrong, jnp.nan, x), 0.0)


def row_weights(options: Options, used: Array, token_weights: Array | None) -> RowWeights:
    token = jnp.where(used, jnp.float32(1), 0)
    if token_weights is not None:
        token = read(token_weights, used)
    if options.choice("reduction") != "mean":
        return RowWeights(token, jnp.float32(1))
    items = options.number("num_items") if options.is_given("num_items") else jnp.sum(token)
    return RowWeights(token, inverse_or_zero(jnp.asarray(items, jnp.float32)))


def row_losses(
    options: Options, divergence: Array, logp: Array | None, weights: RowWeights
) -> Array:
    """Each row's loss. ``logp``: of the label; None where label_weight is known to be 0."""
    of_label, of_divergence = _weight(options, "label"), _weight(options, "divergence")
    # A part without weight is left out, whatever it is; but a row whose divergence is NaN stays NaN.
    has_divergence = (of_divergence > 0) | jnp.isnan(divergence)
    loss = jnp.where(has_divergence, of_divergence * _scale(options) * divergence, 0.0)
    if logp is not None:
        loss += jnp.where(of_label > 0, -of_label * logp, 0.0)
    return jnp.where(weights.factor == 0, 0.0, weights.row_scales * loss)


def pair_coefficients(options: Options, weights: Array) -> PairCoefficients:
    of_label, of_divergence = _weight(options, "label"), _weight(options, "divergence")
    return PairCoefficients(
        form=weights * of_divergence * _scale(options), target=-of_label * weights
    )


def _weight(options: Options, of: str) -> Array:
    return jnp.asarray(options.number(f"{of}_weight"), jnp.float32)


def _scale(options: Options) -> Number:
    if not options.flag("scale_by_temperature_squared"):
        return 1.0
    temperature = options.number("temperature")
    return temperature * temperature
