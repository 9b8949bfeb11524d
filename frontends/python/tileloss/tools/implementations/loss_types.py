"""TRL's names of policy losses and their arguments, which are Liger's too."""

from __future__ import annotations

from typing import Any

from tileloss.testing.case import Case, Refused

OPTIONS = (
    "kind", "ratio_level", "aggregation", "epsilon_low", "epsilon_high", "delta", "tau_pos", "tau_neg", "vespo_k_pos",
    "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "beta", "kl_importance", "num_items", "max_length",
)  # fmt: skip
_BY_AGGREGATION = {
    "seq_mean_token_mean": "grpo",
    "token_mean": "dapo",
    "seq_mean_token_sum_norm": "dr_grpo",
    "seq_mean_token_sum": "luspo",
}
_AGGREGATION = {"cispo": "token_mean", "vespo": "token_mean", "sapo": "seq_mean_token_mean"}


def _loss_type(options: dict[str, Any]) -> str:
    """Of a case's options. Raises Refused where it has no such loss."""
    kind = options.get("kind", "clip")
    aggregation = options.get("aggregation", "seq_mean_token_mean")
    if kind == "clip" and aggregation in _BY_AGGREGATION:
        return _BY_AGGREGATION[aggregation]
    if _AGGREGATION.get(kind) != aggregation:
        raise Refused(f"kind {kind} with aggregation {aggregation}: not offered")
    return str(kind)


def trl_arguments(case: Case) -> dict[str, Any]:
    """A case's options by these names. Raises Refused where there is no such loss."""
    options = case.options
    low = options.get("epsilon_low", 0.2)
    return {
        "loss_type": _loss_type(options),
        "beta": options.get("beta", 0.0),
        "epsilon_low": low,
        "epsilon_high": options.get("epsilon_high", low),
        "delta": options.get("delta"),
        "importance_sampling_level": options.get("ratio_level", "token"),
        "max_completion_length": options.get("max_length", case.seq_len),
        "sapo_temperature_pos": options.get("tau_pos", 1.0),
        "sapo_temperature_neg": options.get("tau_neg", 1.05),
        "use_bias_correction_kl": options.get("kl_importance") in (True, "true"),
    }
