"""Distillation from a teacher of which some columns are known, as inference servers hand them out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from tileloss._core.arguments import SparseDistillationArguments
from tileloss._core.other_names import explains_names
from tileloss.torch._arguments import checked_logits
from tileloss.torch._head import checked_head, operands
from tileloss.torch._outputs import DistillationRows
from tileloss.torch.distillation import loss_and_rows


@explains_names
def sparse_distillation(
    input: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    target: Tensor | None = None,
    *,
    outputs: Iterable[str] = (),
    grad_in_forward: bool | None = None,
    inplace_backward: bool = False,
    **options: Unpack[SparseDistillationArguments[Tensor]],
) -> Tensor | tuple[Tensor, DistillationRows]:
    """`distillation` from a teacher of which only K columns of each row are known.

    q is from teacher_logprobs as they are: no temperature, no transform.

    Values of tail, what becomes of the other columns in the divergence:
        lump: as one more class: its q is 1 less the known ones', its p the sum of theirs.
        ignore: not at all: the divergence is a sum over the K columns, and may be negative.
        renormalise: not at all, and both distributions are divided by their sums over the K columns.

    Args:
        input: the student's logits, [..., V] float32, bfloat16 or float16, on the CPU or a CUDA device.
        teacher_ids: [..., K] int64 or int32: distinct columns of each row, in any order; negative: none, so that rows may have
            fewer.
        teacher_logprobs: [..., K] float32, bfloat16 or float16: the logarithms of their probabilities.
        target: labels, [...]; needed where label_weight is not 0. Their cross-entropy is of the whole softmax.

    Options, of which a Number may be a tensor of one element:
        logit_scale: multiplies the logits; > 0; default 1.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0.
        temperature: T, divides the logits; > 0; default 1.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid.
        ignore_index: rows with this label are neither read nor counted; default -100.
        divergence: which distance of p from q; one of forward_kl, reverse_kl, jsd, jeffreys, skew_forward_kl, skew_reverse_kl,
            total_variation; default forward_kl.
        reduction: how the rows' losses become the loss; mean divides by the sum of their weights; one of none, sum, mean;
            default mean.
        beta: the mixture's weight, which takes 0 < beta < 1; in [0, 1]; default 0.5; only with divergence jsd or
            skew_forward_kl or skew_reverse_kl.
        label_weight: of the labels' cross-entropy in the loss; other than 0 it needs labels; >= 0; default 0.
        divergence_weight: of the divergence in the loss; >= 0; default 1.
        label_temperature: the temperature of the cross-entropy and logp, such as 1 where the divergence has 4; > 0; None:
            temperature.
        num_items: mean's denominator; >= 0; None: the weights are summed; only with reduction mean.
        scale_by_temperature_squared: the divergence is multiplied by the temperature squared, as some recipes do; default
            False.
        tail: what becomes of the columns that are not known; one of lump, ignore, renormalise; default lump.

    The other arguments, the result and the errors: `distillation`. An id beyond the valid columns, or one that is there twice
    in a row, is a ValueError that names its place.
    """
    teacher = {"teacher_ids": teacher_ids, "teacher_logprobs": teacher_logprobs}
    given: dict[str, Any] = {**teacher, "labels": target, **options}
    student, how = (checked_logits, (input,)), (grad_in_forward, inplace_backward)
    return loss_and_rows("sparse_distillation", student, given, outputs, *how)


@explains_names
def linear_sparse_distillation(
    input: Tensor,
    linear_weight: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    target: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    outputs: Iterable[str] = (),
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    grad_in_forward: bool | None = None,
    **options: Unpack[SparseDistillationArguments[Tensor]],
) -> Tensor | tuple[Tensor, DistillationRows]:
    """`sparse_distillation` of the logits input @ linear_weight.T + linear_bias, held for some rows at a time alone.

    Arguments: `linear_distillation`, `sparse_distillation`.
    """
    teacher = {"teacher_ids": teacher_ids, "teacher_logprobs": teacher_logprobs}
    given: dict[str, Any] = {**teacher, "labels": target, **options}
    head = operands(
        linear_weight, linear_bias, low_rank, compute_dtype, workspace_bytes, linear_weight_grad
    )
    student = checked_head, (input, *head)
    return loss_and_rows("sparse_distillation", student, given, outputs, grad_in_forward)
