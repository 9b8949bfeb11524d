"""The policy losses of `tileloss.torch` on a vocabulary that is cut over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileloss.torch._arguments import Value
from tileloss.torch._outputs import metrics_of
from tileloss.torch.distributed._prepare import Given, call
from tileloss.torch.distributed.functions import Group, Number
from tileloss.torch.policy import policy_options


def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sampler_logp: Tensor | None = None,
    sequence_offsets: Tensor | None = None,
    preset: str | None = None,
    return_metrics: bool = False,
    inplace_backward: bool = False,
    # generated: arguments of policy_loss
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
    options: dict[str, Value] = {
        # generated: values of policy_loss
        "logit_scale": logit_scale,
        "softcap": softcap,
        "temperature": temperature,
        "temperature_on": temperature_on,
        "valid_vocab": valid_vocab,
        "ignore_index": ignore_index,
        "kind": kind,
        "ratio_level": ratio_level,
        "aggregation": aggregation,
        "advantage_level": advantage_level,
        "cispo_cap": cispo_cap,
        "epsilon_low": epsilon_low,
        "epsilon_high": epsilon_high,
        "delta": delta,
        "dual_clip": dual_clip,
        "cap_low": cap_low,
        "tau_pos": tau_pos,
        "tau_neg": tau_neg,
        "vespo_k_pos": vespo_k_pos,
        "vespo_lambda_pos": vespo_lambda_pos,
        "vespo_k_neg": vespo_k_neg,
        "vespo_lambda_neg": vespo_lambda_neg,
        "log_ratio_clamp": log_ratio_clamp,
        "sampler_correction": sampler_correction,
        "sampler_level": sampler_level,
        "sampler_min": sampler_min,
        "sampler_max": sampler_max,
        "off_policy_threshold": off_policy_threshold,
        "entropy_quantile": entropy_quantile,
        "entropy_threshold": entropy_threshold,
        "beta": beta,
        "kl_estimator": kl_estimator,
        "kl_importance": kl_importance,
        "kl_log_ratio_clamp": kl_log_ratio_clamp,
        "kl_clamp": kl_clamp,
        "entropy_coef": entropy_coef,
        "entropy_reduction": entropy_reduction,
        "num_items": num_items,
        "max_length": max_length,
        # end of generated
    }
    given = Given(
        "policy_loss",
        input,
        {
            "labels": target,
            "advantages": advantages,
            "mask": mask,
            "old_logp": old_logp,
            "ref_logp": ref_logp,
            "sampler_logp": sampler_logp,
            "sequence_offsets": sequence_offsets,
        },
        group,
        vocab_start,
        lambda: policy_options(options, target, advantages),
        preset,
        wants_metrics=return_metrics,
        inplace_backward=inplace_backward,
    )
    return _policy(given)


def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    linear_bias: Tensor | None = None,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sampler_logp: Tensor | None = None,
    sequence_offsets: Tensor | None = None,
    preset: str | None = None,
    return_metrics: bool = False,
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    grad_in_forward: bool | None = None,
    # generated: arguments of policy_loss
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
    options: dict[str, Value] = {
        # generated: values of policy_loss
        "logit_scale": logit_scale,
        "softcap": softcap,
        "temperature": temperature,
        "temperature_on": temperature_on,
        "valid_vocab": valid_vocab,
        "ignore_index": ignore_index,
        "kind": kind,
        "ratio_level": ratio_level,
        "aggregation": aggregation,
        "advantage_level": advantage_level,
        "cispo_cap": cispo_cap,
        "epsilon_low": epsilon_low,
        "epsilon_high": epsilon_high,
        "delta": delta,
        "dual_clip": dual_clip,
        "cap_low": cap_low,
        "tau_pos": tau_pos,
        "tau_neg": tau_neg,
        "vespo_k_pos": vespo_k_pos,
        "vespo_lambda_pos": vespo_lambda_pos,
        "vespo_k_neg": vespo_k_neg,
        "vespo_lambda_neg": vespo_lambda_neg,
        "log_ratio_clamp": log_ratio_clamp,
        "sampler_correction": sampler_correction,
        "sampler_level": sampler_level,
        "sampler_min": sampler_min,
        "sampler_max": sampler_max,
        "off_policy_threshold": off_policy_threshold,
        "entropy_quantile": entropy_quantile,
        "entropy_threshold": entropy_threshold,
        "beta": beta,
        "kl_estimator": kl_estimator,
        "kl_importance": kl_importance,
        "kl_log_ratio_clamp": kl_log_ratio_clamp,
        "kl_clamp": kl_clamp,
        "entropy_coef": entropy_coef,
        "entropy_reduction": entropy_reduction,
        "num_items": num_items,
        "max_length": max_length,
        # end of generated
    }
    given = Given(
        "policy_loss",
        input,
        {
            "labels": target,
            "advantages": advantages,
            "mask": mask,
            "old_logp": old_logp,
            "ref_logp": ref_logp,
            "sampler_logp": sampler_logp,
            "sequence_offsets": sequence_offsets,
        },
        group,
        vocab_start,
        lambda: policy_options(options, target, advantages),
        preset,
        wants_metrics=return_metrics,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        compute_dtype=compute_dtype,
        workspace_bytes=workspace_bytes,
        grad_in_forward=grad_in_forward,
        is_linear=True,
    )
    return _policy(given)


def _policy(given: Given) -> Any:
    results = call(given)
    loss = results["loss"]
    return (loss, metrics_of("policy_loss", results)) if given.wants_metrics else loss
