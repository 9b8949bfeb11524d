"""The GRPO family of policy losses, from logits and fused with the LM head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from tileloss._core.arguments import PolicyLossArguments
from tileloss._core.other_names import explains_names
from tileloss.torch._arguments import (
    Unchecked,
    Value,
    check_flag,
    checked_logits,
    may_have_shape,
)
from tileloss.torch._head import checked_head, operands
from tileloss.torch._outputs import with_metrics
from tileloss.torch._results import results_of


def policy_options(
    options: Mapping[str, Value], target: Value, advantages: Value
) -> dict[str, Value]:
    """The options that were given, and how the advantages lie, which their shape says where nothing else does."""
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


# fmt: off
@overload
def policy_loss(
    input: Tensor, target: Tensor, advantages: Tensor, *,
    return_metrics: Literal[False] = ..., grad_in_forward: bool | None = ..., inplace_backward: bool = ...,
    **options: Unpack[PolicyLossArguments[Tensor]],
) -> Tensor: ...
@overload
def policy_loss(
    input: Tensor, target: Tensor, advantages: Tensor, *,
    return_metrics: Literal[True], grad_in_forward: bool | None = ..., inplace_backward: bool = ...,
    **options: Unpack[PolicyLossArguments[Tensor]],
) -> tuple[Tensor, dict[str, Tensor]]: ...
# fmt: on
@explains_names
def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    return_metrics: bool = False,
    grad_in_forward: bool | None = None,
    inplace_backward: bool = False,
    **options: Unpack[PolicyLossArguments[Tensor]],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """A policy loss of the GRPO family: with rho = exp(logp - old_logp), A the advantage, for each token

        l * (off-policy mask) * (entropy mask) * (sampler ratio) + beta KL - entropy_coef H,

    aggregated over sequences and tokens. docs/users/losses.md has every formula; each agrees with TRL's, Liger's or verl's.

    Args:
        input: logits, [B, T, V], or [N, V] with ``sequence_offsets``; float32, bfloat16 or float16, on the CPU or a CUDA device.
            Position t holds the prediction of target[:, t] (shift before the call: ``logits[:, :-1]`` is not copied).
        target: the tokens sampled, [B, T] or [N], int64, int32 or uint8.
        advantages: [B] or [B, 1] of a sequence, or of target's shape. For [N] tokens with one advantage a token say
            ``advantage_level="token"``. Not differentiated: one that requires a gradient is refused while gradients are
            recorded.
        return_metrics: also return a dict of 0-d tensors: kl, entropy, clip_fraction, ratio_mean, ... (NaN: does not apply).
        grad_in_forward, inplace_backward: as `tileloss.torch.cross_entropy`, with its defaults.

    Tensors that go with the tokens, [...] being target's shape, constants as the advantages; old_logp is the sampling policy's:
        mask: [...] or flat [N], any numbers; rows with 0 are neither read nor counted; default: all count.
        sequence_offsets: [B+1], integers; sequence b is rows offsets[b] to offsets[b+1], 0 first, N last.
        old_logp: [...] or flat [N], converted to float32; absent: the new logp itself, detached (rho = 1, with gradient).
        ref_logp: [...] or flat [N], converted to float32; of the reference model; of NaN here or in old_logp:
            docs/users/losses.md.
        sampler_logp: [...] or flat [N], converted to float32; of the engine that sampled the tokens; NaN: no difference.
        allowed: [..., W] or [W], int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all
            are allowed.

    Options, each None for its default or the preset's; a Number may be a tensor of one element, which is not differentiated:
        preset: grpo, bnpo, dr_grpo, dapo, cispo, sapo, gspo, luspo, vespo, reinforce: a method's name, which sets these; an
            option that is given overrides it; dapo and bnpo are one until num_items is given: DAPO's mean is over the tokens of
            the whole step, BNPO's over those of this call, so without num_items a step of several micro-batches or devices is
            not DAPO.
        logit_scale: multiplies the logits; > 0; default 1.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0.
        temperature: T, divides the logits; > 0; default 1.
        temperature_on: what T divides: the logits, or the log-probabilities that the softmax gives at T = 1; one of logits,
            logprob; default logits.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid.
        ignore_index: rows with this label are neither read nor counted; default -100.
        kind: the objective l; one of clip, cispo, sapo, vespo, reinforce; default clip.
        ratio_level: sequence: rho_b = exp(mean of log rho over the sequence), as GSPO; one of token, sequence; default token.
        aggregation: how tokens become the loss; one of seq_mean_token_mean, token_mean, seq_mean_token_sum_norm,
            seq_mean_token_sum, sum, none; default seq_mean_token_mean.
        advantage_level: sequence: advantages [B]; token: [N]; one of token, sequence; default as the shape of the advantages
            says.
        cispo_cap: raw: epsilon_high is the cap itself; one_plus: 1 + epsilon_high; one of raw, one_plus; default raw; only with
            kind cispo.
        epsilon_low: rho is clipped at 1 - epsilon_low; >= 0; default 0.2; only with kind clip.
        epsilon_high: clip: and at 1 + epsilon_high; cispo: the cap; >= 0; None: epsilon_low, but cispo requires it; only with
            kind clip or cispo.
        delta: upper bound of rho; > 0; None: off; only with kind clip.
        dual_clip: bounds the loss by -dual_clip A where A < 0; > 1; None: off; only with kind clip.
        cap_low: lower bound of rho; >= 0; None: off; only with kind cispo.
        tau_pos: tau where A > 0; > 0; default 1; only with kind sapo.
        tau_neg: tau elsewhere; > 0; default 1.05; only with kind sapo.
        vespo_k_pos: k where A >= 0; >= 0; default 2; only with kind vespo.
        vespo_lambda_pos: lambda there, floored at 1e-4; >= 0; default 3; only with kind vespo.
        vespo_k_neg: k where A < 0; >= 0; default 3; only with kind vespo.
        vespo_lambda_neg: lambda there, floored at 1e-4; >= 0; default 2; only with kind vespo.
        log_ratio_clamp: clamps log rho of each token to [-x, x]; > 0; None: off.
        sampler_correction: factor r = exp(old_logp - sampler_logp), detached: clamped to [sampler_min, sampler_max], or 0
            outside; one of off, truncate, mask; default off.
        sampler_level: whether r is one token's or its sequence's; one of token, sequence; default token; only with
            sampler_correction truncate or mask.
        sampler_min: lower bound of r, inclusive; >= 0; None: no bound; only with sampler_correction truncate or mask.
        sampler_max: upper bound of r, inclusive; >= 0; None: no bound; only with sampler_correction truncate or mask.
        off_policy_threshold: drops tokens with A < 0 of sequences whose mean (sampler or old logp) - logp exceeds it; None:
            off.
        entropy_quantile: q: keeps tokens whose entropy is at least the (1 - q) quantile; in (0, 1]; None: off.
        entropy_threshold: keeps tokens whose entropy is at least this; not together with entropy_quantile; None: off.
        beta: coefficient of the KL to ref_logp, which it needs; >= 0; default 0.
        kl_estimator: d = ref_logp - logp: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1; one of k1, k2, k3; default k3.
        kl_importance: multiplies the KL by rho, differentiated; default False.
        kl_log_ratio_clamp: clamps d to [-x, x]; > 0; None: off.
        kl_clamp: clamps the KL to [-x, x]; > 0; None: off.
        entropy_coef: adds -entropy_coef * H; default 0.
        entropy_reduction: token_mean: the mean H of the tokens that the entropy mask keeps; as_loss: H inside each token's
            loss; one of token_mean, as_loss; default token_mean.
        num_items: the denominator, not floored; >= 0; None: the tokens are counted, sum divides by 1; only with aggregation
            token_mean or sum.
        max_length: L_max; >= 1; None: sequence_length; only with aggregation seq_mean_token_sum_norm.

    Values of kind, and l of a token:
        clip: -min(min(rho, delta) A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A), also with dual_clip.
        cispo: -stop(clip(rho, cap_low, cap)) A logp.
        sapo: -(4 / tau) sigmoid(tau (rho - 1)) A.
        vespo: -stop(phi) A logp, phi a gamma weight of the sequence's ratio.
        reinforce: -A logp.

    Values of aggregation, n_b tokens in use of sequence b, M in all, and B sequences, empty ones included:
        seq_mean_token_mean: mean over the sequences of (sum l / n_b).
        token_mean: sum l / M, or / num_items when given.
        seq_mean_token_sum_norm: sum l / (B max_length).
        seq_mean_token_sum: mean over the sequences of sum l.
        sum: sum l / num_items (default 1).
        none: one l a row.

    Returns:
        float32: a scalar, or target's shape with aggregation "none"; with return_metrics a pair.

    Raises:
        As `tileloss.torch.cross_entropy`.
    """
    given: dict[str, Any] = {"labels": target, "advantages": advantages, **options}
    student = checked_logits, (input,)
    return _policy_loss(student, given, return_metrics, grad_in_forward, inplace_backward)


# fmt: off
@overload
def linear_policy_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *, linear_bias: Tensor | None = ...,
    low_rank: tuple[Tensor, Tensor] | None = ..., return_metrics: Literal[False] = ..., compute_dtype: torch.dtype | None = ...,
    workspace_bytes: int | None = ..., linear_weight_grad: Tensor | None = ..., grad_in_forward: bool | None = ...,
    **options: Unpack[PolicyLossArguments[Tensor]],
) -> Tensor: ...
@overload
def linear_policy_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *, linear_bias: Tensor | None = ...,
    low_rank: tuple[Tensor, Tensor] | None = ..., return_metrics: Literal[True], compute_dtype: torch.dtype | None = ...,
    workspace_bytes: int | None = ..., linear_weight_grad: Tensor | None = ..., grad_in_forward: bool | None = ...,
    **options: Unpack[PolicyLossArguments[Tensor]],
) -> tuple[Tensor, dict[str, Tensor]]: ...
# fmt: on
@explains_names
def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    return_metrics: bool = False,
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    grad_in_forward: bool | None = None,
    **options: Unpack[PolicyLossArguments[Tensor]],
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """`policy_loss` of the logits input @ linear_weight.T + linear_bias, which are never held.

    Args: the head's as `tileloss.torch.linear_cross_entropy`, the loss's as `policy_loss`; [B, T, H] hidden states go with [B, T]
    tokens. Tokens that are masked or ignored cost nothing. ``grad_in_forward`` None is True here, as that saves a product, but
    False where a float16 tensor asks for its gradient.
    """
    given: dict[str, Any] = {"labels": target, "advantages": advantages, **options}
    head = operands(
        linear_weight, linear_bias, low_rank, compute_dtype, workspace_bytes, linear_weight_grad
    )
    return _policy_loss((checked_head, (input, *head)), given, return_metrics, grad_in_forward)


def _policy_loss(
    student: Unchecked, given: dict[str, Any], return_metrics: bool, *how: Any
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """``how``: grad_in_forward and, from logits, inplace_backward."""
    check_flag("return_metrics", return_metrics)
    preset, outputs = given.pop("preset", None) or "", ("metrics",) if return_metrics else ()
    given = policy_options(given, given["labels"], given["advantages"])
    results = results_of("policy_loss", student, given, outputs, *how, preset=preset)
    return with_metrics(results, return_metrics)
