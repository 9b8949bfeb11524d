"""TRL's names of policy losses, which are Liger's too."""

from __future__ import annotations

from typing import Any

from tileloss.check.case import Refused

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


def loss_type(options: dict[str, Any]) -> str:
    """Of a case's options. Raises Refused where it has no such loss."""
    kind = options.get("kind", "clip")
    aggregation = options.get("aggregation", "seq_mean_token_mean")
    if kind == "clip" and aggregation in _BY_AGGREGATION:
        return _BY_AGGREGATION[aggregation]
    if _AGGREGATION.get(kind) != aggregation:
        raise Refused(f"kind {kind} with aggregation {aggregation}: not offered")
    return str(kind)
