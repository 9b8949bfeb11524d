"""Distillation: how far a student's distribution over the vocabulary lies from a teacher's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from tileloss._core.arguments import DistillationArguments
from tileloss._core.other_names import explains_names
from tileloss.torch._arguments import Unchecked, Value, checked_logits
from tileloss.torch._head import checked_head, operands
from tileloss.torch._outputs import DistillationRows, checked_outputs, with_rows
from tileloss.torch._results import results_of


@explains_names
def distillation(
    input: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    outputs: Iterable[str] = (),
    grad_in_forward: bool | None = None,
    inplace_backward: bool = False,
    **options: Unpack[DistillationArguments[Tensor]],
) -> Tensor | tuple[Tensor, DistillationRows]:
    """Divergence of the student's distribution p from the teacher's q, alone or mixed with the cross-entropy of labels.

    With z = softcap(logit_scale * x) / temperature and p = softmax(z), q likewise of the teacher's logits, a row's loss is

        w_i [label_weight (-log p_y) + divergence_weight s D_i],  s = 1, or T^2 with scale_by_temperature_squared

    Values of divergence, D (jsd is TRL's generalised JSD, whose ends beta = 0 and 1 are forward_kl and reverse_kl here):
        forward_kl: sum q (log q - log p).
        reverse_kl: sum p (log p - log q).
        jsd: m = beta q + (1-beta) p: beta sum q (log q - log m) + (1-beta) sum p (log p - log m).
        jeffreys: forward + reverse.
        skew_forward_kl: m = beta q + (1-beta) p: sum q (log q - log m).
        skew_reverse_kl: m = beta p + (1-beta) q: sum p (log p - log m).
        total_variation: sum |p - q| / 2.

    Args:
        input: the student's logits, [..., V] float32, bfloat16 or float16, on the CPU or a CUDA device.
        teacher: the teacher's logits, of the same shape and dtype. They have no gradient.
        target: labels, [...] int64, int32 or uint8; needed where label_weight is not 0. Rows with ``ignore_index`` are not read.
        outputs: names of `DistillationRows`: what else to return of each row.
        grad_in_forward: compute the gradient together with the loss (scalar losses). Default None: True, as a backward of its
            own makes all of the forward's sums again; but False for float16, which AMP's scale would reach too late, and with
            ``inplace_backward``.
        inplace_backward: as `cross_entropy`: the backward writes the gradient over ``input``; with ``grad_in_forward=True``,
            which is faster, the forward already does.

    Tensors that go with the rows, None for the default:
        mask: [...] or flat [N], any numbers; rows with 0 are neither read nor counted; default: all count.
        token_weights: [...] or flat [N], converted to float32; w_i; default 1.
        allowed: [..., W] or [W], int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all
            are allowed.

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
        teacher_logit_scale: as logit_scale, of the teacher; > 0; None: the student's.
        teacher_softcap: as softcap, of the teacher; 0 is off; >= 0; None: the student's.
        teacher_temperature: as temperature, of the teacher; > 0; None: the student's.
        num_items: mean's denominator; >= 0; None: the weights are summed; only with reduction mean.
        scale_by_temperature_squared: the divergence is multiplied by the temperature squared, as some recipes do; default
            False.

    What is not said here is as in `cross_entropy`.

    Returns:
        float32: a scalar, or [...] with reduction "none"; with ``outputs``, (loss, DistillationRows).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
        IndexError: a label outside [0, valid_vocab), naming it and its row; on a CUDA device `check_errors` raises it.
        NotImplementedError: an input that is neither on the CPU nor on a CUDA device.
    """
    given: dict[str, Any] = {"teacher_logits": teacher, "labels": target, **options}
    student = checked_logits, (input,)
    return loss_and_rows("distillation", student, given, outputs, grad_in_forward, inplace_backward)


@explains_names
def linear_distillation(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    teacher_bias: Tensor | None = None,
    outputs: Iterable[str] = (),
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    grad_in_forward: bool | None = None,
    **options: Unpack[DistillationArguments[Tensor]],
) -> Tensor | tuple[Tensor, DistillationRows]:
    """`distillation` of the logits input @ linear_weight.T + linear_bias from teacher_input @ teacher_weight.T + teacher_bias.

    Neither side's logits are held but for some rows at a time.

    Args:
        input: the student's hidden states, [..., H] float32, bfloat16 or float16, on the CPU or a CUDA device.
        linear_weight: its LM head, [V, H] float32, bfloat16 or float16; any strides that do not overlap.
        teacher_input: the teacher's hidden states, [..., G]: the same leading dimensions, a width and a dtype of their own.
        teacher_weight: its LM head, [V, G].
        target: labels, [...]; needed where label_weight is not 0.
        linear_bias, teacher_bias: [V].
        compute_dtype: what the products of both sides see, torch.bfloat16 or torch.float32; sums are float32 either way.
            Default: autocast's dtype inside `torch.autocast`, else bfloat16 if both inputs and both weights are that, else
            float32.
        workspace_bytes: a cap on scratch memory; a ValueError names the least that would do. Default: docs/users/memory.md.
        linear_weight_grad: as `linear_cross_entropy`'s.
        grad_in_forward: compute the gradients together with the loss: four products. Without it, or with reduction "none",
            the backward makes both sides' logits again: six. Default None: True, but False where a float16 tensor asks for its
            gradient.

    The other arguments, the result and the errors: `distillation`. Gradients have their tensors' dtypes and are given for those
    of input, linear_weight and linear_bias that ask for them; the teacher has none.
    """
    given: dict[str, Any] = {
        "teacher_hidden": teacher_input,
        "teacher_head": teacher_weight,
        "teacher_bias": teacher_bias,
        "labels": target,
        **options,
    }
    head = operands(
        linear_weight, linear_bias, low_rank, compute_dtype, workspace_bytes, linear_weight_grad
    )
    student = checked_head, (input, *head)
    return loss_and_rows("distillation", student, given, outputs, grad_in_forward)


def loss_and_rows(
    function: str,
    student: Unchecked,
    given: Mapping[str, Value],
    outputs: Iterable[str],
    *how: Any,
) -> Tensor | tuple[Tensor, DistillationRows]:
    """``how``: grad_in_forward and, from logits, inplace_backward."""
    names = checked_outputs(DistillationRows, outputs)
    results = results_of(function, student, given, names, *how)
    return with_rows(results, names)
