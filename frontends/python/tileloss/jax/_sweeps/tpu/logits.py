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
from tileloss.jax._sweeps.tpu.blocks import Blocks, Call, blocks_for, chip
from tileloss.jax._sweeps.tpu.calls import IN_ORDER, PARALLEL, Blocked, call, shaped
from tileloss.jax._sweeps.tpu.rows import (
    empty_state,
    gradient_rows,
    labels_of_rows,
    merged,
    of_classes,
    state_shape,
    tile_transform,
)
from tileloss.jax._sweeps.tpu.tiles import (
    LANES,
    Columns,
    GradientRows,
    Ref,
    Tiles,
    TileTransform,
    clear,
    gather,
    gradient,
    lane_sum,
)
from tileloss.jax._sweeps.transform import LogitTransform


def forward(
    operand: Logits,
    target: Target,
    transform: LogitTransform,
    spec: Spec,
    blocks: Blocks | None = None,
) -> RowState:
    """The row states of the columns that ``spec`` names. ``blocks``: instead of the chip's."""
    x = operand.logits
    if spec.first:  # a copy, as blocks begin at their multiples
        x = lax.slice_in_dim(x, spec.first, spec.first + spec.columns, axis=1)
    rows = x.shape[0]
    if not rows or not spec.columns:
        return empty_state(rows, spec.sums)
    shapes = state_shape(rows, spec.sums)
    bt, bv = blocks or blocks_for(call_of("logits_forward", operand, spec))
    tiles = Tiles(spec.columns, bv, pl.cdiv(spec.columns, bv))
    weights = target.class_weights if spec.sums.smoothing_sum else None
    in_kernel, scale = tile_transform(transform)
    (state,) = call(
        partial(_logits_forward, tiles=tiles, transform=in_kernel),
        (
            Blocked(x, (bt, bv), lambda i, j: (i, j)),
            Blocked(labels_of_rows(target.labels, bt), (bt, LANES), _of_row),
            Blocked(of_classes(weights, tiles), (1, bv), lambda i, j: (0, j)),
            Blocked(scale),
        ),
        (Blocked(shapes, (bt, LANES), _of_row),),
        grid=(pl.cdiv(rows, bt), tiles.number),
        order=(PARALLEL, IN_ORDER),
        vmem_limit=chip().vmem_limit,
        scratch=(pltpu.VMEM((1, LANES), jnp.float32),),
    )
    return merged(state, weights, spec.columns)


def _logits_forward(
    x: Ref,
    labels: Ref,
    weights: Ref | None,
    scale: Ref | None,
    state: RowState,
    seen: Ref,
    *,
    tiles: Tiles,
    transform: TileTransform,
) -> None:
    step_forward(x, labels, weights, state, seen, tiles, transform.read(scale))


def step_forward(
    tile: Ref,
    labels: Ref,
    weights: Ref | None,
    state: RowState,
    seen: Ref,
    tiles: Tiles,
    transform: TileTransform,
) -> None:
    """Grid step (i, j): rows' block i, columns' block j, whose states lie in ``state`` from j = 0 on.

    ``seen``: scratch, the weights of the columns before, a lane each."""
    j, width = pl.program_id(1), tiles.width

    @pl.when(j == 0)
    def _() -> None:
        clear(state, tiles.columns)
        seen[...] = jnp.zeros_like(seen)

    def with_left(left: Array | int | None) -> None:
        before = seen[...] if state.smoothing_sum is not None else 0.0
        gather(tile, labels, state, Columns(j * width, left), transform, weights, before)

    tiles.visit(j, with_left)
    if state.smoothing_sum is not None:
        # The last tile's may count columns too many: nobody looks at them.
        seen[...] += width / LANES if weights is None else lane_sum(weights)


def backward(
    operand: Logits,
    target: Target,
    rows: BackwardRows,
    transform: LogitTransform,
    spec: Spec,
    blocks: Blocks | None = None,
) -> Logits:
    """dL/dlogits; in the logits' memory where nobody reads them later. ``blocks``: instead of the chip's."""
    x = operand.logits
    if not x.size:
        return operand
    bt, bv = blocks or blocks_for(call_of("logits_backward", operand, spec))
    tiles = Tiles(spec.columns, bv, pl.cdiv(x.shape[1], bv))
    weights = target.class_weights if spec.has_uniform else None
    in_kernel, scale = tile_transform(transform)
    (dx,) = call(
        partial(_logits_backward, tiles=tiles, transform=in_kernel),
        (
            Blocked(x, (bt, bv), lambda i, j: (i, j)),
            Blocked(labels_of_rows(target.labels, bt), (bt, LANES), _of_row),
            Blocked(gradient_rows(rows, transform, spec, bt), (bt, LANES), _of_row),
            Blocked(of_classes(weights, tiles), (1, bv), lambda i, j: (0, j)),
            Blocked(scale),
        ),
        (Blocked(shaped(x.shape, x.dtype), (bt, bv), lambda i, j: (i, j)),),
        grid=(pl.cdiv(x.shape[0], bt), tiles.number),
        order=(PARALLEL, PARALLEL),
        vmem_limit=chip().vmem_limit,
        aliases={0: 0},
    )
    return Logits(dx)


def _logits_backward(
    x: Ref,
    labels: Ref,
    rows: GradientRows,
    weights: Ref | None,
    scale: Ref | None,
    dx: Ref,
    *,
    tiles: Tiles,
    transform: TileTransform,
) -> None:
    j, width = pl.program_id(1), tiles.width

    def with_left(left: Array | int | None) -> None:
        columns = Columns(j * width, left)
        gradient(x, dx, labels, rows, columns, transform.read(scale), weights)

    tiles.visit(j, with_left)


def call_of(kernel: str, operand: Logits, spec: Spec) -> Call:
    rows, columns = operand.logits.shape
    arrays = (
        7 if kernel == "logits_backward" else 1 + len(jax.tree.leaves(state_shape(rows, spec.sums)))
    )
    return Call(kernel, rows, columns, operand.logits.dtype.itemsize, row_arrays=arrays)


def _of_row(i: Array, j: Array) -> tuple[Array, int]:
    return i, 0
