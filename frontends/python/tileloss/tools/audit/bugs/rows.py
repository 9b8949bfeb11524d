"""Bugs of cross-entropy and log-probabilities from logits: sums over the vocabulary, rounding, reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tileloss.tools.audit.bugs.right import TILE, Array, Right, rounded
from tileloss.tools.audit.bugs.table import bug
from tileloss.tools.audit.cases import BF16, CROSS_ENTROPY, LOGPROBS, confident_labels, drawn

# ------------------------------------------------------------------------------------------------- sums over the vocabulary


def padding(right: Right) -> int:
    """Lanes of the last tile that are no columns."""
    return -right.z.shape[-1] % TILE


@bug(
    "apple/ml-cross-entropy#59",
    "a label of another shard matches a padded column of the last tile: inf",
    CROSS_ENTROPY,
    vocab_size=447,
)
class LabelInPadding(Right):
    def label_logp(self) -> Array:
        half = self.z.shape[-1] // 2
        return np.where(self.y < half, -np.inf, super().label_logp())


@bug("verl-project/verl#2656", "log-probabilities up to +123 where no tile divides the vocabulary", LOGPROBS,
     vocab_size=447, source=drawn("spike_last"), expect_mostly_zero=True)  # fmt: skip
class LastTileLeftOut(Right):
    """The ragged tile is in neither the maximum nor the sum."""

    def whole(self) -> Array:
        return self.z[:, : self.z.shape[-1] // TILE * TILE]

    def maximum(self) -> Array:
        return self.whole().max(-1)

    def sum(self) -> Array:
        return np.exp(self.whole() - self.m[:, None]).sum(-1)


@bug("verl-project/verl#7439", "the maximum starts at 0: logits that are all negative lose their row's scale", LOGPROBS,
     vocab_size=447, source=drawn("normal", std=3, offset=-50))  # fmt: skip
class MaximumFromZero(Right):
    def maximum(self) -> Array:
        return np.maximum(super().maximum(), 0)

    def sum(self) -> Array:
        return super().sum() + padding(self) * np.exp(-self.m)


@bug(
    "verl-project/verl#2899",
    "padded lanes of the last tile count as logits of 0",
    LOGPROBS,
    vocab_size=447,
)
class PaddingCounted(Right):
    def sum(self) -> Array:
        return super().sum() + padding(self) * np.exp(-self.m)


@bug("unslothai/unsloth#10616", "the softcap makes -cap of the padding's -inf, which then counts", CROSS_ENTROPY,
     vocab_size=447, softcap=5)  # fmt: skip
class PaddingCapped(Right):
    def sum(self) -> Array:
        capped = -self.option.get("softcap", np.inf) / self.temperature()
        return super().sum() + padding(self) * np.exp(capped - self.m)


@bug(
    "unslothai/unsloth-zoo#593",
    "x tanh(x / cap) in place of cap tanh(x / cap)",
    LOGPROBS,
    softcap=5,
)
class WrongSoftcap(Right):
    def softcap(self, u: Array) -> Array:
        return u * np.tanh(u / self.option["softcap"]) if "softcap" in self.option else u

    def slope(self) -> Array | float:
        if "softcap" not in self.option:
            return super().slope()
        t = np.tanh(self.x / self.option["softcap"])
        return t + self.x / self.option["softcap"] * (1 - t**2)


@bug("ml-explore/mlx#4188", "lse - logit at a common offset of 1e4: the loss moves in steps of 1e-3", LOGPROBS,
     source=drawn("offset_plus"), expect_mostly_zero=True)  # fmt: skip
class DifferenceOfLarge(Right):
    def lse(self) -> Array:
        return (self.m + self.log_sum).astype(np.float32)

    def label_logp(self) -> Array:
        return (self.z[self.rows, self.y].astype(np.float32) - self.lse()).astype(np.float64)


@bug("pytorch/pytorch#195829", "lse stored, probabilities as exp(z - lse): wrong at a common offset of -1e4", LOGPROBS,
     source=drawn("offset_minus"), expect_mostly_zero=True)  # fmt: skip
class ProbabilitiesOfLse(DifferenceOfLarge):
    def probabilities(self) -> Array:
        return np.exp(self.z - self.lse()[:, None].astype(np.float64))


# ------------------------------------------------------------------------------------------------------------------ rounding


@bug("linkedin/Liger-Kernel#1329", "the label's gradient 100 % off at p = 0.999: p is rounded before 1 is taken off",
     CROSS_ENTROPY, judged=("dlogits",), logits=confident_labels, **BF16)  # fmt: skip
class RoundedBeforeOne(Right):
    def gradient(self) -> Array:
        scale = self.upstream()
        dz = rounded(scale[:, None] * self.p, self.operand)
        dz[self.rows, self.y] -= scale
        return dz


@bug("NVIDIA/TransformerEngine#2325", "the forward's gradient kept in bfloat16, and scaled in the backward", CROSS_ENTROPY,
     judged=("dlogits",), upstream="random", **BF16)  # fmt: skip
class GradientRoundedTwice(RoundedBeforeOne):
    def gradient(self) -> Array:
        scale = self.case.upstream("loss").astype(np.float64)
        return (
            rounded(self.weights()[:, None] * self.loss_gradient(), self.operand) * scale[:, None]
        )


@bug("ml-explore/mlx#4520", "lse - logit in bfloat16, widened afterwards: losses 0.1 off", CROSS_ENTROPY,
     reduction="none", upstream="per_row", **BF16)  # fmt: skip
class DifferenceRounded(Right):
    def label_logp(self) -> Array:
        return rounded(super().label_logp(), self.operand)


@bug(
    "google-deepmind/optax#1020", "lse rounded to bfloat16: losses of 8 bits", CROSS_ENTROPY, **BF16
)
class LseRounded(Right):
    def label_logp(self) -> Array:
        return self.z[self.rows, self.y] - rounded(self.m + self.log_sum, self.operand)


@bug(
    "genlm/genlm-backend#66, examples/audit/trl_bfloat16_logprobs.py",
    "log-probabilities of bfloat16 logits are bfloat16",
    LOGPROBS,
    **BF16,
)
class LogpRounded(DifferenceRounded):
    pass


@bug(
    "examples/audit/torch_bfloat16_loss.py",
    "the reduced loss of bfloat16 logits is bfloat16",
    CROSS_ENTROPY,
    **BF16,
)
class LossRounded(Right):
    def loss(self) -> Any:
        return rounded(np.asarray(super().loss()), self.operand)


# ---------------------------------------------------------------------------------------------------------------- reductions


@bug("NVIDIA/TransformerEngine#2476", "the mean is over all rows, ignored ones too", CROSS_ENTROPY)
class MeanOfAll(Right):
    def denominator(self) -> float:
        return float(len(self.used))


@bug(
    "pytorch/pytorch#116349",
    "no row in use: the mean is 0 / 0",
    CROSS_ENTROPY,
    ignore_prob=1,
    expect_mostly_zero=True,
)
class MeanOfNone(Right):
    def loss(self) -> Any:
        return super().loss() if self.used.any() or self.reduction != "mean" else np.nan


@bug(
    "linkedin/Liger-Kernel#802",
    "the given number of tokens left out: each batch is divided by its own",
    CROSS_ENTROPY,
    num_items=100,
)
class OwnRowsCounted(Right):
    def denominator(self) -> float:
        return float(self.used.sum())


@bug("NVIDIA-NeMo/Automodel#3803", "means of chunks are added up: as many times the loss as there are chunks", CROSS_ENTROPY,
     batch_size=4, ignore_prob=0)  # fmt: skip
class MeansAdded(Right):
    chunk = 16

    def weights(self) -> Array:
        if self.reduction != "mean" or "num_items" in self.option:
            return super().weights()
        found = np.zeros(len(self.used))
        for begin in range(0, len(found), self.chunk):
            used = self.used[begin : begin + self.chunk]
            found[begin : begin + self.chunk] = used / max(used.sum(), 1)
        return found


@bug(
    "pytorch/torchtitan#2206",
    "the mean of micro-batches' means, which have unlike numbers of tokens",
    CROSS_ENTROPY,
    ignore_prob=0.5,
)
class MeanOfMeans(MeansAdded):
    def weights(self) -> Array:
        whole = super().weights()
        return whole * self.chunk / len(whole) if self.reduction == "mean" else whole


@bug(
    "linkedin/Liger-Kernel#421",
    "reduction none gives one value",
    CROSS_ENTROPY,
    reduction="none",
    upstream="per_row",
)
class ReducedAnyway(Right):
    def reduced(self, rows: Array) -> Any:
        return rows.sum()


@bug("ROCm/TransformerEngine#336", "reduction none: the gradient is divided by the number of rows all the same", CROSS_ENTROPY,
     reduction="none", upstream="per_row")  # fmt: skip
class DividedAnyway(Right):
    def upstream(self) -> Array:
        whole = super().upstream()
        return whole / len(whole) if self.reduction == "none" else whole


# ----------------------------------------------------------------------------------------------------------- label smoothing


@bug(
    "pytorch/pytorch#73205",
    "label smoothing counts ignored rows",
    CROSS_ENTROPY,
    label_smoothing=0.1,
    judged=("loss",),
)
class SmoothedIgnored(Right):
    def row_losses(self) -> Array:
        smooth = self.smoothing() * -self.log_p.mean(-1)
        return np.where(self.used, super().row_losses(), smooth)

    def weights(self) -> Array:
        return (
            np.full(len(self.used), 1.0)
            if self.reduction != "mean"
            else np.full(len(self.used), 1 / max(self.denominator(), 1))
        )

    def upstream(self) -> Array:
        return self.used * super().upstream()


@bug("NVIDIA/Megatron-LM#7466", "label smoothing over the label's shard of the vocabulary alone", CROSS_ENTROPY,
     label_smoothing=0.1, judged=("loss",))  # fmt: skip
class SmoothedShard(Right):
    def shards(self) -> Array:
        """[N,V]: 1 / V of the columns of the label's shard, there."""
        half = self.z.shape[-1] // 2
        same = (np.arange(self.z.shape[-1]) < half) == (self.y < half)[:, None]
        return same / same.sum(-1, keepdims=True)

    def row_losses(self) -> Array:
        s = self.smoothing()
        smooth = -(self.shards() * self.log_p).sum(-1)
        return np.where(self.used, -(1 - s) * self.logp + s * smooth, 0)

    def loss_gradient(self) -> Array:
        dz = self.p - self.smoothing() * self.shards()
        dz[self.rows, self.y] -= 1 - self.smoothing()
        return dz
