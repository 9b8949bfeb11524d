"""Divergences of a student from a teacher: their truth, and who takes part.

`beta` is TRL's: the teacher's share of the mixture m of the JSD, beta KL(q || m) + (1 - beta) KL(p || m) with the student's p
and the teacher's q; 0 stands for KL(q || p). The loss is the mean over the rows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from comparison import contestants
from comparison.contestants import GROUPS, OURS, Loss, torch_loss
from comparison.inputs import (
    SAMPLES,
    Inputs,
    Truth,
    logits_of,
    new_generator,
    row_chunks,
    sampled_truth,
)


def log_mixture(logp: torch.Tensor, logq: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.logaddexp(logp + math.log(1 - beta), logq + math.log(beta))


def divergence_of(
    logp: torch.Tensor, logq: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of [rows, V]: the divergence, and KL(p || m), which the JSD's gradient needs."""
    p, q = logp.exp(), logq.exp()
    if beta == 0:
        return (q * (logq - logp)).sum(-1), torch.zeros(len(p))
    logm = log_mixture(logp, logq, beta)
    kl_p, kl_q = (p * (logp - logm)).sum(-1), (q * (logq - logm)).sum(-1)
    return beta * kl_q + (1 - beta) * kl_p, kl_p


def gradient_of(
    logp: torch.Tensor, logq: torch.Tensor, kl_p: torch.Tensor, beta: float
) -> torch.Tensor:
    """dD/dz of the student's logits, at some entries of some rows, [rows, entries]; kl_p [rows]."""
    if beta == 0:
        return logp.exp() - logq.exp()
    logm = log_mixture(logp, logq, beta)
    return (1 - beta) * logp.exp() * (logp - logm - kl_p[:, None])


def make_truth(inputs: Inputs, beta: float) -> Truth:
    """In float64, whole rows some at a time."""
    student, teacher, shape = inputs, inputs.teacher, inputs.shape
    assert teacher is not None
    values, kl_p, lse, teacher_lse = torch.empty(4, shape.tokens, dtype=torch.float64)
    for chunk in row_chunks(inputs):
        sides = [logits_of(side, chunk, None) for side in (student, teacher)]
        sums = [torch.logsumexp(z, -1) for z in sides]
        lse[chunk], teacher_lse[chunk] = sums
        logp, logq = (z - total[:, None] for z, total in zip(sides, sums, strict=True))
        values[chunk], kl_p[chunk] = divergence_of(logp, logq, beta)

    def gradient_at(rows: torch.Tensor | None, classes: torch.Tensor | None) -> torch.Tensor:
        chosen = slice(None) if rows is None else rows
        logp = logits_of(student, rows, classes) - lse[chosen, None]
        logq = logits_of(teacher, rows, classes) - teacher_lse[chosen, None]
        return gradient_of(logp, logq, kl_p[chosen], beta) / shape.tokens

    loss = values.mean().item()
    generator = new_generator()
    rows = torch.randperm(shape.tokens, generator=generator)[:SAMPLES]
    classes = torch.randint(0, shape.vocab, (SAMPLES,), generator=generator)
    return sampled_truth(student, loss, loss, (rows, classes), gradient_at)


# ------------------------------------------------------------------------------------------------------- from logits


def teachers_logits(inputs: Inputs) -> torch.Tensor:
    assert inputs.teacher is not None and inputs.teacher.pristine is not None
    return inputs.teacher.pristine


def our_distillation(inputs: Inputs, beta: float, inplace_backward: bool) -> Loss:
    from tileloss.torch import distillation

    teacher, divergence = teachers_logits(inputs), "jsd" if beta else "forward_kl"
    return lambda logits: distillation(
        logits,
        teacher,
        divergence=divergence,
        beta=beta or 0.5,
        inplace_backward=inplace_backward,
        grad_in_forward=True,
    )


def trl_divergence(inputs: Inputs, beta: float) -> Loss:
    """The formula of TRL's `GKDTrainer.generalized_jsd_loss`, in the logits' type as there."""
    teacher, rows = teachers_logits(inputs), inputs.shape.tokens

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logp, logq = F.log_softmax(logits, -1), F.log_softmax(teacher, -1)
        if beta == 0:
            return F.kl_div(logp, logq, reduction="none", log_target=True).sum() / rows
        shares = torch.stack([logp + math.log(1 - beta), logq + math.log(beta)])
        logm = torch.logsumexp(shares, 0)
        kl_q, kl_p = (
            F.kl_div(logm, side, reduction="none", log_target=True) for side in (logq, logp)
        )
        return (beta * kl_q + (1 - beta) * kl_p).sum() / rows

    return loss


def register(group: str, beta: float) -> None:
    """The same contestants for each divergence."""

    @torch_loss(group, "TileLoss, in place", in_place=True, tolerance=OURS)
    def _(inputs: Inputs) -> Loss:
        return our_distillation(inputs, beta, inplace_backward=True)

    @torch_loss(group, "TileLoss, fresh gradient", tolerance=OURS)
    def _(inputs: Inputs) -> Loss:
        return our_distillation(inputs, beta, inplace_backward=False)

    # Log-probabilities in bfloat16: gradients of the JSD are 5 to 6 % off. Eager takes 0.8 s for each 64 rows there.
    @torch_loss(group, "torch eager", tolerance=0.15, max_rounds=2)
    def _(inputs: Inputs) -> Loss:
        return trl_divergence(inputs, beta)

    @torch_loss(group, "torch.compile", tolerance=0.15)
    def _(inputs: Inputs) -> Loss:
        return contestants.compiled(trl_divergence(inputs, beta))


for entry in list(GROUPS.values()):
    if entry.beta is not None and not entry.linear:
        register(entry.name, entry.beta)


# -------------------------------------------------------------------------------------------------- with the LM heads


def teachers_head(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Its hidden states, its head."""
    teacher = inputs.teacher
    assert teacher is not None and teacher.hidden is not None and teacher.head is not None
    return teacher.hidden, teacher.head


@torch_loss("linear_distillation", "TileLoss", tolerance=OURS)
def _(inputs: Inputs) -> Loss:
    from tileloss.torch import linear_distillation

    teacher = teachers_head(inputs)
    return lambda hidden, head: linear_distillation(hidden, head, *teacher)


@torch_loss("linear_distillation", "TRL chunked", max_rounds=2)
def _(inputs: Inputs) -> Loss:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    teacher_hidden, teacher_head = teachers_head(inputs)

    def loss(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        divergence, _entropy = ChunkedDivergenceFunction.apply(
            hidden, head, None, teacher_hidden, teacher_head, None, 0.0
        )
        return divergence.mean()

    return loss
