"""As checks.py, for the functions fused with the LM head: loss, outputs, dhidden, dhead and dbias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checks import (
    View,
    as_is,
    judge_loss,
    judge_outputs,
    per_token,
    policy_arguments,
    transform_options,
    upstream_of_rows,
    used_tokens,
    weighted_rows,
)
from metric import LinearCase, assert_passes, judge_linear
from oracle import (
    IDENTITY,
    CrossEntropy,
    Gradient,
    Policy,
    RowValues,
    SoftmaxRows,
    Transform,
    softmax_rows,
    solve,
    value_errors,
)
from tileloss.torch import linear_cross_entropy, linear_logprobs, linear_policy_loss


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The documented default: bfloat16 if both operands are, else float32."""
    both = hidden.dtype == weight.dtype == torch.bfloat16
    return torch.bfloat16 if both else torch.float32


class LinearOperands:
    """hidden [..., H], weight [V, H] and bias [V] or None, leaves, with their exact values in float64."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, used: Tensor
    ) -> None:
        self.leaves = (hidden, weight, bias)
        self.used = used.reshape(-1)
        self.labels = labels.reshape(-1)[self.used]
        self.hidden = hidden.detach().double().reshape(-1, hidden.shape[-1])[self.used]
        self.head = weight.detach().double()
        self.bias = None if bias is None else bias.detach().double()

    def rows(self, transform: Transform) -> SoftmaxRows:
        x = self.hidden @ self.head.T
        return softmax_rows(x if self.bias is None else x + self.bias, self.labels, transform)

    def case(self, rows: SoftmaxRows, dlogits: Gradient | None = None) -> LinearCase:
        hidden, weight, _ = self.leaves
        empty = torch.empty(0).double()
        dlogits = dlogits or Gradient(empty, empty, empty, empty)
        return LinearCase(
            self.hidden, self.head, self.bias, compute_dtype(hidden, weight), rows, dlogits
        )

    def judge(self, rows: SoftmaxRows, dlogits: Gradient) -> dict[str, float]:
        """The gradients of those leaves that ask for them; a row that is not in use has 0."""
        grads = [None if x is None else x.grad for x in self.leaves]
        for x, grad in zip(self.leaves, grads, strict=True):
            assert x is None or (grad is not None) == x.requires_grad
        dhidden = grads[0]
        if dhidden is not None:
            dhidden = dhidden.reshape(-1, dhidden.shape[-1])
            assert (dhidden[~self.used] == 0).all(), "a row that is not in use has a gradient"
            dhidden = dhidden[self.used]
        return judge_linear(self.case(rows, dlogits), dhidden, grads[1], grads[2])


def errors_of_logits(error: Tensor, rows: SoftmaxRows, class_weights: Tensor | None) -> RowValues:
    """What errors of all logits z of up to `error` [n] do to the row's values."""
    size = rows.z.shape[1] if class_weights is None else class_weights.abs().sum().item()
    return RowValues(2 * error, error, 2 * error * (1 + rows.entropy), 2 * size * error)


def check_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    transform: Transform = IDENTITY,
    upstream: Tensor | None = None,
    grad_in_forward: bool = True,
    shift: Callable[[Tensor], Tensor] = as_is,
    **options: Any,
) -> None:
    """shift: the view of hidden that the loss sees (all but the last tokens)."""
    loss = linear_cross_entropy(
        shift(hidden),
        weight,
        labels,
        linear_bias=bias,
        weight=class_weights,
        ignore_index=ignore_index,
        grad_in_forward=grad_in_forward,
        **options,
        **transform_options(transform),
    )
    loss.backward(upstream)
    full = fill_labels(hidden, shift, labels, ignore_index)
    operands = LinearOperands(hidden, weight, bias, full, full != ignore_index)
    rows = operands.rows(transform)
    answer = solve(
        rows,
        CrossEntropy(**options).loss_of(operands.labels, class_weights, weight.shape[0], None),
        class_weights=class_weights,
        upstream=upstream_of_rows(upstream, (labels != ignore_index).reshape(-1)),
        more_errors=errors_of_logits(operands.case(rows).output_error(), rows, class_weights),
    )
    figures = judge_loss(loss, (labels != ignore_index).reshape(-1), answer)
    assert_passes(figures | operands.judge(rows, answer.dlogits))


def fill_labels(hidden: Tensor, shift: View, labels: Tensor, ignore_index: int) -> Tensor:
    """Labels of all of hidden's rows: those that the view leaves out are ignored."""
    full = torch.full(hidden.shape[:-1], ignore_index)
    shift(full[..., None])[..., 0] = labels
    return full


def check_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    upstream: dict[str, Tensor],
    bias: Tensor | None = None,
    *,
    transform: Transform = IDENTITY,
) -> None:
    outputs = linear_logprobs(
        hidden,
        weight,
        labels,
        linear_bias=bias,
        outputs=tuple(upstream),
        **transform_options(transform),
    )
    torch.autograd.backward([getattr(outputs, n) for n in upstream], list(upstream.values()))
    operands = LinearOperands(hidden, weight, bias, labels, labels != -100)
    rows = operands.rows(transform)
    error = errors_of_logits(operands.case(rows).output_error(), rows, None)
    answer = solve(rows, weighted_rows(upstream, operands.used), more_errors=error)
    own = value_errors(rows, torch.ones(1).double())
    both = RowValues(
        *(a + b for a, b in zip(vars(own).values(), vars(error).values(), strict=True))
    )
    figures = judge_outputs(outputs, upstream, operands.used, rows, both)
    assert_passes(figures | operands.judge(rows, answer.dlogits))


def check_linear_policy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    *,
    policy: Policy,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    temperature: float = 1.0,
) -> None:
    """hidden [B, T, H]; the rest as check_policy."""
    given, _ = policy_arguments(policy, old_logp, None)
    loss = linear_policy_loss(
        hidden,
        weight,
        labels,
        advantages,
        linear_bias=bias,
        mask=mask,
        old_logp=old_logp,
        ref_logp=ref_logp,
        temperature=temperature,
        **given,
    )
    loss.backward()
    used = used_tokens(labels, mask)
    operands = LinearOperands(hidden, weight, bias, labels, used)
    rows = operands.rows(Transform(temperature=temperature))
    error = errors_of_logits(operands.case(rows).output_error(), rows, None)
    loss_of = policy.loss_of(used, per_token(advantages), old_logp, ref_logp)
    answer = solve(rows, loss_of, more_errors=error)
    figures = judge_loss(loss, used.reshape(-1), answer)
    assert_passes(figures | operands.judge(rows, answer.dlogits))
