"""Policy losses as plain torch functions of the tokens in use, after docs/users/losses.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "seq_mean_token_sum_norm"},
    "dapo": {"aggregation": "token_mean"},
    "cispo": {"kind": "cispo", "aggregation": "token_mean"},
    "sapo": {"kind": "sapo"},
    "gspo": {"ratio_level": "sequence"},
    "luspo": {"ratio_level": "sequence", "aggregation": "seq_mean_token_sum"},
    "vespo": {"kind": "vespo", "aggregation": "token_mean"},
    "reinforce": {"kind": "reinforce", "aggregation": "token_mean"},
}
DEFAULTS: dict[str, Any] = {
    "kind": "clip", "ratio_level": "token", "aggregation": "seq_mean_token_mean", "cispo_cap": "raw",
    "epsilon_low": 0.2, "epsilon_high": None, "delta": math.inf, "dual_clip": math.inf, "cap_low": 0.0,
    "tau_pos": 1.0, "tau_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "log_ratio_clamp": math.inf, "sampler_correction": "off",
    "sampler_level": "token", "sampler_min": 0.0, "sampler_max": math.inf,
    "off_policy_threshold": math.inf, "entropy_quantile": None, "entropy_threshold": -math.inf,
    "beta": 0.0, "kl_estimator": "k3", "kl_importance": False, "kl_log_ratio_clamp": math.inf,
    "kl_clamp": math.inf, "entropy_coef": 0.0, "entropy_reduction": "token_mean", "num_items": None,
    "max_length": None,
}  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """The M tokens in use: of which of the `sequences` sequences each is, and its numbers, each [M], float64."""

    sequence: Tensor
    sequences: int
    max_length: int
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    sampler: Tensor | None = None


@dataclass(frozen=True)
class PolicyDefinition:
    """One policy loss. `options`: by the names of policy_loss, those of a preset included."""

    tokens: Tokens
    options: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return {**DEFAULTS, **self.options}[name]

    def per_sequence(self, values: Tensor) -> Tensor:
        zero = torch.zeros(self.tokens.sequences).double()
        return zero.index_add(0, self.tokens.sequence, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        return self.per_sequence(values) / self.per_sequence(torch.ones_like(values)).clamp(min=1)

    def clip_loss(self, rho: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        advantages = self.tokens.advantages
        clipped = torch.maximum(torch.minimum(rho, upper), lower)
        loss = -torch.minimum(rho.clamp(max=self.delta) * advantages, clipped * advantages)
        capped = loss.minimum(-self.dual_clip * advantages)
        return torch.where(advantages < 0, capped, loss) if self.dual_clip < math.inf else loss

    def token_loss(
        self, rho: Tensor, logp: Tensor, log_ratio: Tensor, correction: Tensor
    ) -> Tensor:
        advantages = self.tokens.advantages
        if self.kind == "clip":
            one = torch.ones(()).double()
            high = self.epsilon_low if self.epsilon_high is None else self.epsilon_high
            return self.clip_loss(rho, one - self.epsilon_low, one + high)
        if self.kind == "cispo":
            cap = self.epsilon_high + (self.cispo_cap == "one_plus")
            return -rho.detach().clamp(self.cap_low, cap) * advantages * logp
        if self.kind == "sapo":
            tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
            return -4 / tau * torch.sigmoid(tau * (rho - 1)) * advantages
        if self.kind == "vespo":
            return -self.phi(log_ratio, correction) * advantages * logp
        return -advantages * logp

    def phi(self, log_ratio: Tensor, correction: Tensor) -> Tensor:
        least = math.log(1e-8)
        terms = log_ratio.detach().clamp(-20, 20) + correction.log().clamp(least, 20)
        log_w = self.per_sequence(terms).clamp(least, 20)[self.tokens.sequence]
        gains = self.tokens.advantages >= 0
        k = torch.where(gains, self.vespo_k_pos, self.vespo_k_neg)
        rate = torch.where(gains, self.vespo_lambda_pos, self.vespo_lambda_neg)
        return torch.exp(rate + k * log_w - rate * log_w.exp())

    def correction(self, logp: Tensor) -> Tensor:
        """The sampler's ratio, [M]."""
        if self.sampler_correction == "off":
            return torch.ones_like(logp)
        assert self.tokens.sampler is not None
        old = logp.detach() if self.tokens.old is None else self.tokens.old
        difference = (old - self.tokens.sampler).nan_to_num(0)
        if self.sampler_level == "sequence":
            difference = self.per_sequence(difference)[self.tokens.sequence]
        ratio = difference.exp()
        kept = ratio.clamp(self.sampler_min, self.sampler_max)
        return (
            kept if self.sampler_correction == "truncate" else torch.where(ratio == kept, ratio, 0)
        )

    def kl(self, logp: Tensor, rho: Tensor) -> Tensor:
        if self.beta == 0:
            return torch.zeros_like(logp)
        assert self.tokens.ref is not None
        d = (self.tokens.ref - logp).clamp(-self.kl_log_ratio_clamp, self.kl_log_ratio_clamp)
        value = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[self.kl_estimator]
        value = value.clamp(-self.kl_clamp, self.kl_clamp)
        return self.beta * (value * rho if self.kl_importance else value)

    def kept(self, logp: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        """The off-policy mask and the entropy mask, [M] each."""
        sampled = self.tokens.sampler if self.tokens.sampler is not None else self.tokens.old
        on_policy = torch.ones_like(logp)
        if self.off_policy_threshold < math.inf:
            assert sampled is not None
            drift = self.sequence_mean((sampled - logp.detach()).nan_to_num(0))[
                self.tokens.sequence
            ]
            far = (drift > self.off_policy_threshold) & (self.tokens.advantages < 0)
            on_policy = (~far).double()
        least = self.entropy_threshold
        if self.entropy_quantile is not None:
            least = torch.quantile(entropy.detach(), 1 - self.entropy_quantile)
        return on_policy, (entropy.detach() >= least).double()

    def aggregate(self, loss: Tensor) -> Tensor:
        sums, count = self.per_sequence(loss), max(len(loss), 1)
        if self.aggregation == "seq_mean_token_mean":
            return self.sequence_mean(loss).mean()
        if self.aggregation == "token_mean":
            return sums.sum() / (count if self.num_items is None else self.num_items)
        if self.aggregation == "seq_mean_token_sum_norm":
            return sums.sum() / (
                self.tokens.sequences * (self.max_length or self.tokens.max_length)
            )
        if self.aggregation == "seq_mean_token_sum":
            return sums.mean()
        if self.aggregation == "sum":
            return sums.sum() / (self.num_items or 1)
        return loss

    def __call__(self, logp: Tensor, entropy: Tensor) -> Tensor:
        old = logp.detach() if self.tokens.old is None else self.tokens.old
        log_ratio = (logp - old).clamp(-self.log_ratio_clamp, self.log_ratio_clamp)
        level = log_ratio
        if self.ratio_level == "sequence":
            level = self.sequence_mean(log_ratio)[self.tokens.sequence]
        rho, correction = level.exp(), self.correction(logp)
        on_policy, surprising = self.kept(logp, entropy)
        loss = self.token_loss(rho, logp, log_ratio, correction) * on_policy * surprising
        loss = loss * (1 if self.kind == "vespo" else correction) + self.kl(logp, rho)
        if self.entropy_reduction == "as_loss":
            return self.aggregate(loss - self.entropy_coef * surprising * entropy)
        bonus = (surprising * entropy).sum() / surprising.sum().clamp(min=1)
        return self.aggregate(loss) - self.entropy_coef * bonus
