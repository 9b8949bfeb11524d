"""Distillation as modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from tileloss._core.arguments import DistillationOptions, SparseDistillationOptions
from tileloss._core.other_names import explains_names
from tileloss.torch.distillation import distillation, linear_distillation
from tileloss.torch.modules._base import WithHead, WithOptions
from tileloss.torch.sparse_distillation import linear_sparse_distillation, sparse_distillation

Number = float | Tensor


class DistillationLoss(WithOptions):
    """`tileloss.torch.distillation` with its options, keyword arguments of that function."""

    _function = staticmethod(distillation)

    @explains_names
    def __init__(
        self,
        *,
        outputs: Iterable[str] = (),
        grad_in_forward: bool | None = None,
        inplace_backward: bool = False,
        **options: Unpack[DistillationOptions[Tensor]],
    ) -> None:
        super().__init__(locals())

    def forward(
        self,
        input: Tensor,
        teacher: Tensor,
        target: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        allowed: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """input, teacher [..., V] -> the loss, float32, or (loss, DistillationRows) if the options ask for outputs."""
        more = {"mask": mask, "token_weights": token_weights, "allowed": allowed}
        return self._call(input, teacher, target, num_items=num_items, **more)


class LinearDistillationLoss(WithHead):
    """The student's LM head and its distillation in one: `tileloss.torch.linear_distillation`.

    Args:
        in_features, num_classes, bias, device, dtype: as `LinearCrossEntropyLoss`, and so is the student's head, `linear`.
        The others: as `linear_distillation`.

    The teacher's head is no part of the module, which would save it and show it to optimizers: it is given at every call.
    """

    _function = staticmethod(linear_distillation)

    @explains_names
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        outputs: Iterable[str] = (),
        compute_dtype: torch.dtype | None = None,
        workspace_bytes: int | None = None,
        grad_in_forward: bool | None = None,
        **options: Unpack[DistillationOptions[Tensor]],
    ) -> None:
        super().__init__(locals())

    def forward(
        self,
        input: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        *,
        teacher_bias: Tensor | None = None,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        allowed: Tensor | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """input [..., H], teacher_input [..., G], teacher_weight [V, G], `low_rank` of the student's head as the function -> the
        loss, or (loss, DistillationRows)."""
        more = {"mask": mask, "token_weights": token_weights, "allowed": allowed}
        of_heads = {"teacher_bias": teacher_bias, "low_rank": low_rank}
        teacher = teacher_input, teacher_weight
        return self._call(input, *teacher, target, num_items=num_items, **of_heads, **more)


class _SparseDistillation(WithOptions):
    def forward(
        self,
        input: Tensor,
        teacher_ids: Tensor,
        teacher_logprobs: Tensor,
        target: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        allowed: Tensor | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """input [..., V], with the head [..., H] and `low_rank` as the function, teacher_ids and teacher_logprobs [..., K]
        -> the loss, or (loss, DistillationRows)."""
        more = {"mask": mask, "token_weights": token_weights, "allowed": allowed}
        teacher, of_call = (teacher_ids, teacher_logprobs), {"num_items": num_items}
        return self._call(input, *teacher, target, low_rank=low_rank, **of_call, **more)


class SparseDistillationLoss(_SparseDistillation):
    """`tileloss.torch.sparse_distillation` with its options, keyword arguments of that function."""

    _function = staticmethod(sparse_distillation)

    @explains_names
    def __init__(
        self,
        *,
        outputs: Iterable[str] = (),
        grad_in_forward: bool | None = None,
        inplace_backward: bool = False,
        **options: Unpack[SparseDistillationOptions[Tensor]],
    ) -> None:
        super().__init__(locals())


class LinearSparseDistillationLoss(_SparseDistillation, WithHead):
    """The student's LM head and distillation from some columns of a teacher: `tileloss.torch.linear_sparse_distillation`.

    Args:
        in_features, num_classes, bias, device, dtype: as `LinearCrossEntropyLoss`, and so is the head, `linear`.
        The others: as `linear_sparse_distillation`.
    """

    _function = staticmethod(linear_sparse_distillation)

    @explains_names
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        outputs: Iterable[str] = (),
        compute_dtype: torch.dtype | None = None,
        workspace_bytes: int | None = None,
        grad_in_forward: bool | None = None,
        **options: Unpack[SparseDistillationOptions[Tensor]],
    ) -> None:
        super().__init__(locals())
