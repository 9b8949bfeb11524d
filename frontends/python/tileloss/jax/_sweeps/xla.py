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

TILE = 2048  # columns of a step
# On CPUs jax 0.9 and 0.10 make of a slice or an update of bfloat16 one of float32: of the whole array, which they widen for it.
_WIDENS_BFLOAT16 = jax.__version_info__ < (0, 11)
_Carry = TypeVar("_Carry")


def forward(operand: Operand, target: Target, spec: Spec) -> RowState:
    """The row states of the columns that ``spec`` names."""
    return state_over_tiles(TILE, _logits_of(operand, spec), target, spec)


def backward(operand: Operand, target: Target, rows: BackwardRows, spec: Spec) -> Operand:
    """dL/dlogits; or of an LmHead those that ``spec.needs_grad`` names; each in its tensor's dtype."""
    if isinstance(operand, LmHead):
        return _head_backward(operand, target, rows, spec)

    def gradient_of(x: Array, start: Array | int, width: int) -> Array:
        return tile_gradient(target.transform.value(x), target, rows, start, spec)

    return gradient_over_tiles(operand.logits, target, rows.used, spec, gradient_of)


def _head_backward(operand: LmHead, target: Target, rows: BackwardRows, spec: Spec) -> LmHead:
    layout, used, transform = spec.head_layout.lower(), rows.used[:, None], target.transform
    # 0 times the NaN of a row that is not used would be in dhead.
    seen = hidden_as_seen(only_used(operand, used), spec)

    def step(sums: LmHead, start: Array | int, width: int) -> LmHead:
        here = _columns_of(seen, start, width, spec)
        is_in = target.allowed_tile(start, width)
        x = only(is_in, logits_of(here, spec), 0.0)
        dx = tile_gradient(transform.value(x), target, rows, start, spec)
        dx = dx * transform.derivative(x)
        dx = only(is_in, jnp.where(used, dx, 0.0), 0.0)
        seen_dx = as_seen(dx, spec)

        def of_pair(name: str, sums: dict[str, Array | None]) -> None:
            hidden, head = f"hidden{name}", f"head{name}"
            if (dhidden := sums[hidden]) is not None:
                of_head = getattr(here, head)
                sums[hidden] = dhidden + product(f"nv,{layout}->nh", seen_dx, of_head, spec)
            if (dhead := sums[head]) is not None:
                of_tile = product(f"nv,nh->{layout}", seen_dx, getattr(here, hidden), spec)
                of_tile = of_tile.astype(getattr(operand, head).dtype)
                sums[head] = stored(dhead, of_tile, start, layout.index("v"))

        found = sums._asdict()
        of_pair("", found)
        of_pair("_r", found)
        if sums.bias is not None:
            found["bias"] = stored(sums.bias, jnp.sum(dx, axis=0), start, axis=0)
        return LmHead(**found)

    def zeros(name: str, x: Array | None, needs: bool) -> Array | None:
        if x is None or not needs:
            return None
        return jnp.zeros(x.shape, x.dtype if name.startswith("head") else jnp.float32)

    sums = LmHead(*map(zeros, LmHead._fields, operand, spec.needs_grad))
    sums, _ = varying_alike((sums, operand.hidden))
    sums = in_place(lambda sums: over_tiles(spec.columns, TILE, step, sums), sums)
    return rounded(sums, operand, used, spec)


def rounded(sums: LmHead, operand: LmHead, used: Array, spec: Spec) -> LmHead:
    """The gradients, of their sums. ``used``: bool [N, 1]."""

    def of(name: str, total: Array | None, x: Array | None) -> Array | None:
        if total is None or x is None:
            return None
        if not name.startswith("hidden"):
            return total.astype(x.dtype)
        # Where the head holds NaN or inf, 0 times it is in rows that are not used.
        return jnp.where(used, total, 0.0).astype(spec.dhidden_dtype or x.dtype)

    return LmHead(*map(of, LmHead._fields, sums, operand))


def _logits_of(operand: Operand, spec: Spec) -> Callable[[Array | int, int], Array]:
    """(column, width) -> x, float32 [N, width]."""
    if isinstance(operand, Logits):
        logits = operand.logits
        return lambda column, width: tile(logits, column, width).astype(jnp.float32)
    seen = hidden_as_seen(operand, spec)
    return lambda column, width: logits_of(_columns_of(seen, column, width, spec), spec)


def only_used(operand: LmHead, used: Array) -> LmHead:
    """With 0 in the rows that are not ``used``, bool [N, 1]."""
    return operand.mapped("hidden", lambda x: jnp.where(used, x, 0))


def hidden_as_seen(operand: LmHead, spec: Spec) -> LmHead:
    return operand.mapped("hidden", lambda x: as_seen(x, spec))


def _columns_of(operand: LmHead, start: Array | int, width: int, spec: Spec) -> LmHead:
    """Some columns of the head as the products see them, and of what goes with it."""
    axis = spec.head_layout.index("V")
    here = operand.mapped("head", lambda x: as_seen(tile(x, start, width, axis), spec))
    return here if here.bias is None else here._replace(bias=tile(here.bias, start, width, axis=0))


def logits_of(operand: LmHead, spec: Spec) -> Array:
    """x, float32 [N, V], of matrices as the products see them."""
    hidden, head, bias, hidden_r, head_r = operand
    assert hidden is not None and head is not None
    equation = f"nh,{spec.head_layout.lower()}->nv"
    x = product(equation, hidden, head, spec)
    if hidden_r is not None and head_r is not None:
        x += product(equation, hidden_r, head_r, spec)
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
    spec: Spec,
    gradient_of: Callable[[Array, Array | int, int], Array],
) -> Logits:
    """dL/dlogits; in the logits' memory where XLA finds that nobody reads them later. ``gradient_of(x, start, width)``: dL/dz
    [N, width] of logits x, float32."""

    def step(buffer: Array, start: Array | int, width: int) -> Array:
        x = tile_to_replace(buffer, start, width, logits.dtype).astype(jnp.float32)
        is_in = target.allowed_tile(start, width)
        x = only(is_in, x, 0.0)  # NaN there is not seen
        gradient = gradient_of(x, start, width) * target.transform.derivative(x)
        gradient = only(is_in, jnp.where(used[:, None], gradient, 0.0), 0.0).astype(logits.dtype)
        return stored(buffer, gradient, start)

    gradient = in_place(lambda buffer: over_tiles(spec.columns, TILE, step, buffer), logits)
    return Logits(gradient.at[:, spec.columns :].set(0))


def state_over_tiles(
    width: int, logits_of: Callable[[Array | int, int], Array], target: Target, spec: Spec
) -> RowState:
    """A forward sweep in tiles of ``width`` columns. ``logits_of(column, width)``: float32 [N, width]."""
    labels, transform = target.labels, target.transform

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
