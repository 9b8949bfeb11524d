"""The GRPO family of policy losses, from logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, overload

import jax.numpy as jnp
from jax import Array

from tileloss._core.functions import FUNCTIONS, check_option_names, lists_options
from tileloss.jax._apply import loss_of
from tileloss.jax._sweeps.operands import Logits


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
    implementation: str | Iterable[str] | None = ...,
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
    implementation: str | Iterable[str] | None = ...,
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
    implementation: str | Iterable[str] | None = None,
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
        sequence_offsets: [S+1] integers, may be traced: sequence b is rows offsets[b] to offsets[b+1]. Default: the batch's rows.
        preset: a kind, a ratio level and an aggregation by the name of the method, on top of which options apply.
        return_metrics: also return a dict of float32 scalars: kl, entropy, clip_fraction, ratio_mean, ... (NaN: does not apply).
        implementation: as `tileloss.jax.cross_entropy`.
        **options: by their names in docs/users/losses.md; absent or None: the default, or the preset's. Those that change from
            step to step (temperature, num_items, epsilon_low, beta, ...) may be arrays of one element, traced or not.

    Returns:
        float32: a scalar, or the labels' shape with aggregation "none"; with return_metrics a pair.

    Raises:
        As `tileloss.jax.cross_entropy`.
    """
    check_option_names("policy_loss", options)
    advantages = jnp.asarray(advantages)
    if options.get("advantage_level") is None:
        # [B, 1] of [B, 1] labels: either.
        per_token = jnp.ndim(labels) > 1 and advantages.shape == jnp.shape(labels)
        options["advantage_level"] = "token" if per_token else "sequence"
    vectors = {
        "mask": mask,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "sampler_logp": sampler_logp,
        "advantages": advantages,
        "sequence_offsets": sequence_offsets,
    }
    loss, metrics = loss_of(
        "policy_loss",
        Logits(logits),
        labels,
        vectors,
        options,
        preset=preset or "",
        wants_metrics=return_metrics,
        implementation=implementation,
    )
    if metrics is None:
        return loss
    return loss, dict(zip(FUNCTIONS["policy_loss"].metrics, metrics, strict=True))
