"""The row state: what a forward sweep learns of each row of logits, a monoid (tileloss.h, tileloss_row_state)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class RowState(NamedTuple):
    """float32 [N] arrays over the transformed logits z, with m = max_j z_j; those that nobody asked for are None.

    States of disjoint sets of columns (tiles, shards) merge into the state of their union. The label's column is left out of
    `sum`; a set of columns that does not hold the label has label_logit = -inf.
    """

    max: Array  # m, the label's column included
    sum: Array  # R = sum over j != label of exp(z_j - m)
    label_logit: Array  # z at the label
    entropy_sum: Array | None = None  # sum_j (z_j - m) exp(z_j - m)
    collision_sum: Array | None = None  # sum_j exp(2 (z_j - m))
    smoothing_sum: Array | None = None  # sum_j c_j (z_j - m), c = class weights, 1 without them
    argmax: Array | None = None  # int32: lowest class of the maximum; -1 while empty or with a NaN
    # The sum of c_j over the columns seen (their number, without class weights), float32 [] or [N]; smoothing_sum's merge needs
    # it. None counts as 0.
    smoothing_weight: Array | None = None


def identity(
    rows: int,
    *,
    entropy_sum: bool = False,
    collision_sum: bool = False,
    smoothing_sum: bool = False,
    argmax: bool = False,
) -> RowState:
    """The empty state: merging it changes nothing. The flags say which optional arrays it has."""
    zeros, lowest = jnp.zeros(rows, jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32)
    return RowState(
        max=lowest,
        sum=zeros,
        label_logit=lowest,
        entropy_sum=zeros if entropy_sum else None,
        collision_sum=zeros if collision_sum else None,
        smoothing_sum=zeros if smoothing_sum else None,
        argmax=jnp.full(rows, -1, jnp.int32) if argmax else None,
        smoothing_weight=jnp.zeros((), jnp.float32) if smoothing_sum else None,
    )


def merge(a: RowState, b: RowState) -> RowState:
    """The state of two disjoint sets of columns, row by row (src/core/row_state.h). A NaN in either survives.

    An optional array is in the result if it is in both. The merge is associative but for rounding, and commutative.
    """
    has_nan = jnp.isnan(a.max) | jnp.isnan(b.max)
    larger = jnp.where(has_nan, jnp.nan, jnp.maximum(a.max, b.max))
    takes_b, takes_a = (larger == -jnp.inf) & _is_empty(a), (larger == -jnp.inf) & _is_empty(b)
    x, y = _rescaled(a, larger), _rescaled(b, larger)

    def chosen(merged: Array, of_a: Array, of_b: Array, with_nan: Array | float = jnp.nan) -> Array:
        merged = jnp.where(has_nan, jnp.asarray(with_nan, merged.dtype), merged)
        return jnp.where(takes_b, of_b, jnp.where(takes_a, of_a, merged))

    def total(name: str) -> Array | None:
        of_a, of_b = getattr(a, name), getattr(b, name)
        if of_a is None or of_b is None:
            return None
        return chosen(getattr(x, name) + getattr(y, name), of_a, of_b)

    label_logit = jnp.where(a.label_logit == -jnp.inf, b.label_logit, a.label_logit)
    argmax = None
    if a.argmax is not None and b.argmax is not None:
        argmax = chosen(_merged_argmax(a, b), a.argmax, b.argmax, with_nan=-1)
    weight = None
    if a.smoothing_weight is not None and b.smoothing_weight is not None:
        weight = a.smoothing_weight + b.smoothing_weight
    return RowState(
        max=chosen(larger, a.max, b.max),
        sum=chosen(x.sum + y.sum, a.sum, b.sum),
        label_logit=chosen(label_logit, a.label_logit, b.label_logit),
        entropy_sum=total("entropy_sum"),
        collision_sum=total("collision_sum"),
        smoothing_sum=total("smoothing_sum"),
        argmax=argmax,
        smoothing_weight=weight,
    )


def merge_all(states: RowState) -> RowState:
    """The state [N] of states [N, K] of disjoint sets of columns: `merge` of all of them at once."""
    has_nan = jnp.any(jnp.isnan(states.max), axis=1)
    largest = jnp.max(states.max, axis=1)
    moved = _rescaled(states, largest[:, None])

    def total(x: Array | None) -> Array | None:
        return None if x is None else jnp.where(has_nan, jnp.nan, jnp.sum(x, axis=1))

    argmax = weight = None
    if states.argmax is not None:
        is_one = (states.max == largest[:, None]) & (states.argmax >= 0)
        none = 2**31 - 1
        lowest = jnp.min(jnp.where(is_one, states.argmax, none), axis=1)
        argmax = jnp.where(has_nan | (lowest == none), -1, lowest)
    if states.smoothing_weight is not None:
        weight = jnp.sum(states.smoothing_weight, axis=-1)
    return RowState(
        max=jnp.where(has_nan, jnp.nan, largest),
        sum=jnp.where(has_nan, jnp.nan, jnp.sum(moved.sum, axis=1)),
        label_logit=jnp.where(has_nan, jnp.nan, jnp.max(states.label_logit, axis=1)),
        entropy_sum=total(moved.entropy_sum),
        collision_sum=total(moved.collision_sum),
        smoothing_sum=total(moved.smoothing_sum),
        argmax=argmax,
        smoothing_weight=weight,
    )


def relative_to(larger: Array, total: Array, maximum: Array) -> Array:
    """total exp(maximum - larger): a sum relative to its terms' maximum, relative to a larger one; nothing if that is -inf. It
    keeps its digits where the exp alone is below what float32 holds, and those that are lost in the difference of the maxima."""
    is_finite = jnp.isfinite(maximum) & jnp.isfinite(larger)
    x, y = jnp.where(is_finite, maximum, 0.0), jnp.where(is_finite, larger, 0.0)
    shift = x - y
    there = shift + y
    lost = (x - there) - (y - (there - shift))
    lost = jnp.where(jnp.isfinite(lost), lost, 0.0)
    half = jnp.exp(shift / 2)
    moved = jnp.where(shift < -80, (total * half) * half, total * jnp.exp(shift)) * (1 + lost)
    is_nothing = (maximum == -jnp.inf) | (larger == jnp.inf)
    moved = jnp.where(is_finite, moved, jnp.where(is_nothing, 0.0, jnp.nan))
    return jnp.where(maximum == larger, total, moved)


def _weight(state: RowState) -> Array:
    weight = state.smoothing_weight
    return jnp.zeros((), jnp.float32) if weight is None else weight


def _is_empty(state: RowState) -> Array:
    seen = _weight(state) == 0
    return seen if state.argmax is None else seen & (state.argmax < 0)


def _merged_argmax(a: RowState, b: RowState) -> Array:
    assert a.argmax is not None and b.argmax is not None
    lower = (b.argmax < 0) | (a.argmax < b.argmax)
    of_equals = jnp.where((a.argmax >= 0) & lower, a.argmax, b.argmax)
    of_larger = jnp.where(a.max > b.max, a.argmax, b.argmax)
    return jnp.where(a.max == b.max, of_equals, of_larger)


def _rescaled(state: RowState, to: Array) -> RowState:
    """The state relative to the maximum ``to`` >= state.max; an exp(-inf - -inf) never arises."""
    is_there, nothing = state.max == to, state.max == -jnp.inf
    stays = is_there | nothing
    shift = jnp.where(stays, 0.0, state.max) - jnp.where(stays, 0.0, to)
    factor = jnp.where(is_there, 1.0, jnp.where(nothing, 0.0, jnp.exp(shift)))

    collision_sum = entropy_sum = smoothing_sum = None
    if state.collision_sum is not None:
        collision_sum = factor * (factor * state.collision_sum)
    if state.entropy_sum is not None:
        # All columns, the label's too: its term is exp(label_logit - max).
        of_label = jnp.exp(
            jnp.where(nothing, -jnp.inf, state.label_logit) - jnp.where(nothing, 0.0, state.max)
        )
        terms = state.sum + jnp.where(state.label_logit == -jnp.inf, 0.0, of_label)
        moved = jnp.where(factor == 0, 0.0, factor * (state.entropy_sum + shift * terms))
        entropy_sum = jnp.where(stays, state.entropy_sum, moved)
    if state.smoothing_sum is not None:
        weight = _weight(state)
        # Nothing seen, or only -inf: each term is -inf if there is one, and already NaN where such a term has the weight 0.
        has_terms = (weight != 0) & ~jnp.isnan(state.smoothing_sum)
        of_nothing = jnp.where(
            has_terms, jnp.where(weight < 0, jnp.inf, -jnp.inf), state.smoothing_sum
        )
        # Relative to +inf nothing would be left to tell of the columns: their own z then.
        moved = state.smoothing_sum + jnp.where(jnp.isinf(to), state.max, shift) * weight
        smoothing_sum = jnp.where(
            is_there, state.smoothing_sum, jnp.where(nothing, of_nothing, moved)
        )
    return state._replace(
        max=to,
        sum=relative_to(to, state.sum, state.max),
        entropy_sum=entropy_sum,
        collision_sum=collision_sum,
        smoothing_sum=smoothing_sum,
    )
