"""Bugs of policy losses: ratios, masks, and what the sum is divided by."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tileloss.testing.case import Refused
from tileloss.tools.audit.bugs.right import Array, Right
from tileloss.tools.audit.bugs.table import bug
from tileloss.tools.audit.cases import KL, LINEAR_POLICY, POLICY


class Policy(Right):
    """Clipped ratios of tokens or sequences, k3 KL, sampler ratio, entropy mask and bonus."""

    functions: ClassVar[tuple[str, ...]] = ("policy_loss",)
    options: ClassVar[tuple[str, ...]] = (
        "temperature", "ignore_index", "kind", "ratio_level", "aggregation", "epsilon_low", "epsilon_high", "beta",
        "num_items", "max_length", "sampler_correction", "sampler_max", "entropy_quantile", "entropy_coef",
    )  # fmt: skip
    tensors: ClassVar[tuple[str, ...]] = (
        "bias",
        "advantages",
        "old_logp",
        "ref_logp",
        "sampler_logp",
        "mask",
    )

    def tokens(self, name: str) -> Array:
        return self.wide(name).reshape(self.shape)

    @property
    def shape(self) -> tuple[int, int]:
        return self.case.batch_size, self.case.seq_len

    def prepare(self) -> None:
        if self.option.get("kind", "clip") != "clip":
            raise Refused("another kind than clip")
        self.mask = self.used.reshape(self.shape).astype(np.float64)
        self.new = self.logp.reshape(self.shape)
        self.lengths = np.maximum(self.mask.sum(-1, keepdims=True), 1)
        self.advantages = self.wide("advantages")[:, None]
        self.ratio = np.exp(self.log_ratio())

    def log_ratio(self) -> Array:
        d = (
            self.mask * (self.new - self.tokens("old_logp"))
            if "old_logp" in self.case.tensors
            else 0 * self.new
        )
        if self.option.get("ratio_level") == "sequence":
            d = d.sum(-1, keepdims=True) / self.lengths + 0 * d
        return d

    def clipped(self) -> tuple[Array, Array]:
        """l, and dl/dlog ratio."""
        low = self.option.get("epsilon_low", 0.2)
        ends = 1 - low, 1 + self.option.get("epsilon_high", low)
        free, bound = self.ratio * self.advantages, np.clip(self.ratio, *ends) * self.advantages
        inside = (ends[0] <= self.ratio) & (self.ratio <= ends[1])
        return -np.minimum(free, bound), np.where((free <= bound) | inside, -free, 0)

    def factor(self) -> Array:
        """Of l: the sampler's ratio, and which tokens the entropy mask keeps."""
        keep = self.mask * self.sampler_ratio()
        if "entropy_quantile" in self.option:
            entropy = self.entropy.reshape(self.shape)
            keep = keep * (
                entropy >= np.quantile(self.entropies(entropy), 1 - self.option["entropy_quantile"])
            )
        return keep

    def entropies(self, entropy: Array) -> Array:
        """Of which the quantile is taken."""
        return entropy[self.mask > 0]

    def sampler_ratio(self) -> Array | float:
        if self.option.get("sampler_correction", "off") != "truncate":
            return 1.0
        d = self.sampled() - self.tokens("sampler_logp")
        return np.minimum(np.exp(d), self.option.get("sampler_max", np.inf))

    def sampled(self) -> Array:
        return self.tokens("old_logp")

    def kl(self) -> tuple[Array, Array]:
        """beta K, and its derivative by logp."""
        beta = self.option.get("beta", 0)
        if not beta:
            return 0 * self.new, 0 * self.new
        d = self.log_ratio_to_ref()
        return beta * (np.exp(d) - d - 1), beta * (1 - np.exp(d))

    def log_ratio_to_ref(self) -> Array:
        return self.mask * (self.tokens("ref_logp") - self.new)

    def shares(self) -> Array:
        """[B,T]: of each token's loss in the loss."""
        kind, count = self.option.get("aggregation", "seq_mean_token_mean"), len(self.mask)
        if kind == "token_mean":
            return self.mask / self.number()
        if kind == "seq_mean_token_sum_norm":
            return self.mask / (count * self.option.get("max_length", self.shape[1]))
        return self.mask / count / (1 if kind == "seq_mean_token_sum" else self.lengths)

    def number(self) -> float:
        return float(self.option.get("num_items", max(self.mask.sum(), 1)))

    def loss(self) -> float:
        self.prepare()
        bonus = (
            self.option.get("entropy_coef", 0)
            * (self.used * self.entropy).sum()
            / max(self.used.sum(), 1)
        )
        each = self.factor() * self.clipped()[0] + self.kl()[0]
        return float((self.shares() * each).sum() - bonus)

    def gradient(self) -> Array:
        self.prepare()
        slope = self.shares() * self.factor() * self.clipped()[1]
        if self.option.get("ratio_level") == "sequence":
            slope = self.mask * slope.sum(-1, keepdims=True) / self.lengths
        g_logp = (slope + self.shares() * self.kl()[1]).reshape(-1)
        g_entropy = self.used * -self.option.get("entropy_coef", 0.0) / max(self.used.sum(), 1)
        upstream = self.case.upstream("loss").astype(np.float64)
        return self.logprobs_gradient(upstream * g_logp, upstream * g_entropy)


_SAMPLED = {
    "preset": "grpo",
    "sampler_logp_noise_scale": 0.5,
    "sampler_correction": "truncate",
    "sampler_max": 1.2,
}


@bug(
    "linkedin/Liger-Kernel#1082",
    "gradients ~100 x the other path's: the sampler's ratio left out",
    POLICY,
    **_SAMPLED,
)
class SamplerRatioLeftOut(Policy):
    def sampler_ratio(self) -> float:
        return 1.0


@bug(
    "THUDM/slime#179",
    "the sampler's ratio made of the new log-probabilities in place of the old",
    POLICY,
    **_SAMPLED,
)
class SamplerRatioOfNew(Policy):
    def sampled(self) -> Array:
        return self.new


@bug(
    "linkedin/Liger-Kernel#628",
    "grpo averaged over all tokens at once, not over each sequence first",
    LINEAR_POLICY,
    preset="grpo",
)
class TokensAveragedAtOnce(Policy):
    def shares(self) -> Array:
        return self.mask / max(self.mask.sum(), 1)


@bug(
    "huggingface/trl#5890",
    "dapo divided by its own batch's tokens, not by the given number",
    POLICY,
    preset="dapo",
    num_items=40,
)
class OwnTokensCounted(Policy):
    def number(self) -> float:
        return float(max(self.mask.sum(), 1))


@bug("modelscope/ms-swift#10117", "dapo divided by the accumulation steps on top of the given number of tokens",
     POLICY, preset="dapo", num_items=60)  # fmt: skip
class DividedTwice(Policy):
    steps = 4

    def number(self) -> float:
        return super().number() * self.steps


@bug("huggingface/trl#3709", "the entropy's quantile taken over padding too", POLICY,
     preset="grpo", mask_prob=0.5, entropy_quantile=0.5, expect_mostly_zero=True)  # fmt: skip
class QuantileOfPadding(Policy):
    def entropies(self, entropy: Array) -> Array:
        return entropy


@bug(
    "unslothai/unsloth-zoo#832",
    "log-probabilities without the sampler's temperature",
    POLICY,
    preset="grpo",
    temperature=0.7,
)
class WithoutTemperature(Policy):
    def temperature(self) -> float:
        return 1.0


@bug("examples/audit/liger_luspo_kl.py", "luspo with KL: masked tokens count in the sum", LINEAR_POLICY,
     preset="luspo", epsilon_low=0.08, epsilon_high=0.1, **KL)  # fmt: skip
class MaskedTokensCounted(Policy):
    """The mean over all places of a batch, times each sequence's length."""

    def shares(self) -> Array:
        return np.broadcast_to(self.lengths / self.mask.size, self.shape)

    def factor(self) -> Array:
        return np.ones(self.shape)

    def log_ratio_to_ref(self) -> Array:
        return self.tokens("ref_logp") - self.new

    def moving(self) -> Array:
        return np.ones_like(self.used)
