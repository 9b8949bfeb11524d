"""Bugs of losses against a teacher or class probabilities."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tileloss.tools.audit.bugs.right import Array, Right, rounded
from tileloss.tools.audit.bugs.table import bug
from tileloss.tools.audit.cases import BF16, DISTILLATION, SOFT, SPARSE, drawn


class SoftLabels(Right):
    functions: ClassVar[tuple[str, ...]] = ("soft_cross_entropy",)
    options: ClassVar[tuple[str, ...]] = ("ignore_index", "reduction")
    tensors: ClassVar[tuple[str, ...]] = ("target_probs",)

    def row_losses(self) -> Array:
        return np.where(self.used, -(self.wide("target_probs") * self.log_p).sum(-1), 0)

    def loss_gradient(self) -> Array:
        q = self.wide("target_probs")
        return self.p * q.sum(-1, keepdims=True) - q


@bug(
    "NVIDIA-NeMo/Automodel#2428",
    "the backward takes the sum of the class probabilities for 1",
    SOFT,
)
class SumTakenForOne(SoftLabels):
    def loss_gradient(self) -> Array:
        return self.p - self.wide("target_probs")


class OfTeacher(Right):
    def divergence(self) -> tuple[Array, Array]:
        """D, [N], and dD/dz, [N,V]."""
        raise NotImplementedError

    def row_losses(self) -> Array:
        return np.where(self.used, self.divergence()[0], 0)

    def loss_gradient(self) -> Array:
        return self.divergence()[1]


class Distilled(OfTeacher):
    """Forward KL, and JSD."""

    functions: ClassVar[tuple[str, ...]] = ("distillation",)
    options: ClassVar[tuple[str, ...]] = ("ignore_index", "reduction", "divergence", "beta")
    tensors: ClassVar[tuple[str, ...]] = ("teacher_logits",)

    def teacher(self) -> Array:
        z = self.wide("teacher_logits")
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    def divergence(self) -> tuple[Array, Array]:
        log_q = self.teacher()
        q = np.exp(log_q)
        if self.option.get("divergence") != "jsd":
            return (q * (log_q - self.log_p)).sum(-1), self.p - q
        beta = float(self.option.get("beta", 0.5))
        log_m = np.log(beta * q + (1 - beta) * self.p)
        g = (1 - beta) * (self.log_p - log_m)
        d = beta * q * (log_q - log_m) + (1 - beta) * self.p * (self.log_p - log_m)
        return d.sum(-1), self.p * (g - (self.p * g).sum(-1, keepdims=True))


_JSD = {"divergence": "jsd", "beta": 0.3}


@bug("linkedin/Liger-Kernel#974", "ignored rows count in the divergence", DISTILLATION, **_JSD)
class IgnoredDistilled(Distilled):
    def row_losses(self) -> Array:
        return self.divergence()[0]

    def weights(self) -> Array:
        return np.full(len(self.used), 1 / len(self.used))


@bug(
    "huggingface/trl#5731",
    "half of the loss is cross-entropy that nobody asked for",
    DISTILLATION,
    **_JSD,
)
class HalfHard(Distilled):
    def divergence(self) -> tuple[Array, Array]:
        d, dz = super().divergence()
        hard = self.p.copy()
        hard[self.rows, self.y] -= 1
        return (d - self.logp) / 2, (dz + hard) / 2


@bug("vllm-project/speculators#788", "p - q of bfloat16 probabilities: noise where the student is good", DISTILLATION,
     judged=("dlogits",), **BF16)  # fmt: skip
class DifferenceOfRounded(Distilled):
    def loss_gradient(self) -> Array:
        like = self.case.tensors["logits"]
        return rounded(self.p, like) - rounded(np.exp(self.teacher()), like)


class Columns(OfTeacher):
    """Forward KL of the teacher's columns alone: of `tail: ignore`."""

    functions: ClassVar[tuple[str, ...]] = ("sparse_distillation",)
    options: ClassVar[tuple[str, ...]] = ("ignore_index", "reduction", "divergence", "tail")
    tensors: ClassVar[tuple[str, ...]] = ("teacher_ids", "teacher_logprobs")

    def divergence(self) -> tuple[Array, Array]:
        ids, log_q = self.case.tensors["teacher_ids"], self.wide("teacher_logprobs")
        there = ids >= 0
        q = np.where(there, np.exp(np.where(there, log_q, 0)), 0)
        log_p = np.take_along_axis(self.log_p, np.maximum(ids, 0), -1)
        d = np.where(there, q * (np.where(there, log_q, 0) - log_p), 0).sum(-1)
        dz = self.p * q.sum(-1, keepdims=True)
        np.put_along_axis(
            dz, np.maximum(ids, 0), np.take_along_axis(dz, np.maximum(ids, 0), -1) - q, -1
        )
        return d, dz


@bug("verl-project/verl#7856", "the truncated divergence is clamped at 0, and with it the gradient: in 89 % of all steps", SPARSE,
     tail="ignore", reduction="none", upstream="per_row", vocab_size=8,
     source=drawn("normal", std=0.1, teacher_columns=8, teacher_std=0.1))  # fmt: skip
class Clamped(Columns):
    def divergence(self) -> tuple[Array, Array]:
        d, dz = super().divergence()
        return np.maximum(d, 0), np.where(d[:, None] > 0, dz, 0)
