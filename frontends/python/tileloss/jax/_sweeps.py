"""The two sweeps over the vocabulary in plain XLA: tiles of columns, one after the other, so that nothing of the logits' size is
held besides logits and gradient. Any platform.

Scratch is a few float32 arrays [N, TILE]. The tail that fills no tile is a step of its own, so no column is padded or masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from tileloss.jax._rows.coefficients import RowCoefficients, target_gradient
from tileloss.jax._rows.inputs import Rows
from tileloss.jax._rows.state import RowState, identity, merge
from tileloss.jax._transform import LogitTransform

TILE = 2048  # columns of a step
_Carry = TypeVar("_Carry")


class Sums(NamedTuple):
    """Which optional arrays of the row state a forward sweep gathers."""

    entropy_sum: bool = False
    collision_sum: bool = False
    smoothing_sum: bool = False
    argmax: bool = False


def forward_sweep(
    logits: Array,
    labels: Array,
    transform: LogitTransform,
    *,
    columns: int,
    sums: Sums,
    class_weights: Array | None = None,
) -> RowState:
    """The row states of logits [N, V] at labels [N].

    ``columns``: the first so many are the vocabulary, the others padding. ``class_weights``: float32 [columns], of the smoothing
    sum; default 1.
    """

    def step(state: RowState, start: Array | int, width: int) -> RowState:
        z = transform.value(_tile(logits, start, width).astype(jnp.float32))
        weights = None if class_weights is None else _slice(class_weights, start, width, axis=0)
        return merge(state, _tile_state(z, labels - start, start, sums, weights))

    empty = identity(logits.shape[0], **sums._asdict())
    return _over_tiles(columns, step, empty)


def backward_sweep(
    logits: Array,
    rows: Rows,
    coefficients: RowCoefficients,
    transform: LogitTransform,
    *,
    columns: int,
    class_weights: Array | None = None,
) -> Array:
    """dL/dlogits [N, V] in the logits' dtype; in their memory where XLA finds that nobody reads them later.

    Rows that do not count and the padding get 0, whatever they hold.
    """
    c, stats = coefficients, rows.stats
    of_label = (
        1.0 if class_weights is None else class_weights[jnp.where(rows.wrong, 0, rows.labels)]
    )
    at_label = target_gradient(stats, c, of_label)

    def step(buffer: Array, start: Array | int, width: int) -> Array:
        x = _tile(buffer, start, width).astype(jnp.float32)
        log_p = (transform.value(x) - stats.max[:, None]) - stats.log_sum[:, None]
        p = jnp.exp(log_p)
        of_logp = jnp.where(
            (c.prob_logp[:, None] == 0) | (p == 0), 0.0, c.prob_logp[:, None] * log_p
        )
        weights = 1.0 if class_weights is None else _slice(class_weights, start, width, axis=0)
        gradient = p * (c.prob[:, None] + of_logp) + c.uniform[:, None] * weights
        is_label = jnp.arange(width) == (rows.labels - start)[:, None]
        gradient = jnp.where(is_label, at_label[:, None], gradient) * transform.derivative(x)
        gradient = jnp.where(rows.used[:, None], gradient, 0.0).astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, gradient, start, axis=1)

    gradient = _over_tiles(columns, step, logits)
    return gradient.at[:, columns:].set(0)


def _over_tiles(
    columns: int, step: Callable[[_Carry, Array | int, int], _Carry], carry: _Carry
) -> _Carry:
    full = columns // TILE
    if full:
        carry = lax.fori_loop(0, full, lambda i, c: step(c, i * TILE, TILE), carry)
    tail = columns - full * TILE
    return step(carry, full * TILE, tail) if tail else carry


def _slice(x: Array, start: Array | int, width: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, width, axis)


def _tile(logits: Array, start: Array | int, width: int) -> Array:
    return _slice(logits, start, width, axis=1)


def _tile_state(
    z: Array, labels: Array, start: Array | int, sums: Sums, weights: Array | None
) -> RowState:
    """The row states of one tile z [N, width]; ``labels`` count from its first column."""
    width = z.shape[1]
    is_label = jnp.arange(width) == labels[:, None]
    largest = jnp.max(z, axis=1)  # NaN where there is one
    # Of rows of -inf alone every exp is 0, and no term is the NaN of -inf - -inf.
    shifted = jnp.where(z == largest[:, None], 0.0, z - largest[:, None])
    exps = jnp.where(largest[:, None] == -jnp.inf, 0.0, jnp.exp(shifted))
    collision_sum = entropy_sum = smoothing_sum = argmax = weight = None
    if sums.collision_sum:
        collision_sum = jnp.sum(exps * exps, axis=1)
    if sums.entropy_sum:
        entropy_sum = jnp.sum(jnp.where(exps == 0, 0.0, shifted * exps), axis=1)
    if sums.smoothing_sum:
        # Relative to a maximum of -inf or +inf: each term is the column's own z.
        terms = jnp.where(jnp.isinf(largest)[:, None], z, shifted)
        smoothing_sum = jnp.sum(terms if weights is None else weights * terms, axis=1)
        weight = jnp.float32(width) if weights is None else jnp.sum(weights)
    if sums.argmax:
        first = jnp.argmax(z, axis=1).astype(jnp.int32) + start
        argmax = jnp.where(jnp.isnan(largest), -1, first).astype(jnp.int32)
    return RowState(
        max=largest,
        sum=jnp.sum(jnp.where(is_label, 0.0, exps), axis=1),
        target=jnp.max(jnp.where(is_label, z, -jnp.inf), axis=1, initial=-jnp.inf),
        entropy_sum=entropy_sum,
        collision_sum=collision_sum,
        smoothing_sum=smoothing_sum,
        argmax=argmax,
        smoothing_weight=weight,
    )
