"""Tensors as the C ABI's views: no copy where strides can say it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileloss._core import structs, views
from tileloss._core.slots import SLOTS, Args
from tileloss._core.views import Layout
from tileloss.torch import _pages

DTYPES = {
    torch.float32: structs.FLOAT32,
    torch.bfloat16: structs.BFLOAT16,
    torch.float16: structs.FLOAT16,
    torch.int32: structs.INT32,
    torch.int64: structs.INT64,
    torch.bool: structs.UINT8,
    torch.uint8: structs.UINT8,
}
_OF_CODES = {code: dtype for dtype, code in DTYPES.items()}
# An output's type, and what an input becomes of a type that the slot does not take.
SLOT_DTYPES = {name: _OF_CODES[slot.dtypes[0]] for name, slot in SLOTS.items()}
_TAKEN = {
    name: frozenset(dtype for dtype, code in DTYPES.items() if code in slot.dtypes)
    for name, slot in SLOTS.items()
}
CPU = torch.device("cpu")  # where outputs are made, whatever torch.set_default_device says
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NO_FORWARD_MODE = "tileloss: forward-mode differentiation is not supported"


def check_float(name: str, tensor: Tensor) -> None:
    """Raises unless ``tensor`` is a float32, bfloat16 or float16 tensor on the CPU."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
    check_cpu(name, tensor)


def check_last_dimension(input: Tensor) -> None:
    if input.dim() == 0:
        raise ValueError("input: expected at least one dimension, got a scalar")
    if input.shape[-1] == 0:
        raise ValueError(
            f"input: expected a last dimension of at least 1, got shape {list(input.shape)}"
        )


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
    refuse_duals(*tensors)


def refuse_duals(*tensors: Tensor | None) -> None:
    if forward_ad._current_level >= 0:
        if any(t is not None and _tangent(t) is not None for t in tensors):
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


def _layout(tensor: Tensor) -> Layout | None:
    """How the rows of [..., C] lie, if the ABI can say it."""
    if tensor.is_neg():
        return None
    if tensor.is_contiguous() and (size := tensor.numel()) > 0:
        cols = tensor.shape[-1]
        return Layout(size // cols, cols)
    return views.layout(tensor.shape, tensor.stride())


def lies_in_rows(tensor: Tensor) -> bool:
    """Whether the ABI can say how its rows lie (also of x[:, :-1])."""
    return _layout(tensor) is not None


def check_in_place(logits: Tensor) -> None:
    if not lies_in_rows(logits):
        raise ValueError(
            "inplace_backward: expected logits whose rows can be written where they lie (last stride 1, no broadcast), "
            f"got shape {list(logits.shape)} with strides {list(logits.stride())}{', negated' * logits.is_neg()}"
        )


def set_logits(args: Args, logits: Tensor, dlogits: Tensor | None) -> Tensor:
    """[..., V] as [N,V]. Returns what must outlive the call: the logits, or a copy where the ABI cannot say how their rows lie.
    ``dlogits`` is contiguous, or the logits themselves."""
    lie = _layout(logits)
    if lie is None:
        logits = logits.resolve_neg().contiguous()
        lie = Layout(logits.numel() // logits.shape[-1], logits.shape[-1])
    dtype, cols = DTYPES[logits.dtype], logits.shape[-1]
    views.set_logits(args, logits.data_ptr(), dtype, cols, lie)
    if dlogits is not None:
        views.set_dlogits(args, dlogits.data_ptr(), dtype, cols, lie, dlogits is logits)
    return logits


def set_beside_logits(args: Args, slot: str, tensor: Tensor) -> Tensor:
    """A teacher's logits, or class probabilities: [..., V] as [N,V], after the logits, whose groups of rows it shares. Returns
    what must outlive the call."""
    lie, groups, cols = _layout(tensor), args.row_groups, tensor.shape[-1]
    if lie is None or (lie.group_rows and groups.rows and lie.group_rows != groups.rows):
        tensor = tensor.resolve_neg().contiguous()
        lie = Layout(tensor.numel() // cols, cols)
    if lie.group_rows and not groups.rows:
        groups.rows = lie.group_rows
        groups.logits_stride = lie.group_rows * args.logits.row_stride
        groups.dlogits_stride = lie.group_rows * args.dlogits.row_stride
    if groups.rows:
        own = groups.rows * lie.row_stride
        groups.teacher_logits_stride = lie.group_stride if lie.group_rows else own
    strides = (lie.row_stride, 1)
    dtype = DTYPES[tensor.dtype]
    views.set_matrix(args, slot, tensor.data_ptr(), dtype, (lie.rows, cols), strides)
    return tensor


def without_overlap(matrix: Tensor) -> Tensor:
    """[R,C] as it lies; a copy where elements share memory, as in an expanded tensor, or are to be negated."""
    matrix = matrix.resolve_neg()
    if matrix.is_contiguous() or views.lies_apart(matrix.shape, matrix.stride()):
        return matrix
    return matrix.contiguous()


def set_strided_matrix(args: Args, slot: str, tensor: Tensor) -> None:
    """[R,C] with any strides: the LM head, its gradient."""
    dtype = DTYPES[tensor.dtype]
    views.set_matrix(args, slot, tensor.data_ptr(), dtype, tensor.shape, tensor.stride())


def set_vector(args: Args, slot: str, tensor: Tensor) -> Tensor:
    """[...] as [N] with one stride, 0 for a broadcast value. Returns what must outlive the call: the tensor, or a copy where
    strides cannot say it or the slot takes other types."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype not in _TAKEN[slot]:
        wanted = SLOT_DTYPES[slot]
        tensor = tensor.ne(0) if wanted == torch.uint8 else tensor.to(wanted)
    if tensor.dim() != 1 and not tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    stride = tensor.stride(0) if tensor.dim() == 1 else 1
    address, dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
    views.set_vector(args, slot, address, dtype, tensor.numel(), stride)
    return tensor


def set_row_state(args: Args, state: Tensor) -> None:
    """[K,N] float32: the first K of slots.STATE."""
    views.set_row_state(args, state.data_ptr(), *state.shape)


def new_gradient(like: Tensor, kind: _pages.Kind) -> Tensor:
    """An uninitialised contiguous tensor. A large one lies on huge pages, in the memory that the last one of its kind had, if
    that was freed (see _pages)."""
    lent = _pages.lend(like, kind) if like.nbytes >= _pages.LARGE else None
    return torch.empty(like.shape, dtype=like.dtype, device=CPU) if lent is None else lent
