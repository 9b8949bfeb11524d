"""Bugs of losses that are fused with the LM head: chunks, shards, saved gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tileloss.tools.audit.bugs.right import Array, Right, rounded
from tileloss.tools.audit.bugs.table import bug
from tileloss.tools.audit.cases import LINEAR, LINEAR_LOGPROBS

CHUNK = 8  # rows


class Head(Right):
    functions: ClassVar[tuple[str, ...]] = ("linear_cross_entropy", "linear_logprobs")


@bug("linkedin/Liger-Kernel#1298", "reduction none: every row's gradient is scaled by the first row's upstream", LINEAR,
     reduction="none", upstream="per_row")  # fmt: skip
class FirstUpstream(Head):
    def upstream(self) -> Array:
        whole = super().upstream()
        return (
            np.where(self.used, self.case.upstream("loss")[0], 0)
            if self.reduction == "none"
            else whole
        )


@bug(
    "linkedin/Liger-Kernel#243",
    "label smoothing is accepted and not handed on",
    LINEAR,
    label_smoothing=0.1,
)
class WithoutSmoothing(Head):
    def smoothing(self) -> float:
        return 0.0


@bug("Dao-AILab/quack#209, examples/audit/liger_second_backward.py", "a second backward scales the saved gradients once more",
     LINEAR, backwards=2, upstream="random")  # fmt: skip
class ScaledInPlace(Head):
    def upstream(self) -> Array:
        return super().upstream() * self.case.upstream("loss").astype(np.float64) ** (
            self.case.backwards - 1
        )


@bug(
    "examples/audit/liger_frozen_input.py",
    "hidden states without a gradient: the head gets none either",
    LINEAR,
    gradients=["dhead"],
)
class HeadForgotten(Head):
    def gradients(self) -> dict[str, Any]:
        found = super().gradients()
        return found if "dhidden" in found else dict.fromkeys(found)


@bug(
    "examples/audit/trl_fsdp2_head.py",
    "each process trains its shard of the head on its own batch alone",
    LINEAR,
)
class HeadNotReduced(Head):
    def projected(self, dx: Array) -> dict[str, Any]:
        found = super().projected(dx)
        half, hidden = len(dx) // 2, self.wide("hidden")
        own = [part.T @ x for part, x in ((dx[:half], hidden[:half]), (dx[half:], hidden[half:]))]
        v = dx.shape[-1] // 2
        return found | {"dhead": np.concatenate([own[0][:v], own[1][v:]])}


@bug(
    "pytorch/torchtitan#3418", "a shard's part of dhidden is taken for the sum over shards", LINEAR
)
class PartTakenForSum(Head):
    def projected(self, dx: Array) -> dict[str, Any]:
        v = dx.shape[-1] // 2
        return super().projected(dx) | {"dhidden": dx[:, :v] @ self.wide("head")[:v]}


@bug("axolotl-ai-cloud/axolotl#1601", "the head's gradient is added up over chunks in bfloat16", LINEAR,
     judged=("dhead",), batch_size=32, dtype="bf16")  # fmt: skip
class HeadAddedInHalf(Head):
    def projected(self, dx: Array) -> dict[str, Any]:
        found, hidden = super().projected(dx), self.wide("hidden")
        total = np.zeros_like(found["dhead"])
        for begin in range(0, len(dx), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            total = rounded(
                total + rounded(dx[chunk].T @ hidden[chunk], self.operand), self.operand
            )
        return found | {"dhead": total}


@bug("apple/ml-cross-entropy#18", "gradients of probabilities below 2^-12 are dropped", LINEAR)
class SmallDropped(Head):
    def loss_gradient(self) -> Array:
        return np.where(self.p < 2.0**-12, 0, super().loss_gradient())


@bug(
    "huggingface/trl#4303",
    "an LM head in bfloat16: logits of 8 bits under float32 log-probabilities",
    LINEAR_LOGPROBS,
    dtype="bf16",
)
class LogitsRounded(Head):
    def logits(self) -> Array:
        return rounded(super().logits(), self.operand)


@bug(
    "marin-community/marin#8217",
    "the forward's logits are bfloat16, the backward's are not",
    LINEAR,
    judged=("dhead", "dhidden"),
    dtype="bf16",
)
class ForwardRounded(Head):
    def gradient(self) -> Array:
        lse = LogitsRounded(self.case)
        self.p = np.exp(self.z - (lse.m + lse.log_sum)[:, None])
        return super().gradient()


@bug(
    "examples/audit/tokamax_vocab_blocks.py",
    "no block divides the vocabulary: columns after the last one count",
    LINEAR,
    vocab_size=200,
)
class BlockOverrun(Head):
    """What stands there in memory is the head's first row again."""

    def sum(self) -> Array:
        more = self.z[:, : -self.z.shape[-1] % 128]
        return super().sum() + np.exp(more - self.m[:, None]).sum(-1)
