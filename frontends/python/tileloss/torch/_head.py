"""What the LM head's functions take besides: the head itself, its low-rank part, and where its gradient is added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss._core.views import kind_of, lies_apart
from tileloss.torch._arguments import (
    Student,
    autocast_dtype,
    check_device,
    check_float,
    check_last_dimension,
    check_shape,
    has_shape,
    plain,
    refuse_transforms,
)
from tileloss.torch._call import DTYPES
from tileloss.torch._dtensor import is_dtensor, unwrapped, whole_parameter


def operands(
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    compute_dtype: torch.dtype | None,
    workspace_bytes: int | None,
    linear_weight_grad: Tensor | None = None,
) -> tuple[Any, ...]:
    """What `checked_head` takes after the input, as public functions have it."""
    pair: Any = (None, None)
    if low_rank is not None:
        pair = low_rank
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or pair[0] is pair[1] is None:
            raise TypeError(
                f"low_rank: expected None or two tensors, [..., R] and [V, R], got {kind_of(pair)}"
            )
    return linear_weight, linear_bias, *pair, compute_dtype, workspace_bytes, linear_weight_grad


def checked_head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    hidden_r: Tensor | None,
    head_r: Tensor | None,
    compute_dtype: torch.dtype | None,
    workspace_bytes: int | None,
    linear_weight_grad: Tensor | None = None,
) -> Student:
    hidden = plain("input", input)
    head = plain("linear_weight", linear_weight, whole_parameter)
    bias = plain("linear_bias", linear_bias, whole_parameter)
    check_float("input", hidden)
    check_float("linear_weight", head, hidden.device)
    check_last_dimension(hidden)
    sizes = {"H": hidden.shape[-1]}
    check_shape("head", head, (), sizes)
    if bias is not None:
        check_float("linear_bias", bias, hidden.device)
        check_shape("bias", bias, (), sizes)
    if hidden_r is not None or head_r is not None:
        hidden_r = plain("low_rank[0]", hidden_r)
        head_r = plain("low_rank[1]", head_r, whole_parameter)
        check_float("low_rank[0]", hidden_r, hidden.device)
        check_float("low_rank[1]", head_r, hidden.device)
        check_shape("hidden_r", hidden_r, hidden.shape[:-1], sizes)
        check_shape("head_r", head_r, (), sizes)
    refuse_transforms(hidden, head, bias, hidden_r, head_r)
    if workspace_bytes is not None:
        if not isinstance(workspace_bytes, int):
            raise TypeError(f"workspace_bytes: expected an integer >= 1, got {workspace_bytes!r}")
        if not 1 <= workspace_bytes < 2**63:
            raise ValueError(f"workspace_bytes: expected >= 1, got {workspace_bytes}")
    dtype = compute_dtype if compute_dtype is not None else autocast_dtype(hidden.device.type)
    if compute_dtype is None and dtype == torch.float16:
        # float16 autocast: the products know bfloat16 and float32, and float32 loses nothing.
        dtype = torch.float32
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"compute_dtype: expected torch.float32 or torch.bfloat16, got {compute_dtype}"
        )
    code = 0 if dtype is None else DTYPES[dtype]
    if linear_weight_grad is not None:
        _check_head_grad(linear_weight_grad, head)
    return Student(
        (hidden, head, bias, hidden_r, head_r),
        hidden,
        head.shape[0],
        (code, workspace_bytes or 0),
        linear_weight_grad is not None and torch.is_grad_enabled(),
    )


def _check_head_grad(head_grad: Any, head: Tensor) -> None:
    name = "linear_weight_grad"
    if not isinstance(head_grad, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(head_grad).__name__}")
    if is_dtensor(head_grad) or unwrapped(name, head_grad) is not head_grad:
        raise TypeError(f"{name}: expected a plain tensor, got {type(head_grad).__name__}")
    if head_grad.dtype != torch.float32:
        raise TypeError(f"{name}: expected float32, got {head_grad.dtype}")
    check_device(name, head_grad, head.device)
    if not has_shape(head_grad, head.shape):
        raise ValueError(
            f"{name}: expected linear_weight's shape {list(head.shape)}, got {list(head_grad.shape)}"
        )
    strides, is_negated = (
        head_grad.stride(),
        not torch.compiler.is_compiling() and head_grad.is_neg(),
    )
    if is_negated or not (head_grad.is_contiguous() or lies_apart(head_grad.shape, strides)):
        raise ValueError(
            f"{name}: expected elements that each have memory of their own, got strides {list(strides)}{', negated' * is_negated}"
        )
    if head_grad.requires_grad:
        raise ValueError(f"{name}: expected a tensor without gradient, got one that requires it")
    refuse_transforms(head_grad)
    if torch.is_grad_enabled() and not head.requires_grad:
        raise ValueError(
            f"{name}: expected None, as linear_weight requires no gradient, got a tensor to add it to"
        )


def check_apart(head_grad: Tensor, matrices: Sequence[Tensor | None]) -> None:
    """Raises where ``head_grad`` begins where one of the ``matrices`` does, which calls alike need not share. Other overlaps are
    the library's to find, in the backward."""
    if torch.compiler.is_compiling() or type(head_grad) is not Tensor or not head_grad.numel():
        return
    names = ("input", "linear_weight", "linear_bias", "low_rank[0]", "low_rank[1]")
    for name, matrix in zip(names, matrices, strict=True):
        if matrix is not None and matrix.data_ptr() == head_grad.data_ptr():
            raise ValueError(
                f"linear_weight_grad: expected memory apart from {name}'s, got the same"
            )


def refuse_with_head_grad(grad_in_forward: bool | None) -> None:
    if grad_in_forward:
        raise ValueError(
            "grad_in_forward: expected None or False with linear_weight_grad, as only the backward knows the upstream "
            "gradient by which what is added is multiplied, got True"
        )
