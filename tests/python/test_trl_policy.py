"""GRPO and RLOO trainers on a tiny Qwen2, with the patch against without.

Losses, metrics, gradients and weights have to be the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig

from tileloss.integrations import trl as integration
from trl_runs import (
    TOLERANCE,
    FixedGRPO,
    FixedRLOO,
    Run,
    assert_same,
    make_model,
    prompts_and,
    train,
    train_twice,
)

# transformers and TRL announce what their next major versions drop, some of it each time.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v:FutureWarning")

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


def logprobs_twice(trainer: type, config: type, folder: Path, **options: Any) -> Any:
    """The completions are given: nobody calls lm_head for them."""
    options = COMMON | options
    return train_twice(trainer, config, folder, prompts_and(), "linear_logprobs", **options)


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
    own, *_ = logprobs_twice(
        FixedGRPO, GRPOConfig, folder, loss_type=loss_type, **LOSS_TYPES[loss_type]
    )
    if loss_type not in ("sapo", "vespo"):
        assert_some_tokens_are_clipped(own)


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
    logprobs_twice(FixedGRPO, GRPOConfig, folder, **VARIANTS[variant])


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
    options = {"model_dtype": torch.bfloat16, "max_steps": 1, "tolerance": 0.05}
    _, ours, _ = logprobs_twice(FixedGRPO, GRPOConfig, folder, **options)
    assert {p.dtype for p in ours.weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"beta": 0.0}],
    ids=["rloo", "temperature", "no_reference"],
)
def test_rloo(folder, options):
    own, *_ = logprobs_twice(FixedRLOO, RLOOConfig, folder, learning_rate=1e-4, **options)
    assert_some_tokens_are_clipped(own)
