"""The kernels from hidden states [N, H] and head, whose logits exist a tile at a time, in VMEM.

forward   a tile of logits, then what the kernel from logits does with it
dhidden   the tile again, its gradient, and the gradient's product with the head; summed over the columns
dhead     the tile again, its gradient, and its product with the hidden states; summed over the rows; the bias with it

Products see spec.compute_dtype and are summed in float32. Rows that are not used are zeros before a kernel sees them, and rows
up to whole blocks too: 0 times their NaN would be in dhead. The same holds for the columns past the vocabulary's end in dhidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.operands import UNUSED, BackwardRows, LmHead, Spec, Target
from tileloss.jax._sweeps.tpu.blocks import Blocks, Call, blocks_for, can_fit
from tileloss.jax._sweeps.tpu.calls import IN_ORDER, PARALLEL, Blocked, shaped
from tileloss.jax._sweeps.tpu.logits import step_forward
from tileloss.jax._sweeps.tpu.rows import (
    Cut,
    merged,
    padded,
    state_shape,
    tiles_of,
)
from tileloss.jax._sweeps.tpu.tiles import (
    LANES,
    Columns,
    Given,
    Ref,
    Tiles,
    gradient,
)


class _Products(NamedTuple):
    """How tiles are multiplied."""

    layout: str  # the head's: "VH" or "HV"
    dtype: DTypeLike  # what the products see

    def logits(self, operand: Any) -> Array:
        """float32 [rows, columns]. ``operand``: an LmHead of references."""
        hidden, head, bias, *_ = operand
        of_head = self.layout.index("H")
        x = self._product(hidden[...], head[...], 1, of_head)
        return x if bias is None else x + bias[...]

    def dhidden(self, d: Array, head: Array) -> Array:
        """[rows, H]."""
        return self._product(d, head, 1, self.layout.index("V"))

    def valid(self, head: Array, left: Array | int | None) -> Array:
        """0 in place of the columns that do not count."""
        if left is None:
            return head
        column = lax.broadcasted_iota(jnp.int32, head.shape, self.layout.index("V"))
        return jnp.where(column < left, head, jnp.zeros_like(head))

    def dhead(self, d: Array, hidden: Array) -> Array:
        """As the head lies."""
        if self.layout == "VH":
            return self._product(d, hidden, 0, 0)
        return self._product(hidden, d, 0, 0)

    def _product(self, a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        return lax.dot_general(
            a.astype(self.dtype),
            b.astype(self.dtype),
            (((axis_of_a,), (axis_of_b,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )


def forward(operand: LmHead, target: Target, spec: Spec, blocks: Blocks | None = None) -> RowState:
    """The row states of the columns that ``spec`` names. ``blocks``: instead of the chip's."""
    if spec.first:  # a copy, as blocks begin at their multiples
        operand = _columns_from(operand, spec)
    rows = target.labels.shape[0]
    if not rows or not spec.columns:
        return target.empty(spec.sums)
    blocks = blocks or blocks_for(call_of("head_forward", operand, spec))
    cut = Cut(blocks, tiles_of(blocks, spec, spec.columns), target, spec)
    (state,) = cut.run(
        partial(_head_forward, products=_products(spec)),
        (_operand(operand, cut),),
        (cut.rows_of(state_shape(rows, spec.sums)),),
        order=(PARALLEL, IN_ORDER),
        scratch=(pltpu.VMEM(blocks, jnp.float32), pltpu.VMEM((1, LANES), jnp.float32)),
    )
    return merged(state, target.class_weights, spec.columns)


def _head_forward(
    x: LmHead,
    given: Given,
    state: RowState,
    tile: Ref,
    seen: Ref,
    tiles: Tiles,
    products: _Products,
) -> None:
    tile[...] = products.logits(x)
    step_forward(tile, given, state, seen, tiles)


def backward(
    operand: LmHead,
    target: Target,
    rows: BackwardRows,
    spec: Spec,
    blocks: tuple[Blocks, Blocks] | None = None,
) -> LmHead:
    """dhidden, dhead and dbias, those that ``spec.needs_grad`` names. ``blocks``: dhidden's and dhead's instead of the chip's."""
    hidden = operand.hidden
    assert hidden is not None
    differentiated = LmHead(
        *(x if needs else None for x, needs in zip(operand, spec.needs_grad, strict=False))
    )
    if not hidden.size or not spec.columns:
        return jax.tree.map(jnp.zeros_like, differentiated)
    of_dhidden, of_dhead = blocks or (None, None)
    dhidden = dhead = dbias = None
    if differentiated.hidden is not None:
        dhidden = _run_dhidden(operand, target, rows, spec, of_dhidden)
    if differentiated.head is not None or differentiated.bias is not None:
        dhead, dbias = _run_dhead(differentiated, operand, target, rows, spec, of_dhead)
    return LmHead(dhidden, dhead, dbias)


def _run_dhidden(
    operand: LmHead,
    target: Target,
    rows: BackwardRows,
    spec: Spec,
    blocks: Blocks | None,
) -> Array:
    hidden = operand.hidden
    assert hidden is not None
    blocks = blocks or blocks_for(call_of("head_dhidden", operand, spec))
    count, width = hidden.shape
    cut = Cut(blocks, tiles_of(blocks, spec, spec.columns), target, spec)
    shape = shaped((count, width), spec.dhidden_dtype or hidden.dtype)
    (dhidden,) = cut.run(
        partial(_head_dhidden, products=_products(spec)),
        (_operand(operand, cut),),
        (Blocked(shape, (blocks.rows, width), cut.row_index),),
        order=(PARALLEL, IN_ORDER),
        scratch=(pltpu.VMEM(blocks, jnp.float32), pltpu.VMEM((blocks.rows, width), jnp.float32)),
        rows=rows,
    )
    return dhidden


def _head_dhidden(
    x: LmHead, given: Given, dhidden: Ref, tile: Ref, sums: Ref, tiles: Tiles, products: _Products
) -> None:
    head: Ref = x.head
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    tile[...] = products.logits(x)

    def step(left: Array | int | None) -> None:
        columns = Columns(j * tiles.width, left)
        gradient(tile, tile, given, columns, tiles.transform)
        sums[...] += products.dhidden(tile[...], products.valid(head[...], left))

    tiles.visit(j, step)

    @pl.when(j == tiles.number - 1)
    def _() -> None:
        # Where the head holds NaN, 0 times it is in rows that are not used.
        is_used = given.labels[:, :1] != UNUSED
        dhidden[...] = jnp.where(is_used, sums[...], 0.0).astype(dhidden.dtype)


def _run_dhead(
    differentiated: LmHead,
    operand: LmHead,
    target: Target,
    rows: BackwardRows,
    spec: Spec,
    blocks: Blocks | None,
) -> tuple[Array | None, Array | None]:
    hidden, head = operand.hidden, operand.head
    assert hidden is not None and head is not None
    blocks = blocks or blocks_for(call_of("head_dhead", operand, spec))
    width, vocab = hidden.shape[1], head.shape[spec.head_layout.index("V")]
    cut = Cut(blocks, tiles_of(blocks, spec, vocab), target, spec, rows_axis=1)
    shapes = jax.tree.map(lambda x: shaped(x.shape, _summed_in(x, spec)), differentiated)
    if shapes.bias is not None:
        shapes = shapes._replace(bias=shaped((1, vocab), jnp.float32))
    of_head: Any = _blocked_head(shapes.head, width, cut)
    dhead, dbias = cut.run(
        partial(_head_dhead, products=_products(spec)),
        (_operand(operand, cut),),
        (of_head, Blocked(shapes.bias, (1, blocks.columns), cut.class_index)),
        order=(PARALLEL, IN_ORDER),
        scratch=(pltpu.VMEM(blocks, jnp.float32), pltpu.VMEM(of_head.block, jnp.float32)),
        rows=rows,
    )
    if dbias is not None and differentiated.bias is not None:
        dbias = dbias[0].astype(_summed_in(differentiated.bias, spec))
    return dhead, dbias


def _summed_in(x: Array, spec: Spec) -> DTypeLike:
    """The type of a gradient of head or bias: what is summed over devices is rounded afterwards."""
    return x.dtype if spec.row_axes is None else jnp.float32


def _head_dhead(
    x: LmHead,
    given: Given,
    dhead: Ref | None,
    dbias: Ref | None,
    tile: Ref,
    sums: Ref,
    tiles: Tiles,
    products: _Products,
) -> None:
    hidden: Ref = x.hidden
    j, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)
        if dbias is not None:
            dbias[...] = jnp.zeros_like(dbias)

    tile[...] = products.logits(x)

    def step(left: Array | int | None) -> None:
        columns = Columns(j * tiles.width, left)
        gradient(tile, tile, given, columns, tiles.transform)

    tiles.visit(j, step)
    if dbias is not None:
        dbias[...] += jnp.sum(tile[...], axis=0, keepdims=True)
    if dhead is not None:
        sums[...] += products.dhead(tile[...], hidden[...])

        @pl.when(i == pl.num_programs(1) - 1)
        def _() -> None:
            dhead[...] = sums[...].astype(dhead.dtype)


def fits(operand: LmHead, spec: Spec) -> bool:
    """Whether there are blocks for every kernel."""
    return all(
        can_fit(call_of(kernel, operand, spec))
        for kernel in ("head_forward", "head_dhidden", "head_dhead")
    )


def call_of(kernel: str, operand: LmHead, spec: Spec) -> Call:
    hidden, head, *_ = operand
    assert hidden is not None and head is not None
    rows, columns = hidden.shape[0], head.shape[spec.head_layout.index("V")]
    arrays = 6
    if kernel == "head_forward":
        arrays = 1 + len(jax.tree.leaves(state_shape(rows, spec.sums)))
    return Call(
        kernel,
        rows,
        columns,
        operand_bytes=hidden.dtype.itemsize,
        hidden=hidden.shape[1],
        head_bytes=head.dtype.itemsize,
        compute_bytes=jnp.dtype(spec.compute_dtype).itemsize,
        row_arrays=arrays,
        dhidden_bytes=jnp.dtype(spec.dhidden_dtype or hidden.dtype).itemsize,
        dhead_bytes=jnp.dtype(_summed_in(head, spec)).itemsize,
    )


def _products(spec: Spec) -> _Products:
    assert spec.compute_dtype is not None
    return _Products(spec.head_layout, spec.compute_dtype)


def _columns_from(operand: LmHead, spec: Spec) -> LmHead:
    hidden, head, bias, *_ = operand
    assert head is not None
    cut = partial(lax.slice_in_dim, start_index=spec.first, limit_index=spec.first + spec.columns)
    head = cut(head, axis=spec.head_layout.index("V"))
    return LmHead(hidden, head, None if bias is None else cut(bias))


def _blocked_head(head: Any, width: int, cut: Cut) -> Blocked:
    if cut.spec.head_layout == "HV":
        return Blocked(head, (width, cut.blocks.columns), cut.class_index)
    return Blocked(head, (cut.blocks.columns, width), lambda *at: cut.class_index(*at)[::-1])


def _operand(operand: LmHead, cut: Cut) -> Any:
    """An LmHead of Blocked."""
    hidden, head, bias, *_ = operand
    assert hidden is not None
    rows, width = cut.blocks.rows, hidden.shape[1]
    is_used = (cut.target.labels != UNUSED)[:, None]
    seen = padded(jnp.where(is_used, hidden, 0).astype(cut.spec.compute_dtype), rows)
    blocked: Any = Blocked(seen, (rows, width), cut.row_index)
    of_head: Any = _blocked_head(head, width, cut)
    return LmHead(blocked, of_head, cut.classes_of(bias))  # type: ignore[arg-type]
