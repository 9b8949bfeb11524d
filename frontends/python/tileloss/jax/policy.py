"""The GRPO family of policy losses, from logits and fused with the LM head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Unpack, overload

import numpy as np
from jax import Array
from jax.typing import DTypeLike

from tileloss._core.arguments import PolicyLossArguments
from tileloss._core.other_names import explains_names
from tileloss.jax._apply import apply
from tileloss.jax._arguments import named


# fmt: off
@overload
def policy_loss(
    logits: Array, labels: Array, advantages: Array, *,
    return_metrics: Literal[False] = ..., grad_in_forward: bool | None = ...,
    implementation: str | Iterable[str] | None = ..., vocab_axis: str | None = ...,
    **options: Unpack[PolicyLossArguments[Array]],
) -> Array: ...
@overload
def policy_loss(
    logits: Array, labels: Array, advantages: Array, *,
    return_metrics: Literal[True], grad_in_forward: bool | None = ...,
    implementation: str | Iterable[str] | None = ..., vocab_axis: str | None = ...,
    **options: Unpack[PolicyLossArguments[Array]],
) -> tuple[Array, dict[str, Array]]: ...
# fmt: on
@explains_names
def policy_loss(
    logits: Array, labels: Array, advantages: Array, *, return_metrics: bool = False, grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None, vocab_axis: str | None = None,
    **options: Unpack[PolicyLossArguments[Array]],
) -> Array | tuple[Array, dict[str, Array]]:  # fmt: skip
    """A policy loss of the GRPO family: with rho = exp(logp - old_logp), A the advantage, for each token

        l * (off-policy mask) * (entropy mask) * (sampler ratio) + beta KL - entropy_coef H,

    aggregated over sequences and tokens. docs/users/losses.md has every formula, option and preset.

    Args:
        logits: [B, T, V], or [N, V] with ``sequence_offsets``; float32, bfloat16 or float16. The only argument that is
            differentiated, in reverse mode. Position t holds the prediction of labels[:, t].
        labels: the tokens sampled, [B, T] or [N] integers.
        advantages: [B] or [B, 1] of a sequence, or of the labels' shape. For [N] tokens with one advantage a token say
            ``advantage_level="token"``.
        return_metrics: also return a dict of float32 scalars: those of kl, entropy, clip_fraction, ... that apply.
        grad_in_forward, implementation, vocab_axis: as `tileloss.jax.cross_entropy`.

    Tensors that go with the tokens, [...] being the labels' shape; old_logp is the sampling policy's:
        mask: [...] or flat [N], any numbers; rows with 0 are neither read nor counted; default: all count.
        sequence_offsets: [B+1], integers; sequence b is rows offsets[b] to offsets[b+1], 0 first, N last.
        old_logp: [...] or flat [N], converted to float32; absent: the new logp itself, detached (rho = 1, with gradient).
        ref_logp: [...] or flat [N], converted to float32; of the reference model; of NaN here or in old_logp:
            docs/users/losses.md.
        sampler_logp: [...] or flat [N], converted to float32; of the engine that sampled the tokens; NaN: no difference.
        allowed: [..., W] or [W], int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all
            are allowed.

    The offsets may be traced: all rows are NaN where traced ones cannot be. Without them the sequences are the batch's rows.

    Options, each None for its default or the preset's; static or traceable as those of `tileloss.jax.cross_entropy`:
        preset: grpo, bnpo, dr_grpo, dapo, cispo, sapo, gspo, luspo, vespo, reinforce: a method's name, which sets these; an
            option that is given overrides it; dapo and bnpo are one until num_items is given: DAPO's mean is over the tokens of
            the whole step, BNPO's over those of this call, so without num_items a step of several micro-batches or devices is
            not DAPO.
        logit_scale: multiplies the logits; > 0; default 1; static.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0; static.
        temperature: T, divides the logits; > 0; default 1; traceable.
        temperature_on: what T divides: the logits, or the log-probabilities that the softmax gives at T = 1; one of logits,
            logprob; default logits; static.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid; static.
        ignore_index: rows with this label are neither read nor counted; default -100; static.
        kind: the objective l; one of clip, cispo, sapo, vespo, reinforce; default clip; static.
        ratio_level: sequence: rho_b = exp(mean of log rho over the sequence), as GSPO; one of token, sequence; default token;
            static.
        aggregation: how tokens become the loss; one of seq_mean_token_mean, token_mean, seq_mean_token_sum_norm,
            seq_mean_token_sum, sum, none; default seq_mean_token_mean; static.
        advantage_level: sequence: advantages [B]; token: [N]; one of token, sequence; default as the shape of the advantages
            says; static.
        cispo_cap: raw: epsilon_high is the cap itself; one_plus: 1 + epsilon_high; one of raw, one_plus; default raw; only with
            kind cispo; static.
        epsilon_low: rho is clipped at 1 - epsilon_low; >= 0; default 0.2; only with kind clip; traceable.
        epsilon_high: clip: and at 1 + epsilon_high; cispo: the cap; >= 0; None: epsilon_low, but cispo requires it; only with
            kind clip or cispo; traceable.
        delta: upper bound of rho; > 0; None: off; only with kind clip; traceable.
        dual_clip: bounds the loss by -dual_clip A where A < 0; > 1; None: off; only with kind clip; traceable.
        cap_low: lower bound of rho; >= 0; None: off; only with kind cispo; traceable.
        tau_pos: tau where A > 0; > 0; default 1; only with kind sapo; static.
        tau_neg: tau elsewhere; > 0; default 1.05; only with kind sapo; static.
        vespo_k_pos: k where A >= 0; >= 0; default 2; only with kind vespo; static.
        vespo_lambda_pos: lambda there, floored at 1e-4; >= 0; default 3; only with kind vespo; static.
        vespo_k_neg: k where A < 0; >= 0; default 3; only with kind vespo; static.
        vespo_lambda_neg: lambda there, floored at 1e-4; >= 0; default 2; only with kind vespo; static.
        log_ratio_clamp: clamps log rho of each token to [-x, x]; > 0; None: off; static.
        sampler_correction: factor r = exp(old_logp - sampler_logp), detached: clamped to [sampler_min, sampler_max], or 0
            outside; one of off, truncate, mask; default off; static.
        sampler_level: whether r is one token's or its sequence's; one of token, sequence; default token; only with
            sampler_correction truncate or mask; static.
        sampler_min: lower bound of r, inclusive; >= 0; None: no bound; only with sampler_correction truncate or mask; static.
        sampler_max: upper bound of r, inclusive; >= 0; None: no bound; only with sampler_correction truncate or mask; static.
        off_policy_threshold: drops tokens with A < 0 of sequences whose mean (sampler or old logp) - logp exceeds it; None:
            off; static.
        entropy_quantile: q: keeps tokens whose entropy is at least the (1 - q) quantile; in (0, 1]; None: off; static.
        entropy_threshold: keeps tokens whose entropy is at least this; not together with entropy_quantile; None: off;
            traceable.
        beta: coefficient of the KL to ref_logp, which it needs; >= 0; default 0; traceable.
        kl_estimator: d = ref_logp - logp: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1; one of k1, k2, k3; default k3; static.
        kl_importance: multiplies the KL by rho, differentiated; default False; static.
        kl_log_ratio_clamp: clamps d to [-x, x]; > 0; None: off; static.
        kl_clamp: clamps the KL to [-x, x]; > 0; None: off; static.
        entropy_coef: adds -entropy_coef * H; default 0; traceable.
        entropy_reduction: token_mean: the mean H of the tokens that the entropy mask keeps; as_loss: H inside each token's
            loss; one of token_mean, as_loss; default token_mean; static.
        num_items: the denominator, not floored; >= 0; None: the tokens are counted, sum divides by 1; only with aggregation
            token_mean or sum; traceable.
        max_length: L_max; >= 1; None: sequence_length; only with aggregation seq_mean_token_sum_norm; static.

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
        float32: a scalar, or the labels' shape with aggregation "none"; with return_metrics a pair.

    Raises:
        As `tileloss.jax.cross_entropy`.
    """
    return _policy_loss(locals())


# fmt: off
@overload
def linear_policy_loss(
    hidden: Array, head: Array, labels: Array, advantages: Array, *, bias: Array | None = ...,
    low_rank: tuple[Array, Array] | None = ..., head_layout: str = ...,
    return_metrics: Literal[False] = ..., compute_dtype: DTypeLike | None = ..., grad_in_forward: bool | None = ...,
    implementation: str | Iterable[str] | None = ..., vocab_axis: str | None = ...,
    **options: Unpack[PolicyLossArguments[Array]],
) -> Array: ...
@overload
def linear_policy_loss(
    hidden: Array, head: Array, labels: Array, advantages: Array, *, bias: Array | None = ...,
    low_rank: tuple[Array, Array] | None = ..., head_layout: str = ...,
    return_metrics: Literal[True], compute_dtype: DTypeLike | None = ..., grad_in_forward: bool | None = ...,
    implementation: str | Iterable[str] | None = ..., vocab_axis: str | None = ...,
    **options: Unpack[PolicyLossArguments[Array]],
) -> tuple[Array, dict[str, Array]]: ...
# fmt: on
@explains_names
def linear_policy_loss(
    hidden: Array, head: Array, labels: Array, advantages: Array, *, bias: Array | None = None,
    low_rank: tuple[Array, Array] | None = None, head_layout: str = "HV",
    return_metrics: bool = False, compute_dtype: DTypeLike | None = None, grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None, vocab_axis: str | None = None,
    **options: Unpack[PolicyLossArguments[Array]],
) -> Array | tuple[Array, dict[str, Array]]:  # fmt: skip
    """`policy_loss` of the logits hidden @ head + bias, which are never held: they exist a tile of columns at a time.

    Args: the head's as `tileloss.jax.linear_cross_entropy`, the loss's as `policy_loss`; [B, T, H] hidden states go with [B, T]
    tokens. Tokens that are masked or ignored may hold NaN.
    """
    return _policy_loss(locals())


def _policy_loss(arguments: dict[str, Any]) -> Array | tuple[Array, dict[str, Array]]:
    operand, given = named(arguments)
    if given.get("advantage_level") is None:
        # [B, 1] of [B, 1] labels: either. numpy's shape, as JAX refuses None before `apply` can say what is missing.
        of_labels, shape = np.shape(given["labels"]), np.shape(given["advantages"])
        is_token = len(of_labels) > 1 and shape == of_labels
        given["advantage_level"] = "token" if is_token else "sequence"
    found = apply("policy_loss", operand, **given)
    return (found["loss"], found["metrics"]) if "metrics" in found else found["loss"]
