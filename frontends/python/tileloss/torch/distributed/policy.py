"""The policy losses of `tileloss.torch` on a vocabulary that is cut over the ranks of a process group."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from tileloss._core.arguments import PolicyLossArguments
from tileloss._core.other_names import explains_names
from tileloss.torch._outputs import with_metrics
from tileloss.torch.distributed._prepare import Given, call, given_of
from tileloss.torch.distributed.functions import Group


@explains_names
def policy_loss(
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    return_metrics: bool = False,
    inplace_backward: bool = False,
    **options: Unpack[PolicyLossArguments[Tensor]],
) -> Any:
    """`tileloss.torch.policy_loss` of logits whose vocabulary is cut over a group, losses that couple rows included.

    Arguments, and errors: `cross_entropy` of this module, `tileloss.torch.policy_loss`.

    Returns:
        The loss, or (loss, metrics by name) with ``return_metrics``; the same on every rank.
    """
    return _results(given_of("policy_loss", locals()))


@explains_names
def linear_policy_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    linear_bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    return_metrics: bool = False,
    compute_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    linear_weight_grad: Tensor | None = None,
    grad_in_forward: bool | None = None,
    **options: Unpack[PolicyLossArguments[Tensor]],
) -> Any:
    """`policy_loss` of this module with the LM head cut over a group: arguments as `linear_cross_entropy`."""
    return _results(given_of("policy_loss", locals()))


def _results(given: Given) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    return with_metrics(call(given), given.return_metrics)
