"""One small batch on which every function of tileloss.torch runs, each of them made a scalar, and plain torch beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import definitions
from tileloss import torch as tl
from tileloss.torch import _operators, _results

B, T, V, H = 3, 5, 67, 16
ROWS = ("logp", "lse", "entropy")
# What torch 2.11, say, does otherwise or has not.
OF_TORCH_2_15 = pytest.mark.skipif(
    torch.__version__ < (2, 15), reason="NOT RUN: torch is older than 2.15"
)
LOGIT_FUNCTIONS = ("cross_entropy", "logprobs", "policy_loss")
LINEAR_FUNCTIONS = ("linear_cross_entropy", "linear_logprobs", "linear_policy_loss")
FUNCTIONS = LOGIT_FUNCTIONS + LINEAR_FUNCTIONS
# Losses whose target is not labels; "soft_labels": cross-entropy with class probabilities.
TEACHER_FUNCTIONS = ("distillation", "sparse_distillation", "soft_labels")
ALL_LOGIT_FUNCTIONS = LOGIT_FUNCTIONS + TEACHER_FUNCTIONS
ALL_FUNCTIONS = FUNCTIONS + TEACHER_FUNCTIONS + tuple(f"linear_{f}" for f in TEACHER_FUNCTIONS)


@dataclass
class Problem:
    """logits [B, T, V], or hidden [B, T, H], weight [V, H], bias [V]; labels, row_weights, old_logp [B, T]; of the teacher
    hidden states [B, T, H], whose head is the student's, without bias, and its logits."""

    logits: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor
    row_weights: Tensor
    old_logp: Tensor
    advantages: Tensor
    teacher_hidden: Tensor
    teacher: Tensor

    def leaves(self, name: str) -> tuple[Tensor, ...]:
        return (self.hidden, self.weight, self.bias) if "linear" in name else (self.logits,)


def problem(dtype: torch.dtype = torch.float32, batch: int = B) -> Problem:
    weight, hidden = 0.3 * torch.randn(V, H), torch.randn(batch, T, H)
    labels = torch.randint(0, V, (batch, T))
    labels[:, 0] = -100
    teacher_hidden = torch.randn(batch, T, H).to(dtype)
    return Problem(
        *(x.to(dtype).requires_grad_() for x in (2 * torch.randn(batch, T, V), hidden, weight, torch.randn(V))),
        labels,
        torch.rand(batch, T) + 0.5,
        -3 - torch.rand(batch, T),
        torch.linspace(-1, 1, batch),
        teacher_hidden,
        (teacher_hidden @ weight.to(dtype).T).detach(),
    )  # fmt: skip


def of_sets() -> tuple[Problem, Tensor]:
    """A problem with a bool [B, T, V] that has the labels and the teacher's first tokens; elsewhere the teacher has no q."""
    p = problem()
    is_in = torch.rand(B, T, V) < 0.4
    is_in.scatter_(-1, p.labels.clamp(min=0)[..., None], True)
    return replace(p, teacher=p.teacher.masked_fill(~is_in, -torch.inf)), is_in


def weighted_sum(rows: tl.RowOutputs, p: Problem) -> Tensor:
    assert rows.logp is not None
    assert rows.lse is not None
    assert rows.entropy is not None
    # Of several labels each counts for itself.
    logp = rows.logp if rows.logp.ndim == rows.lse.ndim else rows.logp.square().sum(-1)
    return (p.row_weights * (logp - 0.3 * rows.lse + 0.2 * rows.entropy)).sum()


def run(name: str, p: Problem, *leaves: Tensor, of: Any = tl, **options: Any) -> Tensor:
    """The function's loss of `leaves` (logits, or hidden, weight and bias); of row outputs a weighted sum. ``of``: its module."""
    head = leaves[:2] if "linear" in name else leaves
    given = {"linear_bias": leaves[2], **options} if "linear" in name else options
    if name.endswith(TEACHER_FUNCTIONS):
        return teacher_loss(name, p, *head, of=of, **given)
    function = getattr(of, name)
    if name.endswith("logprobs"):
        return weighted_sum(function(*head, p.labels, outputs=ROWS, **given), p)
    if name.endswith("policy_loss"):
        result: Tensor = function(*head, p.labels, p.advantages, old_logp=p.old_logp, **given)
        return result
    result = function(*head, p.labels, **given)
    return result


def teacher_loss(name: str, p: Problem, *head: Tensor, of: Any = tl, **options: Any) -> Tensor:
    kind = name.removeprefix("linear_")
    if kind == "soft_labels":
        function = getattr(of, name.replace("soft_labels", "cross_entropy"))
        return function(*head, p.teacher.float().softmax(-1), **options)
    teacher: tuple[Tensor, ...] = (p.teacher,)
    if kind == "sparse_distillation":
        logprobs, ids = p.teacher.float().log_softmax(-1).topk(4)
        teacher = (ids, logprobs)
    elif "linear" in name:
        teacher = (p.teacher_hidden, p.weight.detach())
    result: Tensor = getattr(of, name)(*head, *teacher, p.labels, **options)
    return result


def plain(name: str, p: Problem, *leaves: Tensor, **options: Any) -> Tensor:
    """The same of definitions.py, in float64."""
    kind, x = name.removeprefix("linear_"), leaves[0].double()
    if name != kind:
        x = F.linear(x, *(each.double() for each in leaves[1:]))
    if name == "linear_distillation":
        teacher = F.linear(p.teacher_hidden.double(), p.weight.detach().double())
        return definitions.distillation(x, teacher, p.labels, **options)
    return run(kind, p, x, of=definitions, **options)


def gradients(
    name: str, p: Problem, of: Callable[..., Tensor] = run, **options: Any
) -> tuple[Tensor, ...]:
    """The loss, and the gradient of each leaf."""
    leaves = p.leaves(name)
    loss = of(name, p, *leaves, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def assert_same(
    values: tuple[Tensor, ...], expected: tuple[Tensor, ...], rtol: float = 2e-5
) -> None:
    """Each to `rtol` of the largest element of what is expected,."""
    assert len(values) == len(expected)
    for value, exact in zip(values, expected, strict=True):
        assert value.shape == exact.shape
        bound = rtol * float(exact.abs().max())
        worst = float((value.detach().double() - exact.detach().double()).abs().max())
        assert worst <= bound, (worst, bound)


def forget_calls() -> None:
    """As if none had been made before."""
    _results._known.cache_clear()
    _operators._alike.cache_clear()


def allocations(function: Callable[[], Any]) -> list[int]:
    """The bytes of each block that torch's allocator gives while `function` runs, largest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = function()
    del kept
    events = profiled.profiler.kineto_results.events()
    return sorted(
        (e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0), reverse=True
    )
