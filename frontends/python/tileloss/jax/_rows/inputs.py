"""Which rows count, which of them are wrong, and the inputs of those that count (src/losses/inputs.h)."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.state import RowState
from tileloss.jax._rows.stats import RowStats, row_stats


class Rows(NamedTuple):
    """The rows as a loss looks at them: numbers of rows that do not count are there, finite, and without effect."""

    used: Array  # bool [N]
    wrong: Array  # bool [N]: used, with a label that is no class
    labels: Array  # integers [N], 0 where not used
    stats: RowStats
    logp_divisor: Number  # T with temperature_on = logprob, else 1


def read_rows(
    state: RowState, labels: Array, options: Options, *, classes: int, mask: Array | None = None
) -> Rows:
    """Rows whose label is ignore_index, or whose ``mask`` is 0, do not count; their state may hold anything.

    A row in use with a label outside [0, classes) is NaN throughout: a device finds out too late to raise.
    """
    labels, used, wrong = read_labels(labels, options, classes, mask)

    def read(x: Array, otherwise: float | int, of_wrong: float | int) -> Array:
        return jnp.where(
            wrong,
            jnp.asarray(of_wrong, x.dtype),
            jnp.where(used, x, jnp.asarray(otherwise, x.dtype)),
        )

    def read_sum(x: Array | None, otherwise: float = 0.0) -> Array | None:
        return None if x is None else read(x, otherwise, jnp.nan)

    clean = RowState(
        max=read(state.max, 0.0, jnp.nan),
        sum=read(state.sum, 0.0, jnp.nan),
        target=read(state.target, 0.0, jnp.nan),
        entropy_sum=read_sum(state.entropy_sum),
        collision_sum=read_sum(state.collision_sum, 1.0),
        smoothing_sum=read_sum(state.smoothing_sum),
        argmax=None if state.argmax is None else read(state.argmax, -1, -1),
        smoothing_weight=None,
    )
    on_logprob = options.choice("temperature_on") == "logprob"
    return Rows(
        used=used,
        wrong=wrong,
        labels=jnp.where(used, labels, 0),
        stats=row_stats(clean),
        logp_divisor=options.number("temperature") if on_logprob else 1.0,
    )


def read_labels(
    labels: Array, options: Options, classes: int, mask: Array | None = None
) -> tuple[Array, Array, Array]:
    """The labels in a type that holds the number of classes; bool [N], which rows count, and which of those are wrong."""
    used, labels = is_used(labels, options, mask), wide(labels)
    return labels, used, used & ((labels < 0) | (labels >= classes))


def wide(classes: Array) -> Array:
    """In a type that holds the number of classes."""
    return classes.astype(jnp.int32) if classes.dtype.itemsize < 4 else classes


def is_used(labels: Array, options: Options, mask: Array | None = None) -> Array:
    """bool [N]. An ignore_index that the labels' type cannot hold is no row's label."""
    ignored, limits = options.integer("ignore_index"), np.iinfo(labels.dtype)
    used = jnp.ones(labels.shape, bool)
    if limits.min <= ignored <= limits.max:
        used = labels != ignored
    return used if mask is None else used & (mask != 0)


def read(x: Array, used: Array) -> Array:
    """An input [N] in float32, 0 where its row does not count."""
    return jnp.where(used, x.astype(jnp.float32), 0.0)


def wrong_unless(are_right: list[Array], labels: Array, options: Options) -> Array:
    """The labels [N]; one that is no class in place of each that counts where not all of ``are_right``, bool [] or [N], are."""
    if not are_right:
        return labels
    labels = wide(labels)
    limits, ignored = np.iinfo(labels.dtype), options.integer("ignore_index")
    wrong = next(x for x in (-1, -2, limits.max, limits.max - 1) if limits.min <= x != ignored)
    is_wrong = is_used(labels, options) & ~reduce(and_, are_right)
    return jnp.where(is_wrong, jnp.asarray(wrong, labels.dtype), labels)


def are_columns(arrays: dict[str, Array], columns: int) -> list[Array]:
    """bool [N], of some of a teacher's columns, of which only the program knows: whether none of a row is beyond ``columns`` or
    there twice, nor has a log q above 0 by more than rounding."""
    if "teacher_ids" not in arrays:
        return []
    ids, log_q = wide(arrays["teacher_ids"]), arrays["teacher_logprobs"]
    ordered = jnp.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    wrong = jnp.any(twice, axis=1) | (ordered[:, -1] >= columns)
    return [~(wrong | jnp.any((ids >= 0) & (log_q > 0.001), axis=1))]


def without_columns(arrays: dict[str, Array], has_columns: Array) -> dict[str, Array]:
    """The arrays with a teacher's columns in the rows alone that ``has_columns`` [N] names, as the sweeps take them."""
    if "teacher_ids" not in arrays:
        return arrays
    ids = wide(arrays["teacher_ids"])
    is_there = (ids >= 0) & has_columns[:, None]
    return arrays | {"teacher_ids": jnp.where(is_there, ids, -1).astype(jnp.int32)}
