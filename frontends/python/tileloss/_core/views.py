"""How rows lie in memory, by shape and strides (in elements), in the words of the ABI."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

WORD = 32  # columns of a word of a set


def kind_of(given: object) -> str:
    """Its type; of a list or tuple with those of what is in it."""
    name = type(given).__name__
    if not isinstance(given, (tuple, list)):
        return name
    return f"{name} of {', '.join(type(x).__name__ for x in given) or 'nothing'}"


def words_of(columns: int) -> int:
    """Of a set of columns, a bit each."""
    return (columns + WORD - 1) // WORD


def check_sets(
    tokens: Sequence[int], is_bool: bool, offsets: Sequence[int] | None, vocab_size: int | None
) -> None:
    """Raises ValueError where the shapes that `allowed_from` is given are wrong. ``offsets``: None where there are none."""
    if is_bool:
        if offsets is not None or vocab_size is not None:
            name = "vocab_size" if offsets is None else "offsets"
            raise ValueError(f"{name}: expected none beside a bool mask, got one")
        if not tokens:
            raise ValueError("tokens: expected bool [..., V], got a scalar")
        return
    if offsets is None or vocab_size is None:
        name = "vocab_size" if vocab_size is None else "offsets"
        raise ValueError(f"{name}: expected beside tokens of integers, got None (a mask is bool)")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"vocab_size: expected an integer >= 1, got {vocab_size!r}")
    if len(tokens) != 1:
        raise ValueError(f"tokens: expected one dimension, got {list(tokens)}")
    if len(offsets) != 1 or not offsets[0]:
        raise ValueError(f"offsets: expected shape [N + 1], got {list(offsets)}")


class Layout(NamedTuple):
    """Rows a stride apart, in groups a stride of their own apart."""

    rows: int
    row_stride: int
    group_rows: int = 0
    group_stride: int = 0


def _leading(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The leading dimensions as few (size, stride) pairs, outermost first."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def layout(shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
    """How the rows of [..., C] lie, if the ABI can say it."""
    cols = shape[-1]
    if 0 in shape:
        return Layout(prod(shape[:-1]), max(cols, 1))
    if cols > 1 and strides[-1] != 1:
        return None
    leading = _leading(shape[:-1], strides[:-1])
    if not leading:
        return Layout(1, cols)
    rows, stride = leading[-1]
    if stride < cols or len(leading) > 2:
        return None
    if len(leading) == 1:
        return Layout(rows, stride)
    groups, group_stride = leading[0]
    if group_stride < (rows - 1) * stride + cols:
        return None
    return Layout(groups * rows, stride, rows, group_stride)


def lies_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements of [R,C] share memory."""
    (rows, cols), (row_stride, col_stride) = shape, strides
    if rows < 2 or cols < 2:
        return (rows < 2 or row_stride > 0) and (cols < 2 or col_stride > 0)
    row_span, col_span = (cols - 1) * col_stride, (rows - 1) * row_stride
    return min(row_stride, col_stride) > 0 and (row_stride > row_span or col_stride > col_span)
