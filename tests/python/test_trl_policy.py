"""GRPO and RLOO trainers on a tiny Qwen2, with the patch against without.

Losses, metrics, gradients and weights have to be the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig

from tileloss.integrations import trl as integration
from tileloss.torch import call_counts
from trl_runs import FixedGRPO, FixedRLOO, Run, assert_same, make_model, prompts_and, train

# transformers and TRL announce what their next major versions drop, some of it each time.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v:FutureWarning")

# Three steps in float32. Seen: 1e-6 to 4e-6.
TOLERANCE = 5e-5

# Two steps on each set of completions, so that the ratios of the second are not 1, with a reference
# model.
COMMON = {
    "num_generations": 4,
    "max_completion_length": 10,
    "num_iterations": 2,
    "beta": 0.1,
    "learning_rate": 2e-3,
}
SEQUENCE = {"importance_sampling_level": "sequence", "learning_rate": 2e-4, "epsilon": 0.05}

LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": {"epsilon_high": 2.0},
    "sapo": {},
    "luspo": SEQUENCE,
    "vespo": {},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gspo": {"loss_type": "grpo"} | SEQUENCE,
    "temperature": {"temperature": 0.7},
    "entropy_bonus": {"entropy_coef": 0.05},
    "high_entropy_tokens": {"top_entropy_quantile": 0.5, "entropy_coef": 0.05},
    "delta": {"delta": 1.1},
    "off_policy_mask": {"off_policy_mask_threshold": 0.01},
    "no_reference": {"beta": 0.0},
    "float32_head": {"cast_lm_head_to_fp32": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen2"))


def train_twice(trainer: type, config: type, folder: Path, **options: Any) -> tuple[Run, Run]:
    """TRL's own run and the one on TileLoss. The completions are given: neither calls lm_head."""
    options = COMMON | options
    data = prompts_and()
    start = call_counts()
    own = train(trainer, config, folder, data, **options)
    assert call_counts() == start
    with integration.patch():
        ours = train(trainer, config, folder, data, **options)
    counts = {name: count - start.get(name, 0) for name, count in call_counts().items()}
    assert (
        counts["linear_logprobs/forward"]
        >= counts["linear_logprobs/backward"]
        == 2 * options.get("max_steps", 3)
    )
    assert own.head_calls == ours.head_calls == 0
    return own, ours


def assert_some_tokens_are_clipped(run: Run) -> None:
    shares = [
        log[name]
        for log in run.logs
        for name in ("clip_ratio/region_mean", "cispo_clip_ratio")
        if name in log
    ]
    assert any(0.0 < share < 1.0 for share in shares), f"shares of clipped ratios: {shares}"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo(folder, loss_type):
    own, ours = train_twice(
        FixedGRPO, GRPOConfig, folder, loss_type=loss_type, **LOSS_TYPES[loss_type]
    )
    if loss_type not in ("sapo", "vespo"):
        assert_some_tokens_are_clipped(own)
    assert_same(own, ours, TOLERANCE)


def test_grpo_has_no_further_loss_types():
    """The list above is TRL's own: its documentation of the option names each."""
    documented = (
        GRPOConfig.__dataclass_fields__["loss_type"]
        .metadata["help"]
        .partition("Supported values are ")[2]
    )
    assert sorted(documented.partition(".")[0].split("'")[1::2]) == sorted(LOSS_TYPES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_grpo_variants(folder, variant):
    own, ours = train_twice(FixedGRPO, GRPOConfig, folder, **VARIANTS[variant])
    assert_same(own, ours, TOLERANCE)


def test_grpo_on_its_own_completions(folder):
    """The model generates: lm_head is called as often as without the patch, for sampling alone."""
    data = prompts_and()
    options = COMMON | {"max_steps": 1}
    own = train(GRPOTrainer, GRPOConfig, folder, data, **options)
    with integration.patch():
        ours = train(GRPOTrainer, GRPOConfig, folder, data, **options)
    assert own.head_calls == ours.head_calls > 0
    assert_same(own, ours, TOLERANCE)


def test_grpo_in_bfloat16(folder):
    """Weights, products and TRL's logits are bfloat16: 2^-9 of logits of up to 8. Seen: 0.013."""
    own, ours = train_twice(FixedGRPO, GRPOConfig, folder, model_dtype=torch.bfloat16, max_steps=1)
    assert {p.dtype for p in ours.weights.values()} == {torch.bfloat16}
    assert_same(own, ours, 0.05)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"beta": 0.0}],
    ids=["rloo", "temperature", "no_reference"],
)
def test_rloo(folder, options):
    own, ours = train_twice(FixedRLOO, RLOOConfig, folder, learning_rate=1e-4, **options)
    assert_some_tokens_are_clipped(own)
    assert_same(own, ours, TOLERANCE)
