"""The policy losses of `tileloss.torch` on a vocabulary that is cut over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileloss._core.other_names import explains_names
from tileloss.torch._outputs import with_metrics
from tileloss.torch.distributed._prepare import Given, call, given_of
from tileloss.torch.distributed.functions import Group, Number


@explains_names
def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    return_metrics: bool = False,
    inplace_backward: bool = False,
    # generated: arguments of policy_loss
    mask: Tensor | None = None,
    sequence_offsets: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sampler_logp: Tensor | None = None,
    allowed: Tensor | None = None,
    preset: str | None = None,
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
    num_items: Number | None = None,
    max_length: int | None = None,
    # end of generated
) -> Any:
    """`tileloss.torch.policy_loss` of logits whose vocabulary is cut over a group, losses that couple rows included.

    Arguments, and errors: `cross_entropy` of this module, `tileloss.torch.policy_loss`.

    Returns:
        The loss, or (loss, metrics by name) with ``return_metrics``; the same on every rank.
    """
    return _results(given_of("policy_loss", locals()))


@explains_names
def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    return_metrics: bool = False,
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    grad_in_forward: bool | None = None,
    # generated: arguments of policy_loss
    mask: Tensor | None = None,
    sequence_offsets: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sampler_logp: Tensor | None = None,
    allowed: Tensor | None = None,
    preset: str | None = None,
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
    num_items: Number | None = None,
    max_length: int | None = None,
    # end of generated
) -> Any:
    """`policy_loss` of this module with the LM head cut over a group: arguments as `linear_cross_entropy`."""
    return _results(given_of("policy_loss", locals()))


def _results(given: Given) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    return with_metrics(call(given), given.return_metrics)
