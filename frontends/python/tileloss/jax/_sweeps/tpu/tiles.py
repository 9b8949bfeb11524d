"""The vector work on one tile of logits in VMEM, the same from logits and with the LM head: GROUP rows at a time, and of those
LANES columns at a time, so that a group's numbers stay in vector registers between the pass for the maximum and the pass for the
sums.

A row's state is kept a lane apart: lane l has seen the columns l, l + 128, ... of its row. So no step reduces across lanes; XLA
merges the 128 states of a row afterwards (rows.py). What counts is operations an element: what a call does not need is left out
while tracing, and only the tile with the vocabulary's end masks its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.operands import UNUSED

LANES = 128
GROUP = 16  # rows: what a register of bfloat16 holds
# e^x is 0 in float32 below: stands for -inf where -inf * 0 would be NaN.
_LOWEST = -128.0

Ref = Any  # Pallas has no public name for the type of its references


class TileTransform(NamedTuple):
    """The logit transform as a kernel has it: z = scale x, or scale tanh(slope x) with a softcap."""

    scale: Number | None  # None: in SMEM, as the temperature is traced
    slope: float = 0.0  # 0: no softcap

    def read(self, scale: Ref | None) -> TileTransform:
        return self if scale is None else self._replace(scale=scale[0])

    def value(self, x: Array) -> Array:
        if self.slope:
            x = jnp.tanh(self.slope * x)
        assert self.scale is not None
        return x if isinstance(self.scale, float) and self.scale == 1 else self.scale * x

    def derivative(self, x: Array) -> Array:
        """With a softcap: 1 / cosh^2, which keeps its digits where tanh is 1. Without one rows.py has it in the coefficients."""
        assert self.scale is not None
        e = jnp.exp(-2 * self.slope * jnp.abs(x))
        return (4 * self.slope * self.scale) * e / ((1 + e) * (1 + e))


class Tiles(NamedTuple):
    """How the columns are cut, and what becomes of a tile's logits."""

    columns: int  # how many count
    width: int  # of a tile, a multiple of LANES
    number: int  # of tiles; those past the columns make zeros of what is padding
    transform: TileTransform = TileTransform(1.0)

    def visit(self, j: Array, step: Callable[[Array | int | None], None]) -> None:
        """step(left) for tile j: how many of its columns count, None if all do. Its code is there once for the tiles that need
        no mask, and once for those that do."""
        whole = self.columns // self.width
        if whole:
            pl.when(j < whole)(lambda: step(None))
        if whole < self.number:
            pl.when(j >= whole)(lambda: step(self.columns - j * self.width))


class Columns(NamedTuple):
    """Which classes a tile's columns are."""

    start: Array | int  # the first column's
    left: Array | int | None = None  # this many of them count; None: all


class GradientRows(NamedTuple):
    """What the gradient of a tile is made of, float32 [rows, LANES]; rows.py says how they come about:
    dL/dx = (scale + slope (z - max)) exp(z - max) + uniform u, and at_label at the label."""

    max: Ref
    scale: Ref
    at_label: Ref
    slope: Ref | None = None  # None: 0 in every row
    uniform: Ref | None = None


class Given(NamedTuple):
    """What a kernel is given besides what makes a tile."""

    labels: Ref  # int32 [rows, LANES] classes
    weights: Ref | None  # float32 [1, columns], of the smoothing sum
    scale: Ref | None  # the transform's where it is traced, float32 [1]
    rows: GradientRows | None = None  # of a gradient


def gather(
    tile: Ref,
    given: Given,
    state: RowState,
    columns: Columns,
    transform: TileTransform,
    seen: Array | float = 0.0,
) -> None:
    """Merges a tile [rows, columns] into the row states, references to float32 (argmax: int32) [rows, LANES].

    ``seen``: the sum of the weights of the columns before, [] or [1, LANES].
    """
    transform, weights = transform.read(given.scale), given.weights

    def group(rows: Any) -> None:
        lane = _lanes()
        label = given.labels[rows, :] - columns.start
        z = [
            _valid_or(transform.value(x), lane, columns.left, k, -jnp.inf)
            for k, x in enumerate(_slices(tile, rows))
        ]
        old: RowState = jax.tree.map(lambda ref: ref[rows, :], state)
        largest = old.max
        if old.argmax is not None:
            argmax = old.argmax
            for k, column in enumerate(z):
                is_first = _is_above(column, largest)
                argmax = jnp.where(is_first, columns.start + k * LANES + lane, argmax)
                largest = jnp.maximum(largest, column)
            state.argmax[rows, :] = argmax  # type: ignore[index]
        else:
            largest = jnp.maximum(largest, _reduced(jnp.maximum, z))
        # Sums are relative to the maximum, and to 0 where that is infinite: no exp(-inf - -inf) arises.
        reference, before = _finite_or_zero(largest), _finite_or_zero(old.max)
        new = _moved(old, before, reference, seen)
        for k, column in enumerate(z):
            shifted = column - reference
            e = jnp.exp(shifted)
            is_label = lane == label - k * LANES
            terms: dict[str, Any] = {
                "label_logit": jnp.where(is_label, column, new.label_logit),
                "sum": new.sum + jnp.where(is_label, 0.0, e),
            }
            if new.entropy_sum is not None:
                terms["entropy_sum"] = new.entropy_sum + e * jnp.maximum(shifted, _LOWEST)
            if new.collision_sum is not None:
                terms["collision_sum"] = new.collision_sum + e * e
            if new.smoothing_sum is not None:
                term = shifted if weights is None else weights[:, _lanes_of(k)] * shifted
                term = _valid_or(term, lane, columns.left, k, 0.0)
                terms["smoothing_sum"] = new.smoothing_sum + term
            new = new._replace(**terms)
        new = new._replace(max=largest, argmax=None)
        for ref, value in zip(state, new, strict=True):
            if ref is not None and value is not None:
                ref[rows, :] = value

    _for_groups(tile.shape[0], group)


def _is_above(x: Array, largest: Array) -> Array:
    """Of equal columns the first stays the argmax."""
    return x > largest


def clear(state: RowState, columns: int) -> None:
    """The empty state; lane l's argmax is l, as if no column were above -inf, or -1 where it has no column."""
    for name, ref in state._asdict().items():
        if ref is None:
            continue
        value: Any = jnp.zeros(ref.shape, ref.dtype)
        if name in ("max", "label_logit"):
            value = jnp.full(ref.shape, -jnp.inf, ref.dtype)
        elif name == "argmax":
            lane = lax.broadcasted_iota(jnp.int32, ref.shape, 1)
            value = jnp.where(lane < columns, lane, -1)
        ref[...] = value


def gradient(tile: Ref, out: Ref, given: Given, columns: Columns, transform: TileTransform) -> None:
    """dL/dx of a tile, in ``out``'s dtype; exactly 0 in rows with the label UNUSED and in columns that do not count."""
    transform, weights = transform.read(given.scale), given.weights

    def group(rows: Any) -> None:
        lane = _lanes()
        label = given.labels[rows, :]
        is_used = label != UNUSED
        label = label - columns.start
        row: GradientRows = jax.tree.map(lambda ref: ref[rows, :], given.rows)
        for k, x in enumerate(_slices(tile, rows)):
            shifted = transform.value(x) - row.max
            factor = row.scale
            if row.slope is not None:
                factor = factor + row.slope * jnp.maximum(shifted, _LOWEST)
            d = factor * jnp.exp(shifted)
            if row.uniform is not None:
                d += row.uniform if weights is None else row.uniform * weights[:, _lanes_of(k)]
            d = jnp.where(lane == label - k * LANES, row.at_label, d)
            if transform.slope:
                d *= transform.derivative(x)
            d = _valid_or(jnp.where(is_used, d, 0.0), lane, columns.left, k, 0.0)
            out[rows, _lanes_of(k)] = d.astype(out.dtype)

    _for_groups(tile.shape[0], group)


def lane_sum(x: Ref) -> Array:
    """[1, columns] summed over the columns of each lane, [1, LANES]."""
    total = x[:, _lanes_of(0)]
    for k in range(1, x.shape[1] // LANES):
        total += x[:, _lanes_of(k)]
    return total


def _moved(old: RowState, before: Array, to: Array, seen: Array | float) -> RowState:
    """The sums relative to ``to`` instead of ``before``."""
    factor = jnp.exp(old.max - to)
    shift = before - to
    entropy_sum = collision_sum = smoothing_sum = None
    if old.entropy_sum is not None:
        terms = old.sum + jnp.exp(old.label_logit - before)  # the label's term is not in the sum
        entropy_sum = factor * (old.entropy_sum + shift * terms)
    if old.collision_sum is not None:
        collision_sum = factor * factor * old.collision_sum
    if old.smoothing_sum is not None:
        smoothing_sum = old.smoothing_sum + shift * seen
    return RowState(
        max=old.max,
        sum=factor * old.sum,
        label_logit=old.label_logit,
        entropy_sum=entropy_sum,
        collision_sum=collision_sum,
        smoothing_sum=smoothing_sum,
    )


def _for_groups(rows: int, body: Callable[[Any], None]) -> None:
    def step(i: Array, nothing: None) -> None:
        body(pl.ds(pl.multiple_of(i * GROUP, GROUP), GROUP))

    lax.fori_loop(0, rows // GROUP, step, None)


def _slices(tile: Ref, rows: Any) -> list[Array]:
    return [tile[rows, _lanes_of(k)].astype(jnp.float32) for k in range(tile.shape[1] // LANES)]


def _lanes_of(k: int) -> slice:
    return slice(k * LANES, (k + 1) * LANES)


def _lanes() -> Array:
    return lax.broadcasted_iota(jnp.int32, (GROUP, LANES), 1)


def _reduced(operation: Callable[[Array, Array], Array], terms: list[Array]) -> Array:
    """In pairs, and pairs of pairs: no long chain of operations that wait for one another."""
    while len(terms) > 1:
        pairs = [operation(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def _finite_or_zero(x: Array) -> Array:
    return jnp.where(jnp.abs(x) == jnp.inf, 0.0, x)


def _valid_or(x: Array, lane: Array, left: Array | int | None, k: int, otherwise: float) -> Array:
    """x in the columns that count of lanes' slice ``k``."""
    return x if left is None else jnp.where(lane < left - k * LANES, x, otherwise)
