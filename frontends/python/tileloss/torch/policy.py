"""The GRPO family of policy losses, from logits and fused with the LM head."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tileloss.torch._apply import loss_of_hidden, loss_of_logits, make_head, metrics_by_name
from tileloss.torch._options import Value
from tileloss.torch._tensors import may_have_shape

Number = float | Tensor


class PolicyOptions(TypedDict, total=False):
    """Options of the policy losses, by their names in docs/losses.md; absent or None: the default, or the preset's.

    Those of type `Number` change from step to step without a new graph when they are given as tensors of one element. None is
    differentiated: a tensor that requires a gradient is refused while gradients are recorded.
    """

    kind: str | None  # clip (default), cispo, sapo, vespo, reinforce
    ratio_level: (
        str | None
    )  # token (default), sequence: rho_b = exp(mean of log rho over the sequence), as GSPO
    aggregation: (
        str | None
    )  # seq_mean_token_mean (default), token_mean, seq_mean_token_sum_norm, seq_mean_token_sum, sum, none
    advantage_level: str | None  # sequence or token; default: by the advantages' shape
    cispo_cap: (
        str | None
    )  # raw (default): epsilon_high is the cap itself; one_plus: 1 + epsilon_high
    epsilon_low: Number | None  # 0.2
    epsilon_high: Number | None  # 0.2; kind cispo requires it
    delta: Number | None  # clip: upper bound of rho
    dual_clip: Number | None  # clip: c > 1 bounds the loss by -c A where A < 0
    cap_low: Number | None  # cispo: lower bound of rho
    tau_pos: float | None  # sapo: 1.0
    tau_neg: float | None  # sapo: 1.05
    vespo_k_pos: float | None  # 2
    vespo_lambda_pos: float | None  # 3
    vespo_k_neg: float | None  # 3
    vespo_lambda_neg: float | None  # 2
    log_ratio_clamp: float | None  # clamps log rho of each token
    sampler_correction: str | None  # off (default), truncate, mask: needs sampler_logp
    sampler_level: str | None  # token (default), sequence
    sampler_min: float | None
    sampler_max: float | None
    off_policy_threshold: float | None
    entropy_quantile: float | None  # keeps tokens whose entropy is at least the (1 - q) quantile
    entropy_threshold: Number | None
    beta: Number | None  # coefficient of the KL to ref_logp: 0
    kl_estimator: str | None  # k1, k2, k3 (default)
    kl_importance: bool | None  # multiplies the KL by rho, differentiated
    kl_log_ratio_clamp: float | None
    kl_clamp: float | None
    entropy_coef: Number | None  # adds -entropy_coef * H: 0
    entropy_reduction: str | None  # token_mean (default), as_loss
    num_items: Number | None  # the denominator of token_mean and sum
    max_length: int | None  # L_max of seq_mean_token_sum_norm; T by default
    ignore_index: int | None  # -100
    logit_scale: float | None
    softcap: float | None
    temperature: Number | None
    temperature_on: str | None
    valid_vocab: int | None


class _PolicyCall(PolicyOptions, total=False):
    """The keywords of both policy losses but ``return_metrics``, which decides what they return: for their overloads."""

    mask: Tensor | None
    old_logp: Tensor | None
    ref_logp: Tensor | None
    sampler_logp: Tensor | None
    sequence_offsets: Tensor | None
    preset: str | None


class _LogitsCall(_PolicyCall, total=False):
    grad_in_forward: bool | None
    inplace_backward: bool


class _LinearCall(_PolicyCall, total=False):
    compute_dtype: torch.dtype | None
    workspace_bytes: int | None
    grad_in_forward: bool | None


def _given(
    name: str, options: PolicyOptions, labels: Tensor, advantages: Tensor
) -> dict[str, Value]:
    unknown = options.keys() - PolicyOptions.__annotations__.keys()
    if unknown:
        expected = ", ".join(PolicyOptions.__annotations__)
        raise TypeError(
            f"{name}: expected options among {expected}, got {', '.join(sorted(unknown))}"
        )
    given: dict[str, Any] = dict(options)
    if (
        given.get("advantage_level") is None
        and isinstance(advantages, Tensor)
        and isinstance(labels, Tensor)
    ):
        # [B, 1] of [B, 1] labels: either; [B, 0]: no token has one.
        per_token = labels.dim() > 1 and may_have_shape(advantages, labels.shape)
        given["advantage_level"] = "token" if per_token else "sequence"
    return given


@overload
def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    return_metrics: Literal[False] = ...,
    **options: Unpack[_LogitsCall],
) -> Tensor: ...


@overload
def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    return_metrics: Literal[True],
    **options: Unpack[_LogitsCall],
) -> tuple[Tensor, dict[str, Tensor]]: ...


def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sampler_logp: Tensor | None = None,
    sequence_offsets: Tensor | None = None,
    preset: str | None = None,
    return_metrics: bool = False,
    grad_in_forward: bool | None = None,
    inplace_backward: bool = False,
    **options: Unpack[PolicyOptions],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """A policy loss of the GRPO family: with rho = exp(logp - old_logp), A the advantage, for each token

        l * (off-policy mask) * (entropy mask) * (sampler ratio) + beta KL - entropy_coef H,

    aggregated over sequences and tokens. docs/losses.md has every formula; each agrees with TRL's, Liger's or verl's.

    Args:
        input: logits, [B, T, V], or [N, V] with ``sequence_offsets``; float32, bfloat16 or float16 on the CPU. Position t holds
            the prediction of target[:, t] (shift before the call: ``logits[:, :-1]`` is not copied).
        target: the tokens sampled, [B, T] or [N], int64, int32 or uint8.
        advantages: [B] or [B, 1] of a sequence, or of target's shape. For [N] tokens with one advantage a token say
            ``advantage_level="token"``. Not differentiated: one that requires a gradient is refused while gradients are
            recorded.
        mask: of target's shape or flat [N], bool, integers or floats: tokens with 0 are neither read nor counted.
        old_logp, ref_logp, sampler_logp: of target's shape or flat [N], of the policy that sampled, the reference model, and
            the engine that sampled; detached. Without old_logp the new logp stands in, so rho = 1 with a gradient.
        sequence_offsets: [S+1] integers: sequence b is rows offsets[b] to offsets[b+1]. Default: the rows of the batch.
        preset: grpo, bnpo, dr_grpo, dapo, cispo, sapo, gspo, luspo, vespo or reinforce: a kind, a ratio level and an
            aggregation, on top of which options apply.
        return_metrics: also return a dict of 0-d tensors: kl, entropy, clip_fraction, ratio_mean, ... (NaN: does not apply).
        grad_in_forward, inplace_backward: as `tileloss.torch.cross_entropy`; None leaves the gradient to the backward.
        **options: `PolicyOptions`.

    Returns:
        float32: a scalar, or target's shape with aggregation "none"; with return_metrics a pair.

    Raises:
        As `tileloss.torch.cross_entropy`.
    """
    loss, metrics = loss_of_logits(
        "policy_loss",
        input,
        target,
        {
            "mask": mask,
            "old_logp": old_logp,
            "ref_logp": ref_logp,
            "sampler_logp": sampler_logp,
            "advantages": advantages,
            "sequence_offsets": sequence_offsets,
        },
        _given("policy_loss", options, target, advantages),
        preset=preset or "",
        wants_metrics=return_metrics,
        grad_in_forward=grad_in_forward,
        inplace_backward=inplace_backward,
    )
    return (loss, metrics_by_name("policy_loss", metrics)) if return_metrics else loss


@overload
def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    return_metrics: Literal[False] = ...,
    **options: Unpack[_LinearCall],
) -> Tensor: ...


@overload
def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    return_metrics: Literal[True],
    **options: Unpack[_LinearCall],
) -> tuple[Tensor, dict[str, Tensor]]: ...


def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
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
    **options: Unpack[PolicyOptions],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """`policy_loss` of the logits input @ linear_weight.T + linear_bias, which are never held.

    Args: the head's as `tileloss.torch.linear_cross_entropy`, the loss's as `policy_loss`; [B, T, H] hidden states go with [B, T]
    tokens. Tokens that are masked or ignored cost nothing. ``grad_in_forward`` None is True here, as that saves a product, but
    False where a float16 tensor asks for its gradient.
    """
    head = make_head(input, linear_weight, linear_bias, compute_dtype, workspace_bytes)
    loss, metrics = loss_of_hidden(
        "policy_loss",
        head,
        target,
        {
            "mask": mask,
            "old_logp": old_logp,
            "ref_logp": ref_logp,
            "sampler_logp": sampler_logp,
            "advantages": advantages,
            "sequence_offsets": sequence_offsets,
        },
        _given("linear_policy_loss", options, target, advantages),
        preset=preset or "",
        wants_metrics=return_metrics,
        grad_in_forward=grad_in_forward,
    )
    return (loss, metrics_by_name("linear_policy_loss", metrics)) if return_metrics else loss
