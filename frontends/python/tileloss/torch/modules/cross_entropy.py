"""Cross-entropy as modules."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from tileloss._core.arguments import CrossEntropyOptions
from tileloss._core.other_names import explains_names
from tileloss.torch.cross_entropy import cross_entropy, linear_cross_entropy
from tileloss.torch.modules._base import WithHead, WithOptions

Number = float | Tensor


class _CrossEntropy(WithOptions):
    weight: Tensor | None

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        allowed: Tensor | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
        num_items: Number | None = None,
    ) -> Tensor:
        """input [..., V], with the head [..., H] and `low_rank` as the function, target [...] -> the loss, float32."""
        of_rows = {"mask": mask, "token_weights": token_weights, "allowed": allowed}
        given = {"weight": self.weight, "low_rank": low_rank, "num_items": num_items, **of_rows}
        loss: Tensor = self._call(input, target, **given)
        return loss


class CrossEntropyLoss(_CrossEntropy):
    """`tileloss.torch.cross_entropy` with its options, as `torch.nn.CrossEntropyLoss`.

    Args:
        weight: [V] class weights, a buffer of the module.
        The others: as `cross_entropy`.
    """

    _function = staticmethod(cross_entropy)

    @explains_names
    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        grad_in_forward: bool | None = None,
        inplace_backward: bool = False,
        ignore_index: int = -100,
        **options: Unpack[CrossEntropyOptions[Tensor]],
    ) -> None:
        super().__init__(locals())
        self.register_buffer("weight", weight)


class LinearCrossEntropyLoss(_CrossEntropy, WithHead):
    """An LM head and its cross-entropy in one, as `torch.nn.LinearCrossEntropyLoss`: `tileloss.torch.linear_cross_entropy`.

    Args:
        in_features: H. num_classes: V. bias: whether the head has one.
        device, dtype: of the head, which is drawn as `torch.nn.Linear` does.
        weight: [V] class weights, a buffer of the module.
        The others: as `linear_cross_entropy`.

    The head is `linear`, with `linear.weight` [V, H] and `linear.bias` [V] or None; one that exists is shared by assigning it, or
    its parameters. States are saved as torch's module saves them.
    """

    _function = staticmethod(linear_cross_entropy)

    @explains_names
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        compute_dtype: torch.dtype | None = None,
        workspace_bytes: int | None = None,
        grad_in_forward: bool | None = None,
        **options: Unpack[CrossEntropyOptions[Tensor]],
    ) -> None:
        super().__init__(locals())
        self.register_buffer("weight", weight)
