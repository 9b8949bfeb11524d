"""Tensors as the C ABI's views: no copy where strides can say it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileloss import _library
from tileloss._library import Args, RowState
from tileloss.torch import _pages

DTYPES = {
    torch.float32: _library.FLOAT32,
    torch.bfloat16: _library.BFLOAT16,
    torch.float16: _library.FLOAT16,
    torch.int32: _library.INT32,
    torch.int64: _library.INT64,
    torch.uint8: _library.UINT8,
    torch.bool: _library.UINT8,
}
CPU = torch.device("cpu")  # where outputs are made, whatever torch.set_default_device says
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ROW_STATE_BYTES = ctypes.sizeof(RowState)
# The fields of _library's Matrix and Vector, and RowState's first: packed into Args, which takes a third of the time of making
# and assigning ctypes structs (0.5 us instead of 1.7 each).
_MATRIX, _VECTOR, _ROW_STATE = Struct("Q4q4i"), Struct("Q2q4i"), Struct("Qq4Q")
_OFFSETS = {field[0]: getattr(Args, field[0]).offset for field in Args._fields_}
_NO_FORWARD_MODE = "tileloss: forward-mode differentiation is not supported"


def check_float(name: str, tensor: Tensor) -> None:
    """Raises unless ``tensor`` is a float32, bfloat16 or float16 tensor on the CPU."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
    check_cpu(name, tensor)


def autocast_dtype(device_type: str = "cpu") -> torch.dtype | None:
    """What `torch.autocast` computes in on that type of device, None outside of it."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _tangent(tensor: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raises inside torch.func's transforms, and for dual tensors of forward-mode differentiation: the operators
    would lose the tangent in silence, or fail far from here."""
    if torch.compiler.is_compiling():
        # torch.compile knows the level, but not which tensors are dual. The other transforms are not seen here: under them the
        # operators fail by themselves, or give what they should (vmap without gradients).
        if forward_ad._current_level >= 0:
            raise NotImplementedError(_NO_FORWARD_MODE)
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "tileloss: the transforms of torch.func (vmap, grad, jvp, ...) are not supported: logits and hidden states take any "
            "leading shape, torch.autograd.grad and backward() give gradients"
        )
    if forward_ad._current_level >= 0:
        duals = (t for t in tensors if t is not None and _tangent(t) is not None)
        if next(duals, None) is not None:
            raise NotImplementedError(_NO_FORWARD_MODE)


def check_cpu(name: str, tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise NotImplementedError(
            f"{name}: expected a CPU tensor, the only device of this version, got {tensor.device}"
        )


def may_have_shape(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Whether ``tensor`` has that shape. A size that torch.compile learns only when the graph runs, as that of x[mask], may."""
    if tensor.dim() != len(shape):
        return False
    if not torch.compiler.is_compiling():
        return tensor.shape == shape
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return all(guard_or_true(a == b) for a, b in zip(tensor.shape, shape, strict=True))


def has_shape(tensor: Tensor, shape: Sequence[int]) -> bool:
    """The same; of a size that torch.compile does not know yet the graph checks it, and raises a RuntimeError."""
    if not may_have_shape(tensor, shape):
        return False
    if torch.compiler.is_compiling():
        for a, b in zip(tensor.shape, shape, strict=True):
            torch._check(a == b)
    return True


def checked_labels(target: Tensor, input: Tensor) -> Tensor:
    """Labels as int32 or int64, of the leading shape of ``input``."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a Tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise TypeError(f"target: expected int64, int32 or uint8, got {target.dtype}")
    check_cpu("target", target)
    if input.dim() == 0:
        raise ValueError("input: expected at least one dimension, got a scalar")
    if not has_shape(target, input.shape[:-1]):
        raise ValueError(
            f"target: expected the leading shape of input, {list(input.shape[:-1])}, got {list(target.shape)}"
        )
    # The ABI has no labels of 8 bits.
    return target.long() if target.dtype == torch.uint8 else target


def check_rows(name: str, tensor: Tensor, target: Tensor) -> None:
    """A number for each label lies as the labels do, or flat: of another shape it would go to other rows than meant."""
    if not has_shape(tensor, target.shape if tensor.dim() != 1 else (target.numel(),)):
        raise ValueError(
            f"{name}: expected target's shape {list(target.shape)}, or [{target.numel()}], got {list(tensor.shape)}"
        )


def check_vector(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1:
        raise ValueError(f"{name}: expected one dimension, got {list(tensor.shape)}")


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
    if tensor.is_neg():
        return None
    cols = tensor.shape[-1]
    if tensor.numel() == 0:
        return _Layout(prod(tensor.shape[:-1]), max(cols, 1))
    if tensor.is_contiguous():
        return _Layout(tensor.numel() // cols, cols)
    if cols > 1 and tensor.stride(-1) != 1:
        return None
    leading = _leading(tensor.shape[:-1], tensor.stride()[:-1])
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


def lies_in_rows(tensor: Tensor) -> bool:
    """Whether the ABI can say how its rows lie (also of x[:, :-1])."""
    return _layout(tensor) is not None


def _pack_matrix(
    args: Args, slot: str, tensor: Tensor, rows: int, cols: int, row_stride: int, col_stride: int
) -> None:
    address, code = tensor.data_ptr(), DTYPES[tensor.dtype]
    _MATRIX.pack_into(
        args, _OFFSETS[slot], address, rows, cols, row_stride, col_stride, code, 0, 0, 0
    )


def set_logits(args: Args, logits: Tensor, dlogits: Tensor | None) -> Tensor:
    """[..., V] as [N,V]. Returns what must outlive the call: the logits, or a copy where the ABI cannot say how their rows lie.
    ``dlogits`` is contiguous, or the logits themselves."""
    layout = _layout(logits)
    if layout is None:
        logits = logits.resolve_neg().contiguous()
        layout = _Layout(logits.numel() // logits.shape[-1], logits.shape[-1])
    rows, row_stride, group_rows, group_stride = layout
    cols = logits.shape[-1]
    _pack_matrix(args, "logits", logits, rows, cols, row_stride, 1)
    if group_rows:
        args.row_groups.rows, args.row_groups.logits_stride = group_rows, group_stride
    if dlogits is None:
        return logits
    in_place = dlogits is logits
    _pack_matrix(args, "dlogits", dlogits, rows, cols, row_stride if in_place else cols, 1)
    if group_rows:
        args.row_groups.dlogits_stride = group_stride if in_place else group_rows * cols
    return logits


def without_overlap(matrix: Tensor) -> Tensor:
    """[R,C] as it lies; a copy where elements share memory, as in an expanded tensor, or are to be negated."""
    matrix = matrix.resolve_neg()
    if matrix.is_contiguous():
        return matrix
    (rows, cols), (row_stride, col_stride) = matrix.shape, matrix.stride()
    if rows < 2 or cols < 2:
        apart = (rows < 2 or row_stride > 0) and (cols < 2 or col_stride > 0)
    else:
        row_span, col_span = (cols - 1) * col_stride, (rows - 1) * row_stride
        apart = min(row_stride, col_stride) > 0 and (row_stride > row_span or col_stride > col_span)
    return matrix if apart else matrix.contiguous()


def set_strided_matrix(args: Args, slot: str, tensor: Tensor) -> None:
    """[R,C] with any strides: the LM head, its gradient."""
    _pack_matrix(args, slot, tensor, *tensor.shape, *tensor.stride())


def set_vector(args: Args, slot: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[...] as [N] with one stride, 0 for a broadcast value. Returns what must outlive the call: the tensor, or a copy where
    strides cannot say it or ``dtype`` is another."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    if tensor.dim() != 1 and not tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    stride = tensor.stride(0) if tensor.dim() == 1 else 1
    address, code = tensor.data_ptr(), DTYPES[tensor.dtype]
    _VECTOR.pack_into(args, _OFFSETS[slot], address, tensor.numel(), stride, code, 0, 0, 0)
    return tensor


def set_row_state(args: Args, state: Tensor) -> None:
    """[K,N] float32: max, sum, target, and entropy_sum when K is 4."""
    arrays, rows = state.shape
    pitch, first = rows * 4, state.data_ptr()
    entropy_sum = first + 3 * pitch if arrays > 3 else 0
    _ROW_STATE.pack_into(
        args, _OFFSETS["row_state"], _ROW_STATE_BYTES, rows,
        first, first + pitch, first + 2 * pitch, entropy_sum,
    )  # fmt: skip


def new_gradient(like: Tensor, kind: _pages.Kind) -> Tensor:
    """An uninitialised contiguous tensor. A large one lies on huge pages, in the memory that the last one of its kind had, if
    that was freed (see _pages)."""
    lent = _pages.lend(like, kind) if like.nbytes >= _pages.LARGE else None
    return torch.empty(like.shape, dtype=like.dtype, device=CPU) if lent is None else lent
