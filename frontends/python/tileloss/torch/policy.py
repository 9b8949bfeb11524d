"""The GRPO family of policy losses, from logits and fused with the LM head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from tileloss._core.functions import check_option_names, lists_options
from tileloss.torch._apply import loss_of_hidden, loss_of_logits, make_head, metrics_by_name
from tileloss.torch._options import Value
from tileloss.torch._tensors import may_have_shape


def policy_options(
    name: str, options: Mapping[str, Value], target: Tensor, advantages: Tensor
) -> dict[str, Value]:
    """The options that were given, and how the advantages lie, which their shape says where nothing else does."""
    check_option_names(name, options)
    given = dict(options)
    if (
        given.get("advantage_level") is None
        and isinstance(advantages, Tensor)
        and isinstance(target, Tensor)
    ):
        # [B, 1] of [B, 1] labels: either; [B, 0]: no token has one.
        per_token = target.dim() > 1 and may_have_shape(advantages, target.shape)
        given["advantage_level"] = "token" if per_token else "sequence"
    return given


@overload
def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = ...,
    old_logp: Tensor | None = ...,
    ref_logp: Tensor | None = ...,
    sampler_logp: Tensor | None = ...,
    sequence_offsets: Tensor | None = ...,
    preset: str | None = ...,
    return_metrics: Literal[False] = ...,
    grad_in_forward: bool | None = ...,
    inplace_backward: bool = ...,
    **options: Value,
) -> Tensor: ...


@overload
def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = ...,
    old_logp: Tensor | None = ...,
    ref_logp: Tensor | None = ...,
    sampler_logp: Tensor | None = ...,
    sequence_offsets: Tensor | None = ...,
    preset: str | None = ...,
    return_metrics: Literal[True],
    grad_in_forward: bool | None = ...,
    inplace_backward: bool = ...,
    **options: Value,
) -> tuple[Tensor, dict[str, Tensor]]: ...


@lists_options
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
    **options: Value,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """A policy loss of the GRPO family: with rho = exp(logp - old_logp), A the advantage, for each token

        l * (off-policy mask) * (entropy mask) * (sampler ratio) + beta KL - entropy_coef H,

    aggregated over sequences and tokens. docs/users/losses.md has every formula; each agrees with TRL's, Liger's or verl's.

    Args:
        input: logits, [B, T, V], or [N, V] with ``sequence_offsets``; float32, bfloat16 or float16 on the CPU. Position t holds
            the prediction of target[:, t] (shift before the call: ``logits[:, :-1]`` is not copied).
        target: the tokens sampled, [B, T] or [N], int64, int32 or uint8.
        advantages: [B] or [B, 1] of a sequence, or of target's shape. For [N] tokens with one advantage a token say
            ``advantage_level="token"``. Not differentiated: one that requires a gradient is refused while gradients are
            recorded.
        mask: of target's shape or flat [N], bool, integers or floats: tokens with 0 are neither read nor counted.
        old_logp, ref_logp, sampler_logp: of target's shape or flat [N], of the policy that sampled, the reference model, and
            the engine that sampled; constants, as the advantages are. Without old_logp the new logp stands in, so rho = 1 with
            a gradient.
        sequence_offsets: [S+1] integers: sequence b is rows offsets[b] to offsets[b+1]. Default: the rows of the batch.
        preset: a kind, a ratio level and an aggregation by the name of the method, on top of which options apply.
        return_metrics: also return a dict of 0-d tensors: kl, entropy, clip_fraction, ratio_mean, ... (NaN: does not apply).
        grad_in_forward, inplace_backward: as `tileloss.torch.cross_entropy`; None leaves the gradient to the backward.
        **options: by their names in docs/users/losses.md; absent or None: the default, or the preset's. Those that change from
            step to step (temperature, num_items, epsilon_low, beta, ...) may be tensors of one element; none is differentiated.

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
        policy_options("policy_loss", options, target, advantages),
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
    mask: Tensor | None = ...,
    old_logp: Tensor | None = ...,
    ref_logp: Tensor | None = ...,
    sampler_logp: Tensor | None = ...,
    sequence_offsets: Tensor | None = ...,
    preset: str | None = ...,
    return_metrics: Literal[False] = ...,
    compute_dtype: torch.dtype | None = ...,
    workspace_bytes: int | None = ...,
    grad_in_forward: bool | None = ...,
    **options: Value,
) -> Tensor: ...


@overload
def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    old_logp: Tensor | None = ...,
    ref_logp: Tensor | None = ...,
    sampler_logp: Tensor | None = ...,
    sequence_offsets: Tensor | None = ...,
    preset: str | None = ...,
    return_metrics: Literal[True],
    compute_dtype: torch.dtype | None = ...,
    workspace_bytes: int | None = ...,
    grad_in_forward: bool | None = ...,
    **options: Value,
) -> tuple[Tensor, dict[str, Tensor]]: ...


@lists_options
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
    **options: Value,
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
        policy_options("linear_policy_loss", options, target, advantages),
        preset=preset or "",
        wants_metrics=return_metrics,
        grad_in_forward=grad_in_forward,
    )
    return (loss, metrics_by_name("linear_policy_loss", metrics)) if return_metrics else loss
