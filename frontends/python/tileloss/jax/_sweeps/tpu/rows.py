"""What the kernels are told of rows and classes, and what they give: [N] and [V] on XLA's side, blocks of [rows, LANES] and
[1, columns] on theirs.

A number of a row is there in every lane: in memory [N, 1] takes as much, and a kernel would wait for each to be spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from tileloss.jax._rows.state import RowState, merge_all
from tileloss.jax._sweeps.operands import UNUSED, BackwardRows, Spec, Sums, Target
from tileloss.jax._sweeps.tpu.blocks import Blocks, chip
from tileloss.jax._sweeps.tpu.calls import Blocked, Order, call, shaped
from tileloss.jax._sweeps.tpu.tiles import LANES, Given, GradientRows, Tiles, TileTransform
from tileloss.jax._sweeps.transform import LogitTransform


class Cut(NamedTuple):
    """How a sweep's rows and columns are cut into blocks. The grid goes by blocks of rows along ``rows_axis``, by blocks of
    columns along the other."""

    blocks: Blocks
    tiles: Tiles
    target: Target
    spec: Spec
    rows_axis: int = 0

    def row_index(self, *at: Any) -> tuple[Any, Any]:
        """The block of a row's array [N, ...] at a grid step."""
        return at[self.rows_axis], 0

    def class_index(self, *at: Any) -> tuple[Any, Any]:
        """The block of a class's array [1, V] at a grid step."""
        return 0, at[1 - self.rows_axis]

    def rows_of(self, tree: Any) -> Blocked:
        """Arrays [N, LANES]."""
        return Blocked(tree, (self.blocks.rows, LANES), self.row_index)

    def classes_of(self, x: Array | None) -> Blocked:
        """An array [V]."""
        return Blocked(padded_classes(x, self.tiles), (1, self.blocks.columns), self.class_index)

    def run(
        self,
        kernel: partial[None],
        operands: tuple[Any, ...],
        outputs: tuple[Blocked, ...],
        *,
        order: tuple[Order, Order],
        scratch: tuple[Any, ...] = (),
        aliases: Mapping[int, int] | None = None,
        rows: BackwardRows | None = None,
    ) -> Any:
        """The kernel's outputs: it gets its operands, trees of Blocked, Given, outputs and scratch. ``rows``: of a backward."""
        in_kernel, scale = tile_transform(self.target.transform)
        labels, spec, block = self.target.labels, self.spec, self.blocks.rows
        has_weights, of_rows = spec.sums.smoothing_sum, None
        if rows is not None:
            has_weights = spec.has_uniform
            of_rows = self.rows_of(gradient_rows(rows, self.target.transform, spec, block))
        given: Any = Given(
            self.rows_of(labels_of_rows(labels, block)),
            self.classes_of(self.target.class_weights if has_weights else None),
            Blocked(scale),
            of_rows,  # type: ignore[arg-type]
        )
        by_rows = (pl.cdiv(labels.shape[0], block), self.tiles.number)
        return call(
            partial(kernel, tiles=self.tiles._replace(transform=in_kernel)),
            (*operands, given),
            outputs,
            grid=by_rows[::-1] if self.rows_axis else by_rows,
            order=order,
            vmem_limit=chip().vmem_limit,
            scratch=scratch,
            aliases=aliases,
        )


_FLOAT32_ARRAYS = ("entropy_sum", "collision_sum", "smoothing_sum")


def tile_transform(transform: LogitTransform) -> tuple[TileTransform, Array | None]:
    """What a kernel does to logits; with a traced temperature the scale is the second, float32 [1], for SMEM."""
    slope, outer = 0.0, transform.logit_scale
    if transform.softcap:
        slope, outer = transform.logit_scale / transform.softcap, transform.softcap
    scale = outer / transform.temperature
    if isinstance(scale, Array):
        return TileTransform(None, slope), scale.reshape(1)
    return TileTransform(float(scale), slope), None


def tiles_of(blocks: Blocks, spec: Spec, columns: int) -> Tiles:
    """Tiles as wide as a block over ``columns`` columns, of which those that ``spec`` names count."""
    return Tiles(spec.columns, blocks.columns, pl.cdiv(columns, blocks.columns))


def padded(x: Array, size: int, otherwise: Any = 0) -> Array:
    """[N, ...] with more rows, of ``otherwise``, up to a multiple of ``size``."""
    missing = -x.shape[0] % size
    if not missing:
        return x
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=otherwise)


def labels_of_rows(labels: Array, block: int) -> Array:
    """int32 [N up to whole blocks, LANES]; rows past N are UNUSED."""
    return _on_lanes(padded(labels, block, UNUSED))


def padded_classes(x: Array | None, tiles: Tiles) -> Array | None:
    """[V] as float32 [1, all that the tiles have]."""
    if x is None:
        return None
    missing = max(tiles.number * tiles.width - x.shape[0], 0)
    return jnp.pad(x.astype(jnp.float32), (0, missing))[None, :]


def gradient_rows(
    given: BackwardRows, transform: LogitTransform, spec: Spec, block: int
) -> GradientRows:
    """float32 [N up to whole blocks, LANES]. With S the sum of the row state, the label's term included, and
    log p_j = (z_j - max) - log S:

        p_j (prob + prob_logp log p_j) = (scale + slope (z_j - max)) exp(z_j - max)
        scale = (prob - prob_logp log S) / S,  slope = prob_logp / S

    A constant dz/dx is a factor of all but max. Rows that are not used may hold anything.
    """
    state, c = given.state, given.coefficients
    total = state.sum + jnp.exp(state.label_logit - state.max)
    total = jnp.where(jnp.isfinite(state.max), total, jnp.nan)
    prob, slope, uniform = c.prob, None, None
    factor = 1.0 if transform.softcap else transform.logit_scale / transform.temperature
    if spec.has_prob_logp:
        # A row without a gradient of the entropy has none, whatever log S is.
        prob = prob - jnp.where(c.prob_logp == 0, 0.0, c.prob_logp * given.log_sum)
        slope = factor * c.prob_logp / total
    if spec.has_uniform:
        uniform = factor * c.uniform
    found = GradientRows(state.max, factor * prob / total, factor * given.at_label, slope, uniform)
    return jax.tree.map(lambda x: _on_lanes(padded(x, block)), found)


def state_shape(rows: int, sums: Sums) -> RowState:
    """[N, LANES] each of those asked for."""
    whole = shaped((rows, LANES), jnp.float32)
    more = {name: whole for name in _FLOAT32_ARRAYS if getattr(sums, name)}
    argmax = shaped((rows, LANES), jnp.int32) if sums.argmax else None
    return RowState(whole, whole, whole, argmax=argmax, **more)


def merged(state: RowState, weights: Array | None, columns: int) -> RowState:
    """The row states [N] of states [N, LANES] a lane; ``weights`` [columns] of the smoothing sum."""
    # Whatever a chip's maximum makes of NaN: the sums keep one.
    is_nan = (jnp.isnan(state.sum) & (state.max != jnp.inf)) | jnp.isnan(state.label_logit)
    state = state._replace(max=jnp.where(is_nan, jnp.nan, state.max))
    if state.smoothing_sum is not None:
        weights = jnp.ones(columns, jnp.float32) if weights is None else weights
        of_lanes = padded(weights, LANES).reshape(-1, LANES).sum(axis=0)
        state = state._replace(smoothing_weight=of_lanes)
    return merge_all(state)


def _on_lanes(x: Array) -> Array:
    return jnp.broadcast_to(x[:, None], (x.shape[0], LANES))
