"""Runs a function of tileloss.torch on logits, forward and backward, and holds all it gives against the oracle.

Inputs are leaves; a check reads their .grad. Bad answers fail with the figures in multiples of what is
allowed (metric.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metric import assert_passes, judge_dlogits, judge_values
from oracle import (
    IDENTITY,
    Answer,
    CrossEntropy,
    Gradient,
    LossOfRows,
    Policy,
    RowValues,
    SoftmaxRows,
    Transform,
    row_values,
    softmax_rows,
    solve,
    value_errors,
)
from tileloss.torch import cross_entropy, logprobs, policy_loss

View = Callable[[Tensor], Tensor]


def as_is(x: Tensor) -> Tensor:
    return x


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def transform_options(transform: Transform) -> dict[str, float]:
    return dict(vars(transform))


def judge_loss(loss: Tensor, used: Tensor, answer: Answer) -> dict[str, float]:
    """A scalar loss, or one per row: 0 exactly where a row is not in use."""
    if answer.loss.dim() == 0:
        return {"loss": judge_values(loss.detach(), answer.loss, answer.magnitude)}
    flat = loss.detach().reshape(-1)
    assert (flat[~used] == 0).all(), "a row that is not in use has a loss"
    return {"loss": judge_values(flat[used], answer.loss, answer.magnitude)}


def judge_row_gradients(
    gradient: Tensor, used: Tensor, rows: SoftmaxRows, by: Gradient
) -> dict[str, float]:
    flat = gradient.reshape(-1, gradient.shape[-1])
    assert (flat[~used] == 0).all(), "a row that is not in use has a gradient"
    return judge_dlogits(flat[used], rows, by)


# --------------------------------------------------------------------------------------------- from logits


def check_cross_entropy(
    x: Tensor,
    labels: Tensor,
    *,
    view: View = as_is,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    transform: Transform = IDENTITY,
    token_weights: Tensor | None = None,
    upstream: Tensor | None = None,
    grad_in_forward: bool = False,
    inplace_backward: bool = False,
    **options: Any,
) -> None:
    """x: a leaf; the logits are view(x), [..., V]. options: oracle.CrossEntropy's. upstream: of the loss."""
    exact = view(x.detach()).double().reshape(-1, view(x).shape[-1])
    used = (labels != ignore_index).reshape(-1)
    flat = labels.reshape(-1)[used]
    loss = cross_entropy(
        view(x),
        labels,
        weight,
        ignore_index=ignore_index,
        token_weights=token_weights,
        grad_in_forward=grad_in_forward,
        inplace_backward=inplace_backward,
        **options,
        **transform_options(transform),
    )
    loss.backward(upstream)
    rows = softmax_rows(exact[used], flat, transform)
    used_weights = None if token_weights is None else token_weights.reshape(-1)[used]
    loss_of = CrossEntropy(**options).loss_of(flat, weight, exact.shape[1], used_weights)
    answer = solve(rows, loss_of, class_weights=weight, upstream=upstream_of_rows(upstream, used))
    assert x.grad is not None
    figures = judge_loss(loss, used, answer)
    assert_passes(figures | judge_row_gradients(view(x.grad), used, rows, answer.dlogits))


def upstream_of_rows(upstream: Tensor | None, used: Tensor) -> Tensor | None:
    """Of the rows in use, in float64; a scalar's as it is; none given: 1."""
    if upstream is None:
        return None
    return upstream.double() if upstream.dim() == 0 else upstream.double().reshape(-1)[used]


def weighted_rows(upstream: dict[str, Tensor], used: Tensor) -> LossOfRows:
    """sum over rows and outputs of upstream * output: what autograd makes of upstream gradients."""
    each = {name: grad.double().reshape(-1)[used] for name, grad in upstream.items()}

    def loss(values: RowValues) -> Tensor:
        return torch.stack(
            [(grad * getattr(values, name)).sum() for name, grad in each.items()]
        ).sum()

    return loss


def check_logprobs(
    x: Tensor,
    labels: Tensor,
    upstream: dict[str, Tensor],
    *,
    view: View = as_is,
    transform: Transform = IDENTITY,
    ignore_index: int = -100,
) -> None:
    """upstream: gradients of the outputs by name (logp, lse, entropy), which are also what is asked for."""
    exact = view(x.detach()).double().reshape(-1, view(x).shape[-1])
    used = (labels != ignore_index).reshape(-1)
    outputs = logprobs(
        view(x),
        labels,
        outputs=tuple(upstream),
        ignore_index=ignore_index,
        **transform_options(transform),
    )
    torch.autograd.backward([getattr(outputs, n) for n in upstream], list(upstream.values()))
    rows = softmax_rows(exact[used], labels.reshape(-1)[used], transform)
    answer = solve(rows, weighted_rows(upstream, used))
    assert x.grad is not None
    figures = judge_outputs(
        outputs, upstream, used, rows, value_errors(rows, torch.ones(1).double())
    )
    assert_passes(figures | judge_row_gradients(view(x.grad), used, rows, answer.dlogits))


def judge_outputs(
    outputs: Any, names: dict[str, Tensor], used: Tensor, rows: SoftmaxRows, errors: RowValues
) -> dict[str, float]:
    values = row_values(rows, torch.ones(rows.z.shape[1]).double())
    return {
        name: judge_values(
            getattr(outputs, name).detach().reshape(-1)[used],
            getattr(values, name),
            2.0**22 * getattr(errors, name),
        )
        for name in names
    }


def check_policy(
    x: Tensor,
    labels: Tensor,
    advantages: Tensor,
    *,
    view: View = as_is,
    policy: Policy,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sampler_ratio: Tensor | None = None,
    temperature: float = 1.0,
    upstream: Tensor | None = None,
    inplace_backward: bool = False,
) -> None:
    """The logits view(x) are [B, T, V], labels, mask and logps [B, T], advantages [B] or [B, T].

    sampler_ratio [B, T], exp(old - sampler logp) in float32, multiplies each token's loss.
    """
    given, sampler_ratio = policy_arguments(policy, old_logp, sampler_ratio)
    loss = policy_loss(
        view(x),
        labels,
        advantages,
        mask=mask,
        old_logp=old_logp,
        ref_logp=ref_logp,
        temperature=temperature,
        inplace_backward=inplace_backward,
        **given,
    )
    exact = view(x.detach()).double().reshape(-1, view(x).shape[-1])
    loss.backward(upstream)
    used = used_tokens(labels, mask)
    rows = softmax_rows(exact[used.reshape(-1)], labels[used], Transform(temperature=temperature))
    loss_of = policy.loss_of(used, per_token(advantages), old_logp, ref_logp, sampler_ratio)
    answer = solve(rows, loss_of, upstream=upstream_of_rows(upstream, used.reshape(-1)))
    assert x.grad is not None
    figures = judge_loss(loss, used.reshape(-1), answer)
    assert_passes(
        figures | judge_row_gradients(view(x.grad), used.reshape(-1), rows, answer.dlogits)
    )


def used_tokens(labels: Tensor, mask: Tensor | None) -> Tensor:
    return (labels != -100) & (torch.ones_like(labels) if mask is None else mask).bool()


def per_token(advantages: Tensor) -> Tensor:
    return advantages[:, None] if advantages.dim() == 1 else advantages


def policy_arguments(
    policy: Policy, old_logp: Tensor | None, sampler_ratio: Tensor | None
) -> tuple[dict[str, Any], Tensor | None]:
    """policy_loss's options; and the sampler's ratio as the sampler's logp, rounded to float32, has it."""
    given = {name: value for name, value in vars(policy).items() if value is not None}
    if sampler_ratio is None:
        return given, None
    assert old_logp is not None
    given["sampler_correction"] = "truncate"
    given["sampler_logp"] = old_logp - sampler_ratio.log()
    return given, torch.exp(old_logp.double() - given["sampler_logp"].double())
