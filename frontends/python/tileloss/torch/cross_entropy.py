"""Cross-entropy and log-probabilities, from logits and fused with the LM head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from tileloss._core.arguments import CrossEntropyArguments, LogprobsArguments
from tileloss._core.functions import OF_PROBABILITIES, options_of_probabilities
from tileloss._core.other_names import explains_names
from tileloss.torch._arguments import (
    Unchecked,
    Value,
    checked_logits,
    empty_slots,
    is_probabilities,
)
from tileloss.torch._head import checked_head, operands
from tileloss.torch._outputs import RowOutputs, checked_outputs, rows_of
from tileloss.torch._results import results_of


def _rows(
    student: Unchecked,
    given: dict[str, Value],
    outputs: Iterable[str],
    inplace_backward: bool = False,
) -> RowOutputs:
    """Of `logprobs`, whichever the student is."""
    names = checked_outputs(RowOutputs, outputs)
    slots = empty_slots(given["labels"], student[1][0], given["ignore_index"])
    if slots is not None:
        given["labels"] = slots
    results = results_of("logprobs", student, given, names, inplace_backward=inplace_backward)
    return rows_of(RowOutputs, results, names, has_labels=slots is None)


@explains_names
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    grad_in_forward: bool | None = None,
    inplace_backward: bool = False,
    ignore_index: int = -100,
    **options: Unpack[CrossEntropyArguments[Tensor]],
) -> Tensor:
    """Cross-entropy of logits and labels, as `torch.nn.functional.cross_entropy` on the flattened leading dimensions.

    Class probabilities q, [..., V] of a float type, may stand for the labels, as in PyTorch: a row's loss is then
    w_i sum_j c_j ((1-s) q_j + s/V) (-log p_j), and mean divides by the sum of w_i. They need not sum to 1 and have no gradient;
    z_loss and ignore_index do not go with them, and grad_in_forward is True by default, as `distillation`'s.

    With z = softcap(logit_scale * x) / temperature and p = softmax(z), a row's loss is

        w_i [(1-s) c_y (-log p_y) + (s/V) sum_j c_j (-log p_j)] + z_loss w_i lse^2

    (PyTorch's label smoothing s and class weights c; z-loss as PaLM's and Liger's.) ``reduction="mean"`` divides the first part
    by the sum of w_i c_y and the second by the sum of w_i over the rows that are not ignored, both by ``num_items`` if given.
    Where PyTorch gives NaN, with every row ignored, the mean is 0.

    Args:
        input: logits x, [..., V] float32, bfloat16 or float16, on the CPU or a CUDA device; any strides (copied only if the last
            one is not 1, or the rows are not a stride apart in at most two levels).
        target: labels y, [...] int64, int32 or uint8, or class probabilities, [..., V] of a float type. Rows with
            ``ignore_index`` are not read: they may hold NaN.
        weight: [V] or [valid_vocab] class weights c, converted to float32.
        grad_in_forward: compute the gradient together with the loss (scalar losses): the backward then only scales it, and not
            even that where the upstream gradient is 1. One exponential an element instead of two. A low-precision gradient is
            rounded a second time where it is scaled (not by powers of 2), and a float16 one has lost what is below 6e-8 before
            AMP's scale reaches it. While the graph is retained the backward gives a copy. Default None: on the CPU the backward
            computes it, as a gradient as large as the logits would lie there from the forward on; on a CUDA device the forward
            does, which saves a read of the logits, but not for float16, in place or in a compiled program.
        inplace_backward: write the gradient over ``input``, which cannot be used after it (a second backward raises). With
            ``grad_in_forward`` the forward already does so, and torch.autograd.grad no longer finds an ``input`` that is a view
            (backward() and its base's gradient are as ever). Under torch.compile, which plans memory itself, it has no effect.

    Tensors that go with the rows, None for the default:
        mask: [...] or flat [N], any numbers; rows with 0 are neither read nor counted; default: all count.
        token_weights: [...] or flat [N], converted to float32; w_i; default 1.
        allowed: [..., W] or [W], int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all
            are allowed.

    Options, of which a Number may be a tensor of one element:
        logit_scale: multiplies the logits; > 0; default 1.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0.
        temperature: T, divides the logits; > 0; default 1.
        temperature_on: what T divides: the logits, or the log-probabilities that the softmax gives at T = 1; one of logits,
            logprob; default logits.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid.
        ignore_index: rows with this label are neither read nor counted; default -100.
        label_smoothing: s, spread over all classes; in [0, 1]; default 0.
        z_loss: zeta: adds zeta * lse^2; >= 0; default 0.
        num_items: mean's denominator; >= 0; None: the weights are summed; only with reduction mean.
        reduction: how the rows' losses become the loss; one of none, sum, mean; default mean.

    Neither options nor weights are differentiated: a tensor that requires a gradient is refused while gradients are recorded.

    Returns:
        float32: a scalar, or [...] with reduction "none".

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
        IndexError: a label outside [0, valid_vocab), naming it and its row; on a CUDA device `check_errors` raises it.
        NotImplementedError: an input that is neither on the CPU nor on a CUDA device.
    """
    given: dict[str, Any] = {"labels": target, "class_weights": weight, **options}
    given["ignore_index"] = ignore_index
    student = checked_logits, (input,)
    return _cross_entropy(student, given, grad_in_forward, inplace_backward)


@explains_names
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    grad_in_forward: bool | None = None,
    **options: Unpack[CrossEntropyArguments[Tensor]],
) -> Tensor:
    """`cross_entropy` of the logits input @ linear_weight.T + linear_bias, which are never held: they exist a tile at a time.

    The arguments are those of torch's `torch.nn.functional.linear_cross_entropy`, but for its ``options``, which split a batch:
    here ``workspace_bytes`` caps the memory.

    Args:
        input: hidden states, [..., H] float32, bfloat16 or float16, on the CPU or a CUDA device; copied if it is expanded.
        linear_weight: the LM head, [V, H] float32, bfloat16 or float16; any strides that do not overlap (a transposed [H, V] is
            taken as it lies).
        target: labels, [...] int64, int32 or uint8; rows with ``ignore_index`` cost nothing. Or class probabilities, [..., V].
        linear_bias: [V].
        low_rank: two tensors of float types, x [..., R] and B [V, R], R up to 512: x @ B.T is added to the logits, in one sum
            with input's, and no copy of [V, H] is made. LoRA on the head: ``low_rank=(scaling * (input @ A.T), B)``. Both
            get their gradients.
        weight: [V] or [valid_vocab] class weights, as `cross_entropy`'s.
        ignore_index: None: -100.
        compute_dtype: what the products see, torch.bfloat16 or torch.float32; sums are float32 either way. Default: autocast's
            dtype inside `torch.autocast`, else bfloat16 if input and linear_weight are that, else float32. Never a copy of the
            head.
        workspace_bytes: a cap on scratch memory; the fastest schedule that fits is taken, and a ValueError names the least that
            would do. Each pass has its own least: a backward of its own (``grad_in_forward=False``, `linear_logprobs`) may need
            more than the forward named, and raises then. Default: docs/users/memory.md.
        linear_weight_grad: [V, H] float32, to which each backward adds linear_weight's gradient, not rounded in between, in a
            fixed order; any strides that do not overlap. linear_weight then gets no gradient from this call (autograd's is None).
            Gradients of several micro-batches, or of several calls, are so summed in float32 in the caller's own memory:
            docs/users/memory.md. The loss's upstream gradient multiplies in float32 before anything is added, which only the
            backward can do: ``grad_in_forward`` is False, and True is refused. Each backward adds, also one through a retained
            graph, or for input's gradient alone. Without gradients nothing is added.
        grad_in_forward: compute the gradients together with the loss: three products instead of four. Without it, or with
            reduction "none", the backward computes them from 12 bytes a row that the forward saves. Default None: here True, as a
            product is saved, but False where a float16 tensor asks for its gradient, which would be rounded before AMP's scale
            multiplies it.

    The other arguments, the formula, the result and the errors: `cross_entropy`. Gradients have their tensors' dtypes and are
    given for those of input, linear_weight, linear_bias and low_rank that ask for them; linear_weight's is summed in float32 and
    rounded once.
    """
    given: dict[str, Any] = {"labels": target, "class_weights": weight, **options}
    given["ignore_index"] = ignore_index
    head = operands(
        linear_weight, linear_bias, low_rank, compute_dtype, workspace_bytes, linear_weight_grad
    )
    return _cross_entropy((checked_head, (input, *head)), given, grad_in_forward)


def _cross_entropy(student: Unchecked, given: dict[str, Any], *how: Any) -> Tensor:
    """``how``: grad_in_forward and, from logits, inplace_backward."""
    if not is_probabilities(target := given["labels"]):
        return results_of("cross_entropy", student, given, (), *how)["loss"]
    given = {**options_of_probabilities(given), "target_probs": target, "labels": None}
    return results_of(OF_PROBABILITIES, student, given, (), *how)["loss"]


@explains_names
def logprobs(
    input: Tensor,
    target: Tensor,
    *,
    outputs: Iterable[str] = ("logp",),
    inplace_backward: bool = False,
    ignore_index: int = -100,
    **options: Unpack[LogprobsArguments[Tensor]],
) -> RowOutputs:
    """Row outputs of the softmax at the labels ``target``: log-probability, log-sum-exp, entropy and more.

    Args:
        outputs: names of `RowOutputs`. logp, lse, entropy and the mean are differentiable: dL/dz_j = g_logp [j = y] + p_j
            (-g_logp + g_lse - g_H (H + log p_j)) + g_M / V, so any loss written on top of them differentiates exactly.
        target: [...] or [..., K], several labels a row, up to 1024: logp is [..., K] then, with sum_k g_logp_k [j = y_k] and
            sum_k g_logp_k in the gradient; the other outputs are a row's, without correct. A label that is ignore_index is an
            empty slot, its logp 0; a row of these alone is ignored.

    The other arguments and the errors: `cross_entropy`.

    Options, of which a Number may be a tensor of one element:
        logit_scale: multiplies the logits; > 0; default 1.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0.
        temperature: T, divides the logits; > 0; default 1.
        temperature_on: what T divides: the logits, or the log-probabilities that the softmax gives at T = 1; one of logits,
            logprob; default logits.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid.
        ignore_index: rows with this label are neither read nor counted; default -100.

    Returns:
        RowOutputs: tensors of the rows' shape, logp of target's, None for what was not asked for.
    """
    given: dict[str, Any] = {"labels": target, "ignore_index": ignore_index, **options}
    return _rows((checked_logits, (input,)), given, outputs, inplace_backward)


@explains_names
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    outputs: Iterable[str] = ("logp",),
    ignore_index: int | None = None,
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    **options: Unpack[LogprobsArguments[Tensor]],
) -> RowOutputs:
    """`logprobs` of the logits input @ linear_weight.T + linear_bias, which are never held.

    Arguments: `linear_cross_entropy`, `logprobs`.
    """
    given: dict[str, Any] = {"labels": target, "ignore_index": ignore_index, **options}
    head = operands(
        linear_weight, linear_bias, low_rank, compute_dtype, workspace_bytes, linear_weight_grad
    )
    return _rows((checked_head, (input, *head)), given, outputs)
