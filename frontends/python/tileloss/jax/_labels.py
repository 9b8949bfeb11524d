"""The labels that a public function was given."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

MOST = 1024  # labels a row, as in the C ABI
IGNORED = -100  # that of every row where labels are [..., 0]


class Labels(NamedTuple):
    array: Array | None  # [...], or [..., K] with K > 1; None: there are none
    may_be_several: bool = False  # a row
    per_row: int | None = None  # K of those that were given as [..., K]

    @property
    def slots(self) -> tuple[int, ...]:
        """The dimensions of the array behind those of the rows."""
        return (self.per_row,) if self.per_row is not None and self.per_row > 1 else ()

    @property
    def rows(self) -> tuple[int, ...] | None:
        """The leading dimensions that the labels tell."""
        if self.array is None:
            return None
        return self.array.shape[: self.array.ndim - len(self.slots)]


def checked_labels(given: Any, operand: Any, may_be_several: bool) -> Labels:
    """``operand``: logits or hidden states [..., C]; labels of as many dimensions are [..., K].

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    if given is None:
        return Labels(None)
    array = jnp.asarray(given)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"labels: expected integers, got {array.dtype}")
    if not may_be_several or array.ndim == 0 or array.ndim != jnp.ndim(operand):
        return Labels(array, may_be_several)
    count = array.shape[-1]
    if count > MOST:
        raise ValueError(f"labels: expected at most {MOST} a row, got {count}")
    if count == 0:
        return Labels(jnp.full(array.shape[:-1], IGNORED, jnp.int32), True, 0)
    return Labels(array[..., 0] if count == 1 else array, True, count)


def check_leading(name: str, last: str, x: Array, labels: Labels) -> None:
    """``x``: the operand ``name`` [..., ``last``]."""
    if labels.rows is None:
        if x.ndim == 0:
            raise ValueError(f"{name}: expected [..., {last}], got shape []")
    elif x.ndim == 0 or x.shape[:-1] != labels.rows:
        rows, got = list(x.shape[:-1]), list(labels.rows)
        several = f" or [{', '.join(map(str, [*rows, 'K']))}]" if labels.may_be_several else ""
        if labels.per_row is not None:
            got.append(labels.per_row)
        raise ValueError(
            f"labels: expected {name}'{'' if name.endswith('s') else 's'} leading dimensions {rows}{several}, got {got}"
        )


def check_goes_with_several(outputs: tuple[str, ...]) -> None:
    """Of rows with several labels."""
    if "correct" in outputs:
        raise ValueError(
            "outputs: expected none of one label with several labels a row, got correct"
        )
