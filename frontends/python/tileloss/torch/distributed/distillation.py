"""Distillation with the vocabulary of student and teacher cut over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from tileloss._core.arguments import DistillationArguments
from tileloss._core.other_names import explains_names
from tileloss.torch._outputs import DistillationRows, checked_outputs, with_rows
from tileloss.torch.distributed._prepare import Given, call, given_of

Group = dist.ProcessGroup | None


@explains_names
def distillation(
    input: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    outputs: Iterable[str] = (),
    inplace_backward: bool = False,
    **options: Unpack[DistillationArguments[Tensor]],
) -> Any:
    """`tileloss.torch.distillation` of logits whose vocabulary is cut over a group: every rank gets the loss of all of it.

    Args:
        input: this rank's logits of the student, [..., V_r]; V_r may differ from rank to rank, also be 0. A DTensor with
            Shard(-1) on a mesh of one dimension is taken as it is, and its group with it.
        teacher: this rank's logits of the teacher, cut alike: the same shape and dtype.
        target: [...] classes of the whole vocabulary, the same on every rank, as is all else that goes with the rows; needed
            where label_weight is not 0.
        group: a torch.distributed process group; None: all processes. Every rank makes the same calls, backwards included.
        vocab_start: the class of this rank's first column. Default: the shards lie one after another in the order of the ranks.
        outputs: names of `tileloss.torch.DistillationRows`.
        inplace_backward: write the gradient over ``input``, which cannot be used after it.

    The other arguments: `tileloss.torch.distillation`. ``valid_vocab`` counts columns of all shards. The gradient, of this rank's
    columns, is made in the backward, which sends nothing. The upstream gradient has to be the same on every rank.

    Returns:
        float32, with the same bits on every rank: a scalar, or [...] with reduction "none"; with ``outputs``, (loss,
        DistillationRows).

    Raises:
        As `tileloss.torch.distillation`, on every rank: where the arguments of one are refused the others raise a RuntimeError
        that names it. ValueError: ranks whose rows, dtypes, labels or options differ, shards with gaps or overlaps.
    """
    return _results(given_of("distillation", locals()))


@explains_names
def linear_distillation(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    teacher_bias: Tensor | None = None,
    outputs: Iterable[str] = (),
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    **options: Unpack[DistillationArguments[Tensor]],
) -> Any:
    """`distillation` of this module with both LM heads cut over the group by their classes, alike.

    Args:
        input, teacher_input: hidden states [..., H] and [..., G], the same on every rank. The gradient of ``input`` is summed
            over the ranks: once, in float32, with the same bits on every rank.
        linear_weight, teacher_weight: this rank's rows of each head, [V_r, H] and [V_r, G]; or DTensors with Shard(0) on a mesh
            of one dimension, whose group is taken.
        linear_bias, teacher_bias: [V_r], cut as the heads.
        low_rank: of the student's head, as `linear_cross_entropy` of this module.
        compute_dtype, workspace_bytes: as `tileloss.torch.linear_distillation`, of each of a rank's calls.

    Each meeting of the ranks, and the backward, makes both sides' logits again: eight products where one process takes four. The
    other arguments, the result and the errors: `distillation` of this module.
    """
    return _results(given_of("distillation", locals()))


def _results(given: Given) -> Tensor | tuple[Tensor, DistillationRows]:
    return with_rows(call(given), checked_outputs(DistillationRows, given.outputs or ()))
