"""The two sweeps in plain XLA, compared with labels: tiles of columns, one after the other, so that nothing of the logits' size
is held besides logits and gradient. Any platform.

Scratch is a few float32 arrays [N, TILE]. The tail that fills no tile is a step of its own, so no column is padded or masked.

With an LM head a step makes the logits of its columns, works on them and forgets them. Scratch is then hidden in the type that
the products see too, and backward the float32 sums of dhidden [N, H]; a tile's part of dhead is whole, and rounded as it is
stored. The head is sliced along its vocabulary axis as it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from tileloss.jax._devices import varying_alike
from tileloss.jax._rows.state import RowState, merge, relative_to
from tileloss.jax._sweeps.allowed import only
from tileloss.jax._sweeps.operands import (
    BackwardRows,
    LmHead,
    Logits,
    Operand,
    SlotGradients,
    Spec,
    Sums,
    Target,
)
from tileloss.jax._sweeps.transform import LogitTransform

TILE = 2048  # columns of a step
# On CPUs jax 0.9 and 0.10 make of a slice or an update of bfloat16 one of float32: of the whole array, which they widen for it.
_WIDENS_BFLOAT16 = jax.__version_info__ < (0, 11)
_Carry = TypeVar("_Carry")


def forward(operand: Operand, target: Target, transform: LogitTransform, spec: Spec) -> RowState:
    """The row states of the columns that ``spec`` names."""
    return state_over_tiles(TILE, _logits_of(operand, spec), target, transform, spec)


def backward(
    operand: Operand, target: Target, rows: BackwardRows, transform: LogitTransform, spec: Spec
) -> Operand:
    """dL/dlogits; or dhidden, dhead and dbias, those that ``spec.needs_grad`` names; each in its tensor's dtype."""
    if isinstance(operand, LmHead):
        return _head_backward(operand, target, rows, transform, spec)

    def gradient_of(x: Array, start: Array | int, width: int) -> Array:
        return tile_gradient(transform.value(x), target, rows, start, spec)

    return gradient_over_tiles(operand.logits, target, rows.used, transform, spec, gradient_of)


def _head_backward(
    operand: LmHead, target: Target, rows: BackwardRows, transform: LogitTransform, spec: Spec
) -> LmHead:
    hidden, head, bias = operand
    assert hidden is not None and head is not None
    layout, used = spec.head_layout.lower(), rows.used[:, None]
    # 0 times the NaN of a row that is not used would be in dhead.
    seen = as_seen(jnp.where(used, hidden, 0), spec)

    def step(sums: LmHead, start: Array | int, width: int) -> LmHead:
        of_head = _head_tile(head, start, width, spec)
        of_bias = None if bias is None else tile(bias, start, width, axis=0)
        is_in = target.allowed_tile(start, width)
        x = only(is_in, logits_of(seen, of_head, of_bias, spec), 0.0)
        dx = tile_gradient(transform.value(x), target, rows, start, spec)
        dx = dx * transform.derivative(x)
        dx = only(is_in, jnp.where(used, dx, 0.0), 0.0)
        dhidden, dhead, dbias = sums
        if dhidden is not None:
            dhidden += product(f"nv,{layout}->nh", as_seen(dx, spec), of_head, spec)
        if dhead is not None:
            of_tile = product(f"nv,nh->{layout}", as_seen(dx, spec), seen, spec)
            dhead = stored(dhead, of_tile.astype(head.dtype), start, layout.index("v"))
        if dbias is not None:
            dbias = stored(dbias, jnp.sum(dx, axis=0), start, axis=0)
        return LmHead(dhidden, dhead, dbias)

    of_hidden, of_head, of_bias = spec.needs_grad
    sums = LmHead(
        jnp.zeros(hidden.shape, jnp.float32) if of_hidden else None,
        jnp.zeros(head.shape, head.dtype) if of_head else None,
        jnp.zeros(bias.shape, jnp.float32) if bias is not None and of_bias else None,
    )
    sums, _ = varying_alike((sums, hidden))
    dhidden, dhead, dbias = in_place(lambda sums: over_tiles(spec.columns, TILE, step, sums), sums)
    if dhidden is not None:
        # Where the head holds NaN or inf, 0 times it is in rows that are not used.
        dhidden = jnp.where(used, dhidden, 0.0).astype(spec.dhidden_dtype or hidden.dtype)
    if dbias is not None and bias is not None:
        dbias = dbias.astype(bias.dtype)
    return LmHead(dhidden, dhead, dbias)


def _logits_of(operand: Operand, spec: Spec) -> Callable[[Array | int, int], Array]:
    """(column, width) -> x, float32 [N, width]."""
    if isinstance(operand, Logits):
        logits = operand.logits
        return lambda column, width: tile(logits, column, width).astype(jnp.float32)
    hidden, head, bias = operand
    assert hidden is not None and head is not None
    seen = as_seen(hidden, spec)

    def made(column: Array | int, width: int) -> Array:
        of_bias = None if bias is None else tile(bias, column, width, axis=0)
        return logits_of(seen, _head_tile(head, column, width, spec), of_bias, spec)

    return made


def _head_tile(head: Array, start: Array | int, width: int, spec: Spec) -> Array:
    return as_seen(tile(head, start, width, axis=spec.head_layout.index("V")), spec)


def logits_of(hidden: Array, head: Array, bias: Array | None, spec: Spec) -> Array:
    """x of one tile, float32 [N, width]."""
    x = product(f"nh,{spec.head_layout.lower()}->nv", hidden, head, spec)
    return x if bias is None else x + bias[None, :].astype(jnp.float32)


def product(equation: str, a: Array, b: Array, spec: Spec) -> Array:
    """Summed in float32. Of float32 operands all bits count, which on GPUs and TPUs has to be asked for."""
    precision = lax.Precision.HIGHEST if spec.compute_dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def as_seen(x: Array, spec: Spec) -> Array:
    """x in the type that the products see. Where a machine has no products of bfloat16, XLA may leave out a rounding to it, as
    it widens the result again; but not reduce_precision."""
    if spec.compute_dtype == jnp.bfloat16 and x.dtype != jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(spec.compute_dtype)


def gradient_over_tiles(
    logits: Array,
    target: Target,
    used: Array,
    transform: LogitTransform,
    spec: Spec,
    gradient_of: Callable[[Array, Array | int, int], Array],
) -> Logits:
    """dL/dlogits; in the logits' memory where XLA finds that nobody reads them later. ``gradient_of(x, start, width)``: dL/dz
    [N, width] of logits x, float32."""

    def step(buffer: Array, start: Array | int, width: int) -> Array:
        x = tile_to_replace(buffer, start, width, logits.dtype).astype(jnp.float32)
        is_in = target.allowed_tile(start, width)
        x = only(is_in, x, 0.0)  # NaN there is not seen
        gradient = gradient_of(x, start, width) * transform.derivative(x)
        gradient = only(is_in, jnp.where(used[:, None], gradient, 0.0), 0.0).astype(logits.dtype)
        return stored(buffer, gradient, start)

    gradient = in_place(lambda buffer: over_tiles(spec.columns, TILE, step, buffer), logits)
    return Logits(gradient.at[:, spec.columns :].set(0))


def state_over_tiles(
    width: int,
    logits_of: Callable[[Array | int, int], Array],
    target: Target,
    transform: LogitTransform,
    spec: Spec,
) -> RowState:
    """A forward sweep in tiles of ``width`` columns. ``logits_of(column, width)``: float32 [N, width]."""
    labels = target.labels

    def step(state: RowState, start: Array | int, width: int) -> RowState:
        is_in = target.allowed_tile(spec.first + start, width)
        z = transform.value(only(is_in, logits_of(spec.first + start, width), 0.0))
        weights = weights_of_tile(target, start, width)
        return merge(state, tile_state(z, labels - start, start, spec.sums, weights, is_in))

    empty, _ = varying_alike((target.empty(spec.sums), labels))
    return over_tiles(spec.columns, width, step, empty)


def over_tiles(
    columns: int, width: int, step: Callable[[_Carry, Array | int, int], _Carry], carry: _Carry
) -> _Carry:
    """step(carry, first column, columns) for every tile of ``width`` columns and for what is left of them, in order."""
    full = columns // width
    if full:
        carry = lax.fori_loop(0, full, lambda i, c: step(c, i * width, width), carry)
    tail = columns - full * width
    return step(carry, full * width, tail) if tail else carry


def tile(x: Array, start: Array | int, width: int, axis: int = 1) -> Array:
    """``width`` columns of x from ``start`` on."""
    return lax.dynamic_slice_in_dim(*not_ahead(x, start), width, axis)


def not_ahead(x: Array, place: Array | int) -> tuple[Array, Array | int]:
    """x, and where a part of it is to be taken in a loop, which then widens no more than that."""
    if _WIDENS_BFLOAT16 and x.dtype == jnp.bfloat16:
        # Not ahead of the loop, as it has to wait for ``place``.
        x, place = lax.optimization_barrier((x, place))  # type: ignore[no-untyped-call]
    return x, place


def weights_of_tile(target: Target, start: Array | int, width: int) -> Array | None:
    """[1, width]."""
    weights = target.class_weights
    return None if weights is None else tile(weights, start, width, axis=0)[None, :]


def where_labels(labels: Array, start: Array | int, width: int) -> Array:
    """bool [N, width]: which columns of a tile are the labels'."""
    return jnp.arange(width)[None, :] == (labels - start)[:, None]


def tile_to_replace(buffer: Array, start: Array | int, width: int, dtype: DTypeLike) -> Array:
    """A tile, as ``dtype``, of a buffer of `in_place`, over which its gradient is to be stored.

    On CPUs jax 0.12 would fuse the slice and all that makes the gradient into the update that stores it, which then took 3 to 5
    times as long: so the tile is a value of its own there.
    """
    found = as_floats(tile(buffer, start, width), dtype)
    apart: Callable[[Array], Array] = lax.optimization_barrier
    result: Array = lax.platform_dependent(found, cpu=apart, default=lambda x: x)
    return result


def stored(buffer: Array, values: Array, start: Array | int, axis: int = 1) -> Array:
    """A buffer of `in_place` with ``values`` from column ``start`` on."""
    if buffer.dtype != values.dtype:
        values = lax.bitcast_convert_type(values, buffer.dtype)
    return lax.dynamic_update_slice_in_dim(buffer, values, start, axis)


def in_place(sweep: Callable[[_Carry], _Carry], buffers: _Carry) -> _Carry:
    """sweep(buffers), which stores into them tile by tile; it may see those of bfloat16 as integers that hold their bits."""
    if not _WIDENS_BFLOAT16 or all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(buffers)):
        return sweep(buffers)

    def in_bits(buffers: _Carry) -> _Carry:
        swept = sweep(jax.tree.map(_as_bits, buffers))
        return jax.tree.map(lambda x, like: as_floats(x, like.dtype), swept, buffers)

    swept: _Carry = lax.platform_dependent(buffers, cpu=in_bits, default=sweep)
    return swept


def _as_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def as_floats(x: Array, dtype: DTypeLike) -> Array:
    """x, or the floats of which it holds the bits."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def tile_state(
    z: Array,
    labels: Array,
    start: Array | int,
    sums: Sums,
    weights: Array | None,
    is_in: Array | None,
) -> RowState:
    """The row states of one tile z [N, width]; ``labels`` count from its first column, class ``start``. ``is_in``: which of its
    columns are allowed; None: all."""
    width = z.shape[1]
    z = only(is_in, z, -jnp.inf)
    is_label = where_labels(labels, 0, width)
    largest = jnp.max(z, axis=1)  # NaN where there is one
    # Of rows of -inf alone every exp is 0. No term is the NaN of -inf - -inf, which checkify would find.
    shifted = jnp.where(z == largest[:, None], 0.0, z - _zero_if_empty(largest)[:, None])
    exps = jnp.where(largest[:, None] == -jnp.inf, 0.0, jnp.exp(shifted))
    # That of the others is relative to their own maximum first: below a label of any height it keeps its digits.
    apart = jnp.where(is_label, -jnp.inf, z)
    below = jnp.max(apart, axis=1)
    others = jnp.where(apart == below[:, None], 0.0, apart - _zero_if_empty(below)[:, None])
    others = jnp.where(apart == -jnp.inf, 0.0, jnp.exp(others))
    collision_sum = entropy_sum = smoothing_sum = argmax = weight = None
    if sums.collision_sum:
        collision_sum = jnp.sum(exps * exps, axis=1)
    if sums.entropy_sum:
        entropy_sum = jnp.sum(jnp.where(exps == 0, 0.0, shifted * exps), axis=1)
    if sums.smoothing_sum:
        # Relative to a maximum of -inf or +inf: each term is the column's own z.
        terms = jnp.where(jnp.isinf(largest)[:, None], z, shifted)
        terms = terms if weights is None else weights * terms
        smoothing_sum = jnp.sum(only(is_in, terms, 0.0), axis=1)
        weight = jnp.float32(width) if weights is None else jnp.sum(weights)
        if is_in is not None:
            of_columns = jnp.where(is_in, 1.0 if weights is None else weights, 0.0)
            weight = jnp.broadcast_to(jnp.sum(of_columns, axis=1), labels.shape)
    if sums.argmax:
        has_none = jnp.isnan(largest)
        is_largest = z
        if is_in is not None:
            is_largest = is_in & (z == largest[:, None])
            has_none = ~jnp.any(is_largest, axis=1)
        first = jnp.argmax(is_largest, axis=1).astype(jnp.int32) + start
        argmax = jnp.where(has_none, -1, first).astype(jnp.int32)
    return RowState(
        max=largest,
        sum=relative_to(largest, jnp.sum(others, axis=1), below),
        label_logit=jnp.max(jnp.where(is_label, z, -jnp.inf), axis=1, initial=-jnp.inf),
        entropy_sum=entropy_sum,
        collision_sum=collision_sum,
        smoothing_sum=smoothing_sum,
        argmax=argmax,
        smoothing_weight=weight,
    )


def _zero_if_empty(largest: Array) -> Array:
    return jnp.where(largest == -jnp.inf, 0.0, largest)


def _with_slots(gradient: Array, slots: SlotGradients, start: Array | int) -> Array:
    width = gradient.shape[1]
    here = slots.columns - start
    # A negative one would count from the end.
    here = jnp.where((here >= 0) & (here < width), here, width)

    def add(row: Array, at: Array, values: Array) -> Array:
        return row.at[at].add(values, mode="drop")

    found: Array = jax.vmap(add)(gradient, here, slots.logp_grad)
    return found


def tile_gradient(
    z: Array, target: Target, rows: BackwardRows, start: Array | int, spec: Spec
) -> Array:
    """dL/dz [N, width] of one tile z, float32; rows that are not used may hold anything."""
    c, width = rows.coefficients, z.shape[1]
    # Where the gradient will be 0 anyway: a z of which nothing becomes infinite, as 0 times that is in a second derivative.
    z = only(target.allowed_tile(start, width), z, rows.state.max[:, None])
    log_p = (z - rows.state.max[:, None]) - rows.log_sum[:, None]
    p = jnp.exp(log_p)
    factor = c.prob[:, None]
    if spec.has_prob_logp:
        has_none = (c.prob_logp[:, None] == 0) | (p == 0)
        factor += jnp.where(has_none, 0.0, c.prob_logp[:, None] * log_p)
    gradient = p * factor
    if spec.has_uniform:
        weights = weights_of_tile(target, start, width)
        gradient += c.uniform[:, None] * (1.0 if weights is None else weights)
    if rows.slots is not None:
        gradient = _with_slots(gradient, rows.slots, start)
    is_label = where_labels(target.labels, start, width)
    return jnp.where(is_label, rows.at_label[:, None], gradient)
