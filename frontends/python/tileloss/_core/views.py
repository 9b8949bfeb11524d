"""Addresses, shapes and strides as the ABI's views. Strides are in elements, dtypes the ABI's numbers.

A view is packed into the arguments in one go, which takes a third of the time of making and assigning ctypes structs (0.5 us
instead of 1.7 each).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from struct import Struct
from typing import NamedTuple

from tileloss._core.slots import OFFSETS, Args
from tileloss._core.structs import RowState

# The fields of Matrix and Vector.
MATRIX, VECTOR = Struct("Q4q4i"), Struct("Q2q4i")
_ROW_STATE_BYTES = ctypes.sizeof(RowState)


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


def set_matrix(
    args: Args, slot: str, address: int, dtype: int, shape: Sequence[int], strides: Sequence[int]
) -> None:
    """[R,C] with any strides."""
    MATRIX.pack_into(args, OFFSETS[slot], address, *shape, *strides, dtype, 0, 0, 0)


def set_vector(args: Args, slot: str, address: int, dtype: int, size: int, stride: int) -> None:
    """[N] with one stride, 0 for a broadcast value."""
    VECTOR.pack_into(args, OFFSETS[slot], address, size, stride, dtype, 0, 0, 0)


def set_logits(args: Args, address: int, dtype: int, cols: int, lie: Layout) -> None:
    set_matrix(args, "logits", address, dtype, (lie.rows, cols), (lie.row_stride, 1))
    if lie.group_rows:
        args.row_groups.rows, args.row_groups.logits_stride = lie.group_rows, lie.group_stride


def set_dlogits(
    args: Args, address: int, dtype: int, cols: int, lie: Layout, in_place: bool
) -> None:
    """The gradient of logits that lie so: over them, or contiguous."""
    stride = lie.row_stride if in_place else cols
    set_matrix(args, "dlogits", address, dtype, (lie.rows, cols), (stride, 1))
    if lie.group_rows:
        own = lie.group_rows * cols
        args.row_groups.dlogits_stride = lie.group_stride if in_place else own


def set_row_state(args: Args, address: int, arrays: int, rows: int) -> None:
    """[K,N] float32, contiguous: the first K of slots.STATE."""
    pitch = rows * 4
    entropy_sum = address + 3 * pitch if arrays > 3 else 0
    state = RowState(
        _ROW_STATE_BYTES, rows, address, address + pitch, address + 2 * pitch, entropy_sum
    )
    args.row_state = ctypes.addressof(state)
    args.kept_row_state = state  # as long as the arguments are
