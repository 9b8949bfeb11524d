"""The options of every function, each with values and the company that it needs to matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_problems import ROWS, Problem
from tileloss._core.functions import FUNCTIONS

POLICY = FUNCTIONS["policy_loss"]
WARM = {"temperature": 1.7}

# By option: values, each with the company that it needs to matter.
LOGITS: dict[str, list[dict[str, Any]]] = {
    "logit_scale": [{"logit_scale": 0.5}],
    "softcap": [{"softcap": 5.0}],
    "temperature": [WARM],
    "temperature_on": [{"temperature_on": "logprob", **WARM}],
    "valid_vocab": [{"valid_vocab": 23}],
    "ignore_index": [{"ignore_index": 3}, {"ignore_index": -(2**62)}, {"ignore_index": 2**40}],
}
CROSS_ENTROPY: dict[str, list[dict[str, Any]]] = {
    **LOGITS,
    "label_smoothing": [{"label_smoothing": 0.1}, {"label_smoothing": 1.0}],
    "z_loss": [{"z_loss": 0.2}],
    "num_items": [{"num_items": 7.0}, {"num_items": 0.0}],
    "reduction": [{"reduction": name} for name in ("none", "sum", "mean")],
}
CISPO = {"kind": "cispo", "epsilon_high": 1.1}
SAPO, VESPO = {"kind": "sapo"}, {"kind": "vespo"}
SAMPLER = {"sampler_correction": "truncate", "sampler_min": 0.9, "sampler_max": 1.1}
MASKING = {"sampler_correction": "mask", "sampler_min": 0.8}
WITH_KL = {"beta": 0.3}
BONUS = {"entropy_coef": 0.1}
TOKEN_MEAN = {"aggregation": "token_mean"}
POLICY_LOSS: dict[str, list[dict[str, Any]]] = {
    **LOGITS,
    "kind": [{"kind": "clip"}, CISPO, SAPO, VESPO, {"kind": "reinforce"}],
    "ratio_level": [{"ratio_level": "sequence"}, {"ratio_level": "sequence", **WITH_KL}],
    "aggregation": [
        {"aggregation": "seq_mean_token_mean"},
        {"aggregation": "token_mean"},
        {"aggregation": "seq_mean_token_sum_norm", "max_length": 9},
        {"aggregation": "seq_mean_token_sum"},
        {"aggregation": "sum"},
        {"aggregation": "none"},
    ],
    "advantage_level": [{"advantage_level": "token"}],
    "cispo_cap": [{"kind": "cispo", "epsilon_high": 0.1, "cispo_cap": "one_plus"}],
    "epsilon_low": [{"epsilon_low": 0.05}],
    "epsilon_high": [{"epsilon_high": 0.05}],
    "delta": [{"delta": 1.01}],
    "dual_clip": [{"dual_clip": 1.01}],
    "cap_low": [{**CISPO, "cap_low": 0.9}],
    "tau_pos": [{**SAPO, "tau_pos": 0.5}],
    "tau_neg": [{**SAPO, "tau_neg": 2.5}],
    "vespo_k_pos": [{**VESPO, "vespo_k_pos": 1.0}],
    "vespo_lambda_pos": [{**VESPO, "vespo_lambda_pos": 0.0}],
    "vespo_k_neg": [{**VESPO, "vespo_k_neg": 1.0}],
    "vespo_lambda_neg": [{**VESPO, "vespo_lambda_neg": 1.0}],
    "log_ratio_clamp": [
        {"log_ratio_clamp": 0.15},
        {"log_ratio_clamp": 0.15, "ratio_level": "sequence"},
    ],
    "sampler_correction": [SAMPLER, MASKING, {"sampler_correction": "truncate"}],
    "sampler_level": [
        {**SAMPLER, "sampler_level": "sequence"},
        {**MASKING, "sampler_level": "sequence"},
    ],
    "sampler_min": [MASKING, {"sampler_correction": "mask", "sampler_min": 1.2}],
    "sampler_max": [{"sampler_correction": "mask", "sampler_max": 0.9}],
    "off_policy_threshold": [{"off_policy_threshold": -0.1}],
    "entropy_quantile": [{"entropy_quantile": 0.55}, {"entropy_quantile": 1.0}],
    "entropy_threshold": [{"entropy_threshold": 1.2}, {"entropy_threshold": 1.2, **BONUS}],
    "beta": [WITH_KL, {**WITH_KL, "log_ratio_clamp": 0.1}],
    "kl_estimator": [{**WITH_KL, "kl_estimator": name} for name in ("k1", "k2", "k3")],
    "kl_importance": [
        {**WITH_KL, "kl_importance": True},
        {**WITH_KL, "kl_importance": True, "ratio_level": "sequence"},
    ],
    "kl_log_ratio_clamp": [{**WITH_KL, "kl_log_ratio_clamp": 0.3}],
    "kl_clamp": [{**WITH_KL, "kl_clamp": 0.02}, {**WITH_KL, "kl_clamp": 0.1, "kl_estimator": "k1"}],
    "entropy_coef": [BONUS, {**BONUS, "entropy_quantile": 0.4}],
    "entropy_reduction": [{**BONUS, "entropy_reduction": "as_loss"}],
    "num_items": [{**TOKEN_MEAN, "num_items": 13.0}, {"aggregation": "sum", "num_items": 0.0}],
    "max_length": [{"aggregation": "seq_mean_token_sum_norm", "max_length": 11}],
}
ALL = {"logprobs": LOGITS, "cross_entropy": CROSS_ENTROPY, "policy_loss": POLICY_LOSS}


def cases(function: str) -> list[Any]:
    found = []
    for name, values in ALL[function].items():
        found += [pytest.param(value, id=f"{name}-{i}") for i, value in enumerate(values)]
    return found


def preset_options(preset: str) -> dict[str, Any]:
    return {"cispo": {"epsilon_high": 1.3}, "dr_grpo": {"max_length": 8}}.get(preset, {})


def with_weights(problem: Problem, which: int) -> Problem:
    """``which``: bits, 1 token weights, 2 class weights; with both a mask too."""
    random, tensors = np.random.default_rng(which), dict(problem.tensors)
    if which & 1:
        tensors["token_weights"] = random.uniform(0, 2, ROWS).astype(np.float32)
        tensors["token_weights"][5] = 0
        tensors["token_weights"][problem.labels == problem.option("ignore_index")] = np.nan
    if which & 2:
        tensors["class_weights"] = random.uniform(0, 2, problem.classes).astype(np.float32)
    if which == 3:
        tensors["mask"] = (np.arange(ROWS) % 4 > 0).astype(np.float32)
    return problem.but(tensors=tensors)
