"""The two sweeps over logits that are hidden states times an LM head, in plain XLA. Any platform.

A step makes the logits of TILE columns, works on them and forgets them. Scratch is a few arrays [N, TILE], hidden in the type
that the products see, and backward the float32 sums of dhidden [N, H]; a tile's part of dhead is whole, and rounded as it is
stored. The head is sliced along its vocabulary axis as it lies.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from tileloss.jax._devices import varying_alike
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.operands import BackwardRows, LmHead, Spec, Target
from tileloss.jax._sweeps.transform import LogitTransform
from tileloss.jax._sweeps.xla import (
    in_place,
    over_tiles,
    state_over_tiles,
    stored,
    tile,
    tile_gradient,
)

TILE = 2048  # columns of a step


def forward(operand: LmHead, target: Target, transform: LogitTransform, spec: Spec) -> RowState:
    """The row states of the columns that ``spec`` names."""
    hidden, head, bias = operand
    assert hidden is not None and head is not None
    seen = as_seen(hidden, spec)

    def logits_tile(column: Array | int, width: int) -> Array:
        of_bias = None if bias is None else tile(bias, column, width, axis=0)
        return logits_of(seen, _head_tile(head, column, width, spec), of_bias, spec)

    return state_over_tiles(TILE, logits_tile, target, transform, spec)


def backward(
    operand: LmHead, target: Target, rows: BackwardRows, transform: LogitTransform, spec: Spec
) -> LmHead:
    """dhidden, dhead and dbias, those that ``spec.needs_grad`` names; each in its tensor's dtype."""
    hidden, head, bias = operand
    assert hidden is not None and head is not None
    layout, used = spec.head_layout.lower(), rows.used[:, None]
    # 0 times the NaN of a row that is not used would be in dhead.
    seen = as_seen(jnp.where(used, hidden, 0), spec)

    def step(sums: LmHead, start: Array | int, width: int) -> LmHead:
        of_head = _head_tile(head, start, width, spec)
        of_bias = None if bias is None else tile(bias, start, width, axis=0)
        x = logits_of(seen, of_head, of_bias, spec)
        dx = tile_gradient(transform.value(x), target, rows, start, spec)
        dx = dx * transform.derivative(x)
        dx = jnp.where(used, dx, 0.0)
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
