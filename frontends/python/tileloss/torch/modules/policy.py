"""The policy losses as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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

    def __init__(
        self,
        preset: str | None = None,
        *,
        return_metrics: bool = False,
        grad_in_forward: bool | None = None,
        inplace_backward: bool = False,
        # generated: options of policy_loss but num_items
        logit_scale: float | None = None,
        softcap: float | None = None,
        temperature: Number | None = None,
        temperature_on: str | None = None,
        valid_vocab: int | None = None,
        ignore_index: int | None = None,
        kind: str | None = None,
        ratio_level: str | None = None,
        aggregation: str | None = None,
        advantage_level: str | None = None,
        cispo_cap: str | None = None,
        epsilon_low: Number | None = None,
        epsilon_high: Number | None = None,
        delta: Number | None = None,
        dual_clip: Number | None = None,
        cap_low: Number | None = None,
        tau_pos: float | None = None,
        tau_neg: float | None = None,
        vespo_k_pos: float | None = None,
        vespo_lambda_pos: float | None = None,
        vespo_k_neg: float | None = None,
        vespo_lambda_neg: float | None = None,
        log_ratio_clamp: float | None = None,
        sampler_correction: str | None = None,
        sampler_level: str | None = None,
        sampler_min: float | None = None,
        sampler_max: float | None = None,
        off_policy_threshold: float | None = None,
        entropy_quantile: float | None = None,
        entropy_threshold: Number | None = None,
        beta: Number | None = None,
        kl_estimator: str | None = None,
        kl_importance: bool | None = None,
        kl_log_ratio_clamp: float | None = None,
        kl_clamp: float | None = None,
        entropy_coef: Number | None = None,
        entropy_reduction: str | None = None,
        max_length: int | None = None,
        # end of generated
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
        # generated: options of policy_loss but num_items
        logit_scale: float | None = None,
        softcap: float | None = None,
        temperature: Number | None = None,
        temperature_on: str | None = None,
        valid_vocab: int | None = None,
        ignore_index: int | None = None,
        kind: str | None = None,
        ratio_level: str | None = None,
        aggregation: str | None = None,
        advantage_level: str | None = None,
        cispo_cap: str | None = None,
        epsilon_low: Number | None = None,
        epsilon_high: Number | None = None,
        delta: Number | None = None,
        dual_clip: Number | None = None,
        cap_low: Number | None = None,
        tau_pos: float | None = None,
        tau_neg: float | None = None,
        vespo_k_pos: float | None = None,
        vespo_lambda_pos: float | None = None,
        vespo_k_neg: float | None = None,
        vespo_lambda_neg: float | None = None,
        log_ratio_clamp: float | None = None,
        sampler_correction: str | None = None,
        sampler_level: str | None = None,
        sampler_min: float | None = None,
        sampler_max: float | None = None,
        off_policy_threshold: float | None = None,
        entropy_quantile: float | None = None,
        entropy_threshold: Number | None = None,
        beta: Number | None = None,
        kl_estimator: str | None = None,
        kl_importance: bool | None = None,
        kl_log_ratio_clamp: float | None = None,
        kl_clamp: float | None = None,
        entropy_coef: Number | None = None,
        entropy_reduction: str | None = None,
        max_length: int | None = None,
        # end of generated
    ) -> None:
        super().__init__(locals())
