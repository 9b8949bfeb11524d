"""The kernels from logits [N, V]. Blocks of columns go by one after the other, blocks of rows on any core.

A block that reaches past the array holds anything there: rows do not meet, and columns are masked.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.operands import BackwardRows, Logits, Spec, Target
from tileloss.jax._sweeps.tpu.blocks import Blocks, Call, blocks_for
from tileloss.jax._sweeps.tpu.calls import IN_ORDER, PARALLEL, Blocked, shaped
from tileloss.jax._sweeps.tpu.rows import (
    Cut,
    merged,
    state_shape,
    tiles_of,
)
from tileloss.jax._sweeps.tpu.tiles import (
    LANES,
    Columns,
    Given,
    Ref,
    Tiles,
    clear,
    gather,
    gradient,
    lane_sum,
)


def forward(operand: Logits, target: Target, spec: Spec, blocks: Blocks | None = None) -> RowState:
    """The row states of the columns that ``spec`` names. ``blocks``: instead of the chip's."""
    x = operand.logits
    if spec.first:  # a copy, as blocks begin at their multiples
        x = lax.slice_in_dim(x, spec.first, spec.first + spec.columns, axis=1)
    rows = x.shape[0]
    if not rows or not spec.columns:
        return target.empty(spec.sums)
    blocks = blocks or blocks_for(call_of("logits_forward", operand, spec))
    cut = Cut(blocks, tiles_of(blocks, spec, spec.columns), target, spec)
    (state,) = cut.run(
        partial(_logits_forward),
        (Blocked(x, blocks, _tile_index),),
        (cut.rows_of(state_shape(rows, spec.sums)),),
        order=(PARALLEL, IN_ORDER),
        scratch=(pltpu.VMEM((1, LANES), jnp.float32),),
    )
    return merged(state, target.class_weights, spec.columns)


def _logits_forward(x: Ref, given: Given, state: RowState, seen: Ref, tiles: Tiles) -> None:
    step_forward(x, given, state, seen, tiles)


def step_forward(tile: Ref, given: Given, state: RowState, seen: Ref, tiles: Tiles) -> None:
    """Grid step (i, j): rows' block i, columns' block j, whose states lie in ``state`` from j = 0 on.

    ``seen``: scratch, the weights of the columns before, a lane each."""
    j, width = pl.program_id(1), tiles.width

    @pl.when(j == 0)
    def _() -> None:
        clear(state, tiles.columns)
        seen[...] = jnp.zeros_like(seen)

    def with_left(left: Array | int | None) -> None:
        before = seen[...] if state.smoothing_sum is not None else 0.0
        gather(tile, given, state, Columns(j * width, left), tiles.transform, before)

    tiles.visit(j, with_left)
    if state.smoothing_sum is not None:
        # The last tile's may count columns too many: nobody looks at them.
        seen[...] += width / LANES if given.weights is None else lane_sum(given.weights)


def backward(
    operand: Logits, target: Target, rows: BackwardRows, spec: Spec, blocks: Blocks | None = None
) -> Logits:
    """dL/dlogits; in the logits' memory where nobody reads them later. ``blocks``: instead of the chip's."""
    x = operand.logits
    if not x.size:
        return operand
    blocks = blocks or blocks_for(call_of("logits_backward", operand, spec))
    cut = Cut(blocks, tiles_of(blocks, spec, x.shape[1]), target, spec)
    (dx,) = cut.run(
        partial(_logits_backward),
        (Blocked(x, blocks, _tile_index),),
        (Blocked(shaped(x.shape, x.dtype), blocks, _tile_index),),
        order=(PARALLEL, PARALLEL),
        aliases={0: 0},
        rows=rows,
    )
    return Logits(dx)


def _logits_backward(x: Ref, given: Given, dx: Ref, tiles: Tiles) -> None:
    j, width = pl.program_id(1), tiles.width

    def with_left(left: Array | int | None) -> None:
        gradient(x, dx, given, Columns(j * width, left), tiles.transform)

    tiles.visit(j, with_left)


def call_of(kernel: str, operand: Logits, spec: Spec) -> Call:
    rows, columns = operand.logits.shape
    arrays = (
        7 if kernel == "logits_backward" else 1 + len(jax.tree.leaves(state_shape(rows, spec.sums)))
    )
    return Call(kernel, rows, columns, operand.logits.dtype.itemsize, row_arrays=arrays)


def _tile_index(i: Array, j: Array) -> tuple[Array, Array]:
    return i, j
