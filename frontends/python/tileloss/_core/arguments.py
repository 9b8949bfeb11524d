"""What the public functions take by keyword besides arguments of their own: options, and tensors that may go with the rows.

A function says ``**options: Unpack[CrossEntropyArguments[Tensor]]``: type checkers know them from that, and `explains_names`
makes its signature of it. Modules, which get the tensors and num_items with each call, are made with the options alone.
"""

from __future__ import annotations

from typing import Generic, TypedDict, TypeVar

Array = TypeVar("Array")  # of a framework


class _Mean(TypedDict, Generic[Array], total=False):
    """Of functions that reduce their rows: the denominator, which is each call's own."""

    num_items: float | Array | None


class LogprobsArguments(TypedDict, Generic[Array], total=False):
    # generated: row_inputs of logprobs
    allowed: Array | None
    # end of generated
    # generated: options of logprobs but ignore_index
    logit_scale: float
    softcap: float
    temperature: float | Array
    temperature_on: str
    valid_vocab: int | None
    # end of generated


class CrossEntropyOptions(TypedDict, Generic[Array], total=False):
    # generated: options of cross_entropy but ignore_index, num_items
    logit_scale: float
    softcap: float
    temperature: float | Array
    temperature_on: str
    valid_vocab: int | None
    label_smoothing: float
    z_loss: float
    reduction: str
    # end of generated


class CrossEntropyArguments(CrossEntropyOptions[Array], _Mean[Array], total=False):
    # generated: row_inputs of cross_entropy
    mask: Array | None
    token_weights: Array | None
    allowed: Array | None
    # end of generated


class PolicyLossOptions(TypedDict, Generic[Array], total=False):
    # generated: options of policy_loss but num_items
    logit_scale: float | None
    softcap: float | None
    temperature: float | Array | None
    temperature_on: str | None
    valid_vocab: int | None
    ignore_index: int | None
    kind: str | None
    ratio_level: str | None
    aggregation: str | None
    advantage_level: str | None
    cispo_cap: str | None
    epsilon_low: float | Array | None
    epsilon_high: float | Array | None
    delta: float | Array | None
    dual_clip: float | Array | None
    cap_low: float | Array | None
    tau_pos: float | None
    tau_neg: float | None
    vespo_k_pos: float | None
    vespo_lambda_pos: float | None
    vespo_k_neg: float | None
    vespo_lambda_neg: float | None
    log_ratio_clamp: float | None
    sampler_correction: str | None
    sampler_level: str | None
    sampler_min: float | None
    sampler_max: float | None
    off_policy_threshold: float | None
    entropy_quantile: float | None
    entropy_threshold: float | Array | None
    beta: float | Array | None
    kl_estimator: str | None
    kl_importance: bool | None
    kl_log_ratio_clamp: float | None
    kl_clamp: float | None
    entropy_coef: float | Array | None
    entropy_reduction: str | None
    max_length: int | None
    # end of generated


class PolicyLossArguments(PolicyLossOptions[Array], _Mean[Array], total=False):
    # generated: row_inputs of policy_loss
    mask: Array | None
    sequence_offsets: Array | None
    old_logp: Array | None
    ref_logp: Array | None
    sampler_logp: Array | None
    allowed: Array | None
    preset: str | None
    # end of generated


class DistillationOptions(TypedDict, Generic[Array], total=False):
    # generated: options of distillation but num_items
    logit_scale: float
    softcap: float
    temperature: float | Array
    valid_vocab: int | None
    ignore_index: int
    divergence: str
    reduction: str
    beta: float
    label_weight: float | Array
    divergence_weight: float | Array
    label_temperature: float | Array | None
    teacher_logit_scale: float | None
    teacher_softcap: float | None
    teacher_temperature: float | Array | None
    scale_by_temperature_squared: bool
    # end of generated


class DistillationArguments(DistillationOptions[Array], _Mean[Array], total=False):
    # generated: row_inputs of distillation
    mask: Array | None
    token_weights: Array | None
    allowed: Array | None
    # end of generated


class SparseDistillationOptions(TypedDict, Generic[Array], total=False):
    # generated: options of sparse_distillation but num_items
    logit_scale: float
    softcap: float
    temperature: float | Array
    valid_vocab: int | None
    ignore_index: int
    divergence: str
    reduction: str
    beta: float
    label_weight: float | Array
    divergence_weight: float | Array
    label_temperature: float | Array | None
    scale_by_temperature_squared: bool
    tail: str
    # end of generated


class SparseDistillationArguments(SparseDistillationOptions[Array], _Mean[Array], total=False):
    # generated: row_inputs of sparse_distillation
    mask: Array | None
    token_weights: Array | None
    allowed: Array | None
    # end of generated
