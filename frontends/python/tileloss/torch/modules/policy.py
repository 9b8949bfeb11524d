"""The policy losses as modules."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from tileloss._core.arguments import PolicyLossOptions
from tileloss._core.other_names import explains_names
from tileloss.torch.modules._base import WithHead, WithOptions
from tileloss.torch.policy import linear_policy_loss, policy_loss

Number = float | Tensor


class _Policy(WithOptions):
    def forward(
        self,
        input: Tensor,
        target: Tensor,
        advantages: Tensor,
        *,
        mask: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        sequence_offsets: Tensor | None = None,
        allowed: Tensor | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """The tensors of `policy_loss`, of the head's input [..., H] and `low_rank` -> the loss, float32, or (loss, metrics) if
        the options ask for metrics."""
        return self._call(
            input,
            target,
            advantages,
            mask=mask,
            old_logp=old_logp,
            ref_logp=ref_logp,
            sampler_logp=sampler_logp,
            sequence_offsets=sequence_offsets,
            allowed=allowed,
            low_rank=low_rank,
            num_items=num_items,
        )


class PolicyLoss(_Policy):
    """`tileloss.torch.policy_loss` with its options.

    Args:
        preset: grpo, dapo, gspo, ...; None: the defaults.
        The others: as `policy_loss`.
    """

    _function = staticmethod(policy_loss)

    @explains_names
    def __init__(
        self,
        preset: str | None = None,
        *,
        return_metrics: bool = False,
        grad_in_forward: bool | None = None,
        inplace_backward: bool = False,
        **options: Unpack[PolicyLossOptions[Tensor]],
    ) -> None:
        super().__init__(locals())


class LinearPolicyLoss(_Policy, WithHead):
    """An LM head and a policy loss in one: `tileloss.torch.linear_policy_loss`.

    Args:
        in_features, num_classes, bias, device, dtype: as `LinearCrossEntropyLoss`, and so is the head, `linear`.
        preset: grpo, dapo, gspo, ...; None: the defaults.
        The others: as `linear_policy_loss`.
    """

    _function = staticmethod(linear_policy_loss)

    @explains_names
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        preset: str | None = None,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        return_metrics: bool = False,
        compute_dtype: torch.dtype | None = None,
        workspace_bytes: int | None = None,
        grad_in_forward: bool | None = None,
        **options: Unpack[PolicyLossOptions[Tensor]],
    ) -> None:
        super().__init__(locals())
