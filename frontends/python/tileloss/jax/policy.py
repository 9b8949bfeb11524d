"""The GRPO family of policy losses, from logits and fused with the LM head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal, overload

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tileloss._core.functions import FUNCTIONS, check_option_names, lists_options
from tileloss.jax._apply import loss_of
from tileloss.jax._differentiated import with_results_checked
from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec


@overload
def policy_loss(
    logits: Array,
    labels: Array,
    advantages: Array,
    *,
    mask: Array | None = ...,
    old_logp: Array | None = ...,
    ref_logp: Array | None = ...,
    sampler_logp: Array | None = ...,
    sequence_offsets: Array | None = ...,
    preset: str | None = ...,
    return_metrics: Literal[False] = ...,
    grad_in_forward: bool | None = ...,
    implementation: str | Iterable[str] | None = ...,
    vocab_axis: str | None = ...,
    **options: Any,
) -> Array: ...


@overload
def policy_loss(
    logits: Array,
    labels: Array,
    advantages: Array,
    *,
    mask: Array | None = ...,
    old_logp: Array | None = ...,
    ref_logp: Array | None = ...,
    sampler_logp: Array | None = ...,
    sequence_offsets: Array | None = ...,
    preset: str | None = ...,
    return_metrics: Literal[True],
    grad_in_forward: bool | None = ...,
    implementation: str | Iterable[str] | None = ...,
    vocab_axis: str | None = ...,
    **options: Any,
) -> tuple[Array, dict[str, Array]]: ...


@lists_options
def policy_loss(
    logits: Array,
    labels: Array,
    advantages: Array,
    *,
    mask: Array | None = None,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    sampler_logp: Array | None = None,
    sequence_offsets: Array | None = None,
    preset: str | None = None,
    return_metrics: bool = False,
    grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None,
    vocab_axis: str | None = None,
    **options: Any,
) -> Array | tuple[Array, dict[str, Array]]:
    """A policy loss of the GRPO family: with rho = exp(logp - old_logp), A the advantage, for each token

        l * (off-policy mask) * (entropy mask) * (sampler ratio) + beta KL - entropy_coef H,

    aggregated over sequences and tokens. docs/users/losses.md has every formula, option and preset.

    Args:
        logits: [B, T, V], or [N, V] with ``sequence_offsets``; float32, bfloat16 or float16. The only argument that is
            differentiated, in reverse mode. Position t holds the prediction of labels[:, t].
        labels: the tokens sampled, [B, T] or [N] integers.
        advantages: [B] or [B, 1] of a sequence, or of the labels' shape. For [N] tokens with one advantage a token say
            ``advantage_level="token"``.
        mask: of the labels' shape or flat [N]: tokens with 0 are neither read nor counted.
        old_logp, ref_logp, sampler_logp: of the labels' shape or flat [N], of the policy that sampled, the reference model, and
            the engine that sampled. Without old_logp the new logp stands in, so rho = 1 with a gradient.
        sequence_offsets: [S+1] integers, may be traced: sequence b is rows offsets[b] to offsets[b+1], 0 first, N last; all rows
            are NaN where traced ones cannot be. Default: the batch's rows.
        preset: a kind, a ratio level and an aggregation by the name of the method, on top of which options apply.
        return_metrics: also return a dict of float32 scalars: kl, entropy, clip_fraction, ratio_mean, ... (NaN: does not apply).
        grad_in_forward, implementation, vocab_axis: as `tileloss.jax.cross_entropy`.
        **options: by their names in docs/users/losses.md; absent or None: the default, or the preset's. Those that change from
            step to step (temperature, num_items, epsilon_low, beta, ...) may be arrays of one element, traced or not.

    Returns:
        float32: a scalar, or the labels' shape with aggregation "none"; with return_metrics a pair.

    Raises:
        As `tileloss.jax.cross_entropy`.
    """
    return _policy_loss(
        "policy_loss",
        Logits(logits),
        labels,
        advantages,
        {
            "mask": mask,
            "old_logp": old_logp,
            "ref_logp": ref_logp,
            "sampler_logp": sampler_logp,
            "sequence_offsets": sequence_offsets,
        },
        options,
        preset=preset,
        return_metrics=return_metrics,
        grad_in_forward=grad_in_forward,
        implementation=implementation,
        vocab_axis=vocab_axis,
    )


@overload
def linear_policy_loss(
    hidden: Array,
    head: Array,
    labels: Array,
    advantages: Array,
    *,
    bias: Array | None = ...,
    head_layout: str = ...,
    mask: Array | None = ...,
    old_logp: Array | None = ...,
    ref_logp: Array | None = ...,
    sampler_logp: Array | None = ...,
    sequence_offsets: Array | None = ...,
    preset: str | None = ...,
    return_metrics: Literal[False] = ...,
    compute_dtype: DTypeLike | None = ...,
    grad_in_forward: bool | None = ...,
    implementation: str | Iterable[str] | None = ...,
    vocab_axis: str | None = ...,
    **options: Any,
) -> Array: ...


@overload
def linear_policy_loss(
    hidden: Array,
    head: Array,
    labels: Array,
    advantages: Array,
    *,
    bias: Array | None = ...,
    head_layout: str = ...,
    mask: Array | None = ...,
    old_logp: Array | None = ...,
    ref_logp: Array | None = ...,
    sampler_logp: Array | None = ...,
    sequence_offsets: Array | None = ...,
    preset: str | None = ...,
    return_metrics: Literal[True],
    compute_dtype: DTypeLike | None = ...,
    grad_in_forward: bool | None = ...,
    implementation: str | Iterable[str] | None = ...,
    vocab_axis: str | None = ...,
    **options: Any,
) -> tuple[Array, dict[str, Array]]: ...


@lists_options
def linear_policy_loss(
    hidden: Array,
    head: Array,
    labels: Array,
    advantages: Array,
    *,
    bias: Array | None = None,
    head_layout: str = "HV",
    mask: Array | None = None,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    sampler_logp: Array | None = None,
    sequence_offsets: Array | None = None,
    preset: str | None = None,
    return_metrics: bool = False,
    compute_dtype: DTypeLike | None = None,
    grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None,
    vocab_axis: str | None = None,
    **options: Any,
) -> Array | tuple[Array, dict[str, Array]]:
    """`policy_loss` of the logits hidden @ head + bias, which are never held: they exist a tile of columns at a time.

    Args: the head's as `tileloss.jax.linear_cross_entropy`, the loss's as `policy_loss`; [B, T, H] hidden states go with [B, T]
    tokens. Tokens that are masked or ignored may hold NaN.
    """
    return _policy_loss(
        "linear_policy_loss",
        LmHead(hidden, head, bias),
        labels,
        advantages,
        {
            "mask": mask,
            "old_logp": old_logp,
            "ref_logp": ref_logp,
            "sampler_logp": sampler_logp,
            "sequence_offsets": sequence_offsets,
        },
        options,
        preset=preset,
        return_metrics=return_metrics,
        grad_in_forward=grad_in_forward,
        implementation=implementation,
        vocab_axis=vocab_axis,
        head=Spec(0, head_layout=head_layout, compute_dtype=compute_dtype),
    )


# Metrics may be NaN.
@partial(with_results_checked, results=lambda found: found[0] if type(found) is tuple else found)
def _policy_loss(
    function: str,
    operand: Operand,
    labels: Array,
    advantages: Array,
    vectors: Mapping[str, Array | None],
    options: Mapping[str, Any],
    *,
    preset: str | None,
    return_metrics: bool,
    grad_in_forward: bool | None,
    implementation: str | Iterable[str] | None,
    vocab_axis: str | None,
    head: Spec | None = None,
) -> Array | tuple[Array, dict[str, Array]]:
    check_option_names(function, options)
    advantages, given = jnp.asarray(advantages), dict(options)
    if given.get("advantage_level") is None:
        # [B, 1] of [B, 1] labels: either.
        per_token = jnp.ndim(labels) > 1 and advantages.shape == jnp.shape(labels)
        given["advantage_level"] = "token" if per_token else "sequence"
    loss, metrics = loss_of(
        function,
        operand,
        labels,
        {**vectors, "advantages": advantages},
        given,
        head=head,
        preset=preset or "",
        wants_metrics=return_metrics,
        grad_in_forward=grad_in_forward,
        implementation=implementation,
        vocab_axis=vocab_axis,
    )
    if metrics is None:
        return loss
    return loss, dict(zip(FUNCTIONS[function].metrics, metrics, strict=True))
