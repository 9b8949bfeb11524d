"""The GRPO family in plain torch, from log-probabilities, as trainers write it (docs/users/losses.md has the formulas)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileloss.testing.case import Case, Refused

TENSORS = ("advantages", "old_logp", "ref_logp", "mask")
OPTIONS = (
    "kind", "ratio_level", "aggregation", "epsilon_low", "epsilon_high", "delta", "dual_clip", "cispo_cap", "cap_low", "tau_pos",
    "tau_neg", "beta", "kl_importance", "kl_estimator", "entropy_coef", "num_items", "max_length",
)  # fmt: skip


def refuse(case: Case) -> None:
    if case.options.get("kind", "clip") not in ("clip", "cispo", "sapo", "reinforce"):
        raise Refused(f"kind {case.options['kind']}: not offered")


def loss(case: Case, logp: Tensor, entropy: Tensor, used: Tensor) -> Tensor:
    """Of logp and entropy [N], the rows of a batch [B, T], and of which are in use [N]."""
    options, shape = case.options, (case.batch_size, case.seq_len)
    used = used.reshape(shape)
    logp, entropy = logp.reshape(shape), entropy.reshape(shape)
    old = case.torch("old_logp").reshape(shape) if "old_logp" in case.tensors else logp.detach()
    log_ratio = logp - old
    if options.get("ratio_level") == "sequence":
        mean = (log_ratio * used).sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand(shape)
    rho = log_ratio.exp()
    tokens = _token_loss(options, rho, logp, case.torch("advantages")[:, None])
    if options.get("beta"):
        kl = _kl(options, case.torch("ref_logp").reshape(shape) - logp)
        tokens = tokens + options["beta"] * (
            kl * rho if options.get("kl_importance") in (True, "true") else kl
        )
    bonus = (entropy * used).sum() / used.sum().clamp(min=1)
    return _aggregate(options, tokens, used) - options.get("entropy_coef", 0.0) * bonus


def _token_loss(options: dict[str, Any], rho: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    kind, low = options.get("kind", "clip"), options.get("epsilon_low", 0.2)
    high = options.get("epsilon_high", low)
    if kind == "clip":
        bounded = rho.clamp(max=options["delta"]) if "delta" in options else rho
        value = torch.min(bounded * advantages, rho.clamp(1 - low, 1 + high) * advantages)
        if "dual_clip" in options:
            most = options["dual_clip"] * advantages
            value = torch.where(advantages < 0, torch.max(value, most), value)
        return -value
    if kind == "cispo":
        cap = 1 + high if options.get("cispo_cap") == "one_plus" else high
        return -rho.clamp(options.get("cap_low"), cap).detach() * advantages * logp
    if kind == "sapo":
        tau = torch.where(advantages > 0, options.get("tau_pos", 1.0), options.get("tau_neg", 1.05))
        return -4 / tau * torch.sigmoid(tau * (rho - 1)) * advantages
    return -advantages * logp


def _kl(options: dict[str, Any], d: Tensor) -> Tensor:
    """Of d = ref_logp - logp."""
    estimator = options.get("kl_estimator", "k3")
    if estimator == "k1":
        return -d
    return d.square() / 2 if estimator == "k2" else d.exp() - d - 1


def _aggregate(options: dict[str, Any], tokens: Tensor, used: Tensor) -> Tensor:
    aggregation = options.get("aggregation", "seq_mean_token_mean")
    sums, counts = (tokens * used).sum(-1), used.sum(-1).clamp(min=1)
    if aggregation == "seq_mean_token_mean":
        return (sums / counts).mean()
    if aggregation == "token_mean":
        return sums.sum() / options.get("num_items", used.sum().clamp(min=1))
    if aggregation == "seq_mean_token_sum_norm":
        return sums.sum() / (len(sums) * options.get("max_length", tokens.shape[-1]))
    if aggregation == "seq_mean_token_sum":
        return sums.mean()
    if aggregation == "sum":
        return sums.sum() / options.get("num_items", 1)
    return (tokens * used).reshape(-1)
