"""Several labels of a row, and which of them its state knows (src/core/target.h)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import Number
from tileloss.jax._rows.inputs import Rows, is_used, wide
from tileloss.jax._rows.options import Options


class Slots(NamedTuple):
    """[N, K]; a slot is empty where its label is ignore_index. Of a row with a label out of range ``columns`` mean nothing."""

    columns: Array  # int32
    used: Array  # bool
    z: Array  # float32, at the columns; of empty slots -inf
    is_known: Array  # bool: the column is that of the row's likeliest label

    def logp(self, rows: Rows) -> Array:
        """The likeliest's has its own rounding rule; no other has p > 1/2, and so digits enough as a difference."""
        stats, known = rows.stats, jnp.max(self.z, axis=1)
        others = self.z - stats.max[:, None] - stats.log_sum[:, None]
        logp = jnp.where(self.z == known[:, None], stats.logp[:, None], others)
        logp = jnp.where(rows.wrong[:, None], jnp.nan, logp)
        return jnp.where(self.used, logp / rows.logp_divisor, 0.0)

    def upstream(self, logp_grad: Array | None, divisor: Number) -> Array:
        """Of the labels' logp at the temperature of the logits, float32 [N, K]."""
        if logp_grad is None:
            return jnp.zeros_like(self.z)
        return jnp.where(self.used, logp_grad, 0.0) / divisor


def columns_of(labels: Array, options: Options, classes: int) -> tuple[Array, Array]:
    """Labels [N, K] as columns to be looked up, 0 where there is none; bool [N, K], which are labels."""
    used, labels = is_used(labels, options), wide(labels)
    is_class = used & (labels >= 0) & (labels < classes)
    return jnp.where(is_class, labels, 0).astype(jnp.int32), used


def slots_of(labels: Array, z: Array, options: Options, classes: int) -> tuple[Array, Slots]:
    """A row's label: one that is out of range, else the likeliest, else ignore_index; and its slots.

    Args:
        labels: [N, K].
        z: float32 [N, K], at the columns of `columns_of`.
    """
    columns, used = columns_of(labels, options, classes)
    z = jnp.where(used, z, -jnp.inf)
    which = jnp.argmax(z, axis=1)[:, None]
    any_used = jnp.argmax(used, axis=1)[:, None]  # where all of them are -inf
    which = jnp.where(jnp.take_along_axis(used, which, axis=1), which, any_used)
    wrong = used & (wide(labels) != columns)
    which = jnp.where(jnp.any(wrong, axis=1)[:, None], jnp.argmax(wrong, axis=1)[:, None], which)
    is_known = used & (columns == jnp.take_along_axis(columns, which, axis=1))
    return jnp.take_along_axis(labels, which, axis=1)[:, 0], Slots(columns, used, z, is_known)
