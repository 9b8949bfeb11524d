"""The logits of several labels of each row, which are looked up before the sweep: its state is to know the likeliest."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from tileloss.jax._sweeps.allowed import contains, only
from tileloss.jax._sweeps.operands import LmHead, Operand, Spec, Target
from tileloss.jax._sweeps.transform import LogitTransform
from tileloss.jax._sweeps.xla import as_seen, hidden_as_seen, not_ahead


def slot_logits(operand: Operand, columns: Array, target: Target, spec: Spec) -> Array:
    """z, float32 [N, K], at the ``columns`` [N, K]; -inf outside the target's sets. With an LM head a slot of all rows at a time:
    scratch is [N, H]."""
    is_in = None if target.allowed is None else contains(target.allowed, columns)
    return only(is_in, _logits_at(operand, columns, target.transform, spec), -jnp.inf)


def _logits_at(operand: Operand, columns: Array, transform: LogitTransform, spec: Spec) -> Array:
    if not isinstance(operand, LmHead):
        x = jnp.take_along_axis(operand.logits, columns, axis=1).astype(jnp.float32)
        return transform.value(x)
    bias, axis = operand.bias, spec.head_layout.index("V")
    seen = hidden_as_seen(operand, spec)

    def products(hidden: Array | None, head: Array | None, column: Array) -> Array:
        assert hidden is not None and head is not None
        of_head = jnp.take(*not_ahead(head, column), axis=axis)
        of_head = as_seen(of_head, spec).astype(jnp.float32)
        return _sum_of_last(hidden.astype(jnp.float32) * (of_head if axis == 0 else of_head.T))

    def of_slot(column: Array) -> Array:
        x = products(seen.hidden, seen.head, column)
        if seen.hidden_r is not None:
            x += products(seen.hidden_r, seen.head_r, column)
        return x if bias is None else x + bias[column].astype(jnp.float32)

    return transform.value(lax.map(of_slot, columns.T).T)


def _sum_of_last(x: Array) -> Array:
    """Over the last of two dimensions by halves, as a sum one by one loses digits."""
    size = x.shape[1]
    if size <= 16:
        return jnp.sum(x, axis=1)
    half = size // 2
    pairs = x[:, :half] + x[:, half : 2 * half]
    return _sum_of_last(pairs if size % 2 == 0 else jnp.concatenate([pairs, x[:, -1:]], axis=1))
