"""Tensors as the C ABI's views: no copy where strides can say it."""

from __future__ import annotations

import ctypes
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileloss import _library
from tileloss._library import Args, Matrix, RowState, Vector

DTYPES = {
    torch.float32: _library.FLOAT32,
    torch.bfloat16: _library.BFLOAT16,
    torch.float16: _library.FLOAT16,
    torch.int32: _library.INT32,
    torch.int64: _library.INT64,
    torch.uint8: _library.UINT8,
    torch.bool: _library.UINT8,
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ROW_STATE_BYTES = ctypes.sizeof(RowState)
_LARGE = 8 << 20  # bytes from which fresh gradients ask for huge pages


def check_float(name: str, tensor: Tensor) -> None:
    """Raises unless ``tensor`` is a float32, bfloat16 or float16 tensor on the CPU."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
    check_cpu(name, tensor)


def _tangent(tensor: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raises inside torch.func's transforms, and for dual tensors of forward-mode differentiation: the operators
    would lose the tangent in silence, or fail far from here."""
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "tileloss: the transforms of torch.func (vmap, grad, jvp, ...) are not supported: logits and hidden states take any "
            "leading shape, torch.autograd.grad and backward() give gradients"
        )
    if forward_ad._current_level >= 0:
        duals = (t for t in tensors if t is not None and _tangent(t) is not None)
        if next(duals, None) is not None:
            raise NotImplementedError("tileloss: forward-mode differentiation is not supported")


def check_cpu(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise NotImplementedError(
            f"{name}: expected a CPU tensor, the only device of this version, got {tensor.device}"
        )


def check_labels(labels: Tensor, rows_of: Tensor, name: str) -> None:
    """Labels are int32 or int64 and have the leading shape of ``rows_of``, the argument ``name``."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels: expected a Tensor, got {type(labels).__name__}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels: expected int64 or int32, got {labels.dtype}")
    check_cpu("labels", labels)
    if rows_of.dim() == 0:
        raise ValueError(f"{name}: expected at least one dimension, got a scalar")
    if labels.shape != rows_of.shape[:-1]:
        raise ValueError(
            f"labels: expected the leading shape of {name}, {list(rows_of.shape[:-1])}, got {list(labels.shape)}"
        )


def _leading(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
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


class _Layout(NamedTuple):
    """Rows a stride apart, in groups a stride of their own apart."""

    rows: int
    row_stride: int
    group_rows: int = 0
    group_stride: int = 0


def _layout(tensor: Tensor) -> _Layout | None:
    """How the rows of [..., C] lie, if the ABI can say it."""
    cols = tensor.shape[-1]
    shape, strides = tensor.shape[:-1], tensor.stride()[:-1]
    if tensor.numel() == 0:
        return _Layout(prod(shape), max(cols, 1))
    if cols > 1 and tensor.stride(-1) != 1:
        return None
    leading = _leading(shape, strides)
    if not leading:
        return _Layout(1, cols)
    rows, stride = leading[-1]
    if stride < cols or len(leading) > 2:
        return None
    if len(leading) == 1:
        return _Layout(rows, stride)
    groups, group_stride = leading[0]
    if group_stride < (rows - 1) * stride + cols:
        return None
    return _Layout(groups * rows, stride, rows, group_stride)


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if the ABI can say how its rows lie (also x[:, :-1]), else a contiguous copy."""
    return tensor if _layout(tensor) is not None else tensor.contiguous()


def set_logits(args: Args, logits: Tensor, dlogits: Tensor | None) -> None:
    """[..., V] as [N,V]; ``logits`` comes from `as_rows`, ``dlogits`` is contiguous or the logits themselves."""
    layout = _layout(logits)
    assert layout is not None
    code, cols = DTYPES[logits.dtype], logits.shape[-1]
    args.logits = Matrix(logits.data_ptr(), layout.rows, cols, layout.row_stride, 1, code, 0, 0, 0)
    groups = args.row_groups
    groups.rows, groups.logits_stride = layout.group_rows, layout.group_stride
    if dlogits is None:
        return
    in_place = dlogits is logits
    stride = layout.row_stride if in_place else cols
    args.dlogits = Matrix(dlogits.data_ptr(), layout.rows, cols, stride, 1, code, 0, 0, 0)
    groups.dlogits_stride = layout.group_stride if in_place else layout.group_rows * cols


def set_strided_matrix(args: Args, slot: str, tensor: Tensor) -> None:
    """[R,C] with any strides: the LM head, its gradient."""
    rows, cols = tensor.shape
    setattr(
        args,
        slot,
        Matrix(tensor.data_ptr(), rows, cols, *tensor.stride(), DTYPES[tensor.dtype], 0, 0, 0),
    )


def flat(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[N] with one stride, 0 for a broadcast value; copies only where strides cannot say it, or to change ``dtype``."""
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def set_vector(args: Args, slot: str, tensor: Tensor) -> None:
    """``tensor`` comes from `flat`, and outlives the call."""
    stride = tensor.stride(0)
    setattr(
        args,
        slot,
        Vector(tensor.data_ptr(), tensor.shape[0], stride, DTYPES[tensor.dtype], 0, 0, 0),
    )


def set_row_state(args: Args, state: Tensor) -> None:
    """[K,N] float32: max, sum, target, and entropy_sum when K is 4."""
    arrays, rows = state.shape
    pitch = rows * 4
    first = state.data_ptr()
    saved = args.row_state
    saved.struct_size = _ROW_STATE_BYTES
    saved.rows = rows
    saved.max, saved.sum, saved.target = first, first + pitch, first + 2 * pitch
    if arrays > 3:
        saved.entropy_sum = first + 3 * pitch


def new_gradient(like: Tensor) -> Tensor:
    """An uninitialised contiguous tensor; large ones ask for huge pages before they are touched."""
    gradient = torch.empty(like.shape, dtype=like.dtype)
    size = gradient.numel() * gradient.element_size()
    if size >= _LARGE:
        _library.advise_huge_pages(gradient.data_ptr(), size)
    return gradient
