"""TRL's divergences of a student from a teacher, on `tileloss.torch.distillation` and `linear_distillation`.

TRL's `beta`, which the self-distilling trainers call `distillation_alpha`, is the teacher's share of the mixture: 0 is
KL(teacher || student), 1 is KL(student || teacher).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tileloss.integrations._trl_checks import compute_dtype, refuse_other_devices, refuse_zero3
from tileloss.torch import DistillationRows, distillation, linear_distillation

Function = Callable[..., Any]


def generalized_jsd(own: Function) -> Function:
    """Stands in for a trainer's `generalized_jsd_loss`, with its parameters.

    TRL's own is called for probabilities in place of logits (`logits_are_probs`), for a support of the `top_k` tokens, and for a
    reduction other than batchmean, sum and mean, which gives an element for each token of the vocabulary.

    Returns:
        float32, a scalar, also where TRL gives bfloat16.

    Raises:
        NotImplementedError: logits that are neither on the CPU nor on a CUDA device. TypeError: logits in float64.
        IndexError: a label that is neither -100 nor a column.
        ValueError: a beta outside of [0, 1], vocabularies of two sizes, or a teacher's logits that require a gradient.
    """
    signature = inspect.signature(own)

    @functools.wraps(own)
    def generalized_jsd_loss(*args: Any, **kwargs: Any) -> Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if not _is_of_whole_distributions(given):
            return own(*args, **kwargs)
        student, labels = given["student_logits"], given["labels"]
        return _divergence(
            student,
            given["teacher_logits"],
            given["beta"],
            target=labels,
            temperature=given["temperature"],
            **_reduction(given["reduction"], given["num_items_in_batch"], student, labels),
        )

    return generalized_jsd_loss


def self_distillation(own: Function) -> Function:
    """Stands in for `compute_full_logit_self_distillation_loss`: the divergence of each row, [B, T], not reduced."""

    @functools.wraps(own)
    def compute_full_logit_self_distillation_loss(
        student_logits: Tensor, teacher_logits: Tensor, *, distillation_alpha: float
    ) -> Tensor:
        return _divergence(student_logits, teacher_logits, distillation_alpha, reduction="none")

    return compute_full_logit_self_distillation_loss


def divergence_of_heads(own: Function) -> Function:
    """Stands in for DistillationTrainer's `_chunked_divergence_loss`, with its parameters.

    Both products are computed in one type: bfloat16 where TRL computes both in that, else float32. FSDP2's DTensors may stay as
    they are.

    Returns:
        The loss, float32; the sum of the student's entropies; how many rows the mask has. A scalar each.

    Raises:
        NotImplementedError: hidden states that are neither on the CPU nor on a CUDA device, or heads that ZeRO-3 partitions.
        TypeError: hidden states or heads in float64.
        ValueError: a beta outside of [0, 1], a logit scale that is not above 0, vocabularies of two sizes, or a teacher's hidden
            states that require a gradient.
    """

    @functools.wraps(own)
    def _chunked_divergence_loss(
        student_hidden_states: Tensor,
        teacher_hidden_states: Tensor,
        student_lm_head_weight: Tensor,
        teacher_lm_head_weight: Tensor,
        completion_mask: Tensor,
        beta: float,
        num_items_in_batch: Tensor | float | None = None,
        student_lm_head_bias: Tensor | None = None,
        teacher_lm_head_bias: Tensor | None = None,
        student_logit_scale: float = 1.0,
        teacher_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_final_logit_softcapping: float | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        refuse_other_devices("a student's hidden states", student_hidden_states)
        refuse_other_devices("a teacher's hidden states", teacher_hidden_states)
        refuse_zero3(student_lm_head_weight, teacher_lm_head_weight)
        is_used = completion_mask != 0
        loss, rows = linear_distillation(
            student_hidden_states,
            student_lm_head_weight,
            teacher_hidden_states,
            teacher_lm_head_weight,
            linear_bias=student_lm_head_bias,
            teacher_bias=teacher_lm_head_bias,
            mask=is_used,
            num_items=num_items_in_batch,
            logit_scale=student_logit_scale,
            softcap=student_final_logit_softcapping or 0.0,
            temperature=temperature,
            teacher_logit_scale=teacher_logit_scale,
            teacher_softcap=teacher_final_logit_softcapping or 0.0,
            outputs=("entropy",),
            compute_dtype=torch.promote_types(
                compute_dtype(student_hidden_states), compute_dtype(teacher_hidden_states)
            ),
            **_divergence_options(beta),
        )
        assert isinstance(rows, DistillationRows) and rows.entropy is not None
        return loss, rows.entropy.sum(), is_used.sum()  # a row that is not used has the entropy 0

    return _chunked_divergence_loss


def _is_of_whole_distributions(given: dict[str, Any]) -> bool:
    if given.get("logits_are_probs", False):
        return False
    if 0 < given.get("top_k", 0) < given["student_logits"].shape[-1]:
        return False
    has_count = given["num_items_in_batch"] is not None  # then TRL sums, whatever the reduction
    return has_count or given["reduction"] in ("batchmean", "sum", "mean")


def _reduction(
    name: str, num_items: Tensor | float | None, student: Tensor, labels: Tensor | None
) -> dict[str, Any]:
    """TRL's reduction as ours. Its batchmean is by the labels that count, or without labels by the sequences; its mean is by the
    elements of [rows, V]."""
    if num_items is not None:
        return {"num_items": num_items}
    if name == "sum":
        return {"reduction": "sum"}
    if name == "batchmean":
        return {} if labels is not None else {"num_items": max(student.shape[0], 1)}
    rows = student[..., 0].numel() if labels is None else (labels != -100).sum()
    return {"num_items": rows * student.shape[-1]}


def _divergence_options(beta: float) -> dict[str, Any]:
    kind = "forward_kl" if beta == 0 else "reverse_kl" if beta == 1 else None
    return {"divergence": kind or "jsd", "beta": 0.5 if kind else beta}


def _divergence(student: Tensor, teacher: Tensor, beta: float, **options: Any) -> Tensor:
    for what, logits in (("a student's logits", student), ("a teacher's logits", teacher)):
        refuse_other_devices(what, logits)
    dtype = torch.promote_types(student.dtype, teacher.dtype)  # as TRL's arithmetic does
    loss = distillation(
        student.to(dtype), teacher.to(dtype), **_divergence_options(beta), **options
    )
    assert isinstance(loss, Tensor)
    return loss
