"""The sweeps of cross-entropy with class probabilities over logits, in plain XLA: the row states, then over logits and
probabilities L = sum_j t_j (-log p_j) and T = sum_j t_j with t = c ((1-s) q + s/V), then the gradient p_j T - t_j. Any platform.

Scratch is a few float32 arrays [N, TILE]. A backward of its own makes all of it again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._devices import varying_alike
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.stats import RowStats, row_stats
from tileloss.jax._sweeps import xla
from tileloss.jax._sweeps.divergence import times
from tileloss.jax._sweeps.operands import Logits, Operand, Spec
from tileloss.jax._sweeps.pairs import Pair, PairSpec, State
from tileloss.jax._sweeps.transform import LogitTransform, make_transform


def forward(
    pair: Pair, labels: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], State]:
    loss = _Rows(pair, labels, options, spec).loss
    return {"loss": loss}, loss


def backward(
    pair: Pair, labels: Array, weights: Array, state: State, options: Options, spec: PairSpec
) -> Operand:
    assert isinstance(state, Array)
    # As the gradient may lie over the logits, it has to wait for the forward.
    weights = jnp.where(jnp.isnan(state), jnp.nan, weights)
    return _Rows(pair, labels, options, spec).gradient(weights)


def value_and_grad(
    pair: Pair, labels: Array, weights: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], Operand]:
    rows = _Rows(pair, labels, options, spec)
    return {"loss": weights * rows.loss}, rows.gradient(weights)


class _Sums(NamedTuple):
    loss: Array
    total: Array


class _Rows:
    """What the rows come to once logits and probabilities have been swept."""

    def __init__(self, pair: Pair, labels: Array, options: Options, spec: PairSpec) -> None:
        assert isinstance(pair.student, Logits)
        self.logits, self.probs = pair.student.logits, pair.beside["target_probs"]
        self.class_weights = pair.beside.get("class_weights")
        self.smoothing = options.plain("label_smoothing")
        self.transform: LogitTransform = make_transform(options)
        self.columns = spec.columns
        part = Spec(spec.columns)
        state = xla.forward(pair.student, labels, self.transform, part, None)
        self.stats: RowStats = row_stats(state)

        def step(sums: _Sums, start: Array | int, width: int) -> _Sums:
            x = xla.tile(self.logits, start, width).astype(jnp.float32)
            wanted = self._wanted(start, width)
            loss = jnp.sum(times(wanted, -self._log_p(x)), axis=1)
            return _Sums(sums.loss + loss, sums.total + jnp.sum(wanted, axis=1))

        empty, _ = varying_alike((_Sums(*[jnp.zeros(labels.shape, jnp.float32)] * 2), labels))
        sums = xla.over_tiles(spec.columns, xla.TILE, step, empty)
        is_finite = jnp.isfinite(self.stats.max) & jnp.isfinite(sums.total)
        self.loss = jnp.where(is_finite, sums.loss, jnp.nan)
        self.total = sums.total

    def gradient(self, weights: Array) -> Operand:
        """dL/dlogits; in the logits' memory where XLA finds that nobody reads them later."""
        of_rows = jnp.where(jnp.isnan(self.loss), jnp.nan, weights)[:, None]

        def step(buffer: Array, start: Array | int, width: int) -> Array:
            tile = xla.tile_to_replace(buffer, start, width, self.logits.dtype)
            x = tile.astype(jnp.float32)
            dz = jnp.exp(self._log_p(x)) * self.total[:, None] - self._wanted(start, width)
            dx = times(of_rows, dz) * self.transform.derivative(x)
            return xla.stored(buffer, dx.astype(tile.dtype), start)

        gradient = xla.in_place(
            lambda buffer: xla.over_tiles(self.columns, xla.TILE, step, buffer), self.logits
        )
        return Logits(gradient.at[:, self.columns :].set(0))

    def _log_p(self, x: Array) -> Array:
        z = self.transform.value(x)
        return (z - self.stats.max[:, None]) - self.stats.log_sum[:, None]

    def _wanted(self, start: Array | int, width: int) -> Array:
        """t of a tile."""
        q = xla.tile(self.probs, start, width).astype(jnp.float32)
        smooth = (1 - self.smoothing) * q + self.smoothing / self.columns
        if self.class_weights is None:
            return smooth
        return smooth * xla.tile(self.class_weights, start, width, axis=0)
