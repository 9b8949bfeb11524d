"""The functions of `tileloss.torch` on a vocabulary that is cut over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from tileloss._core.arguments import CrossEntropyArguments, LogprobsArguments
from tileloss._core.other_names import explains_names
from tileloss.torch._arguments import empty_slots
from tileloss.torch._outputs import RowOutputs, checked_outputs, rows_of
from tileloss.torch.distributed._prepare import Given, call, given_of

Group = dist.ProcessGroup | None


@explains_names
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    inplace_backward: bool = False,
    ignore_index: int = -100,
    **options: Unpack[CrossEntropyArguments[Tensor]],
) -> Tensor:
    """`tileloss.torch.cross_entropy` of logits whose vocabulary is cut over a group: every rank gets the loss of all of it.

    Args:
        input: this rank's logits, [..., V_r]; V_r may differ from rank to rank, also be 0. A DTensor with Shard(-1) on a mesh of
            one dimension is taken as it is, and its group with it.
        target: [...] classes of the whole vocabulary, the same on every rank, as is all else that goes with the rows. Or class
            probabilities of this rank's columns, [..., V_r] of a float type, as `tileloss.torch.cross_entropy` takes them.
        weight: [V] or [valid_vocab] class weights of the whole vocabulary.
        group: a torch.distributed process group; None: all processes. Every rank makes the same calls, backwards included.
        vocab_start: the class of this rank's first column. Default: the shards lie one after another in the order of the ranks.
        inplace_backward: write the gradient over ``input``, which cannot be used after it.

    Options as `tileloss.torch.cross_entropy`'s. ``valid_vocab`` counts columns of all shards; label smoothing is over the whole
    vocabulary.

    The gradient is that of this rank's columns. The upstream gradient has to be the same on every rank.

    Returns:
        float32, with the same bits on every rank: a scalar, or [...] with reduction "none".

    Raises:
        As `tileloss.torch.cross_entropy`, on every rank: where the arguments of one are refused the others raise a RuntimeError
        that names it. ValueError: ranks whose rows, dtypes, labels or options differ, shards with gaps or overlaps.
    """
    return call(given_of("cross_entropy", locals()))["loss"]


@explains_names
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    grad_in_forward: bool | None = None,
    ignore_index: int = -100,
    **options: Unpack[CrossEntropyArguments[Tensor]],
) -> Tensor:
    """`tileloss.torch.linear_cross_entropy` with the LM head cut over a group by its classes.

    Args:
        input: hidden states [..., H], the same on every rank. Their gradient is summed over the ranks: once, in float32, with the
            same bits on every rank.
        linear_weight: this rank's rows of the head, [V_r, H]; or a DTensor with Shard(0) on a mesh of one dimension, whose
            group is taken.
        linear_bias: [V_r], cut as the head.
        low_rank: x [..., R], the same on every rank, whose gradient is summed as input's, and this rank's rows of B, [V_r, R].
        compute_dtype: as `tileloss.torch.linear_cross_entropy`.
        workspace_bytes: a cap on the scratch memory of each of a rank's calls, one for each of its slices of the vocabulary.
        linear_weight_grad: [V_r, H] float32 of this rank's rows, as `tileloss.torch.linear_cross_entropy` has it: each rank adds
            to its own. Of a DTensor's head a plain tensor, too. Either every rank gives one or none does.
        grad_in_forward: as `tileloss.torch.linear_cross_entropy`: three products instead of four. A rank's calls then hold their
            scratch at the same time. Default None: True, but False with ``workspace_bytes`` and where a float16 tensor asks
            for its gradient.

    The other arguments, the result and the errors: `cross_entropy` of this module. Gradients of head and bias are those of this
    rank's rows.
    """
    return call(given_of("cross_entropy", locals()))["loss"]


@explains_names
def logprobs(
    input: Tensor,
    target: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    outputs: Iterable[str] = ("logp",),
    inplace_backward: bool = False,
    ignore_index: int = -100,
    **options: Unpack[LogprobsArguments[Tensor]],
) -> RowOutputs:
    """`tileloss.torch.logprobs` of logits whose vocabulary is cut over a group. argmax is a class of the whole vocabulary, as are
    the labels, [...] or [..., K].

    Arguments, and errors: `cross_entropy` of this module, `tileloss.torch.logprobs`.
    """
    return _rows(given_of("logprobs", locals()), ignore_index)


@explains_names
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    outputs: Iterable[str] = ("logp",),
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    ignore_index: int = -100,
    **options: Unpack[LogprobsArguments[Tensor]],
) -> RowOutputs:
    """`logprobs` of this module with the LM head cut over a group: arguments as `linear_cross_entropy`."""
    return _rows(given_of("logprobs", locals()), ignore_index)


def _rows(given: Given, ignore_index: int) -> RowOutputs:
    slots = empty_slots(given.tensors["labels"], given.input, ignore_index)
    if slots is not None:
        given = given._replace(tensors={**given.tensors, "labels": slots})
    results = call(given)  # where outputs are wrong on one rank this raises on all
    names = checked_outputs(RowOutputs, given.outputs)
    return rows_of(RowOutputs, results, names, has_labels=slots is None)
