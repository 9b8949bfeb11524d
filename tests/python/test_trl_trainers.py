"""SFT, DPO and KTO trainers on a tiny Qwen2, with the patch against without.

Losses, metrics, gradients and weights have to be the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from tileloss.integrations import trl as integration
from tileloss.torch import call_counts
from trl_runs import Run, assert_same, make_model, prompts_and, train

# transformers and TRL announce what their next major versions drop, some of it each time.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v:FutureWarning")

# Three steps in float32. Seen: 1e-6 to 8e-6; a temperature that is off by 1e-3 gives 4e-3.
TOLERANCE = 5e-5
MICRO_BATCHES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def train_twice(
    trainer: type, config: type, folder: Path, data: Dataset, **options: Any
) -> tuple[Run, Run]:
    """TRL's own run and the one on TileLoss, which has to have called linear_logprobs."""
    start = call_counts()
    own = train(trainer, config, folder, data, **options)
    assert call_counts() == start
    with integration.patch():
        ours = train(trainer, config, folder, data, **options)
    counts = {name: count - start.get(name, 0) for name, count in call_counts().items()}
    assert counts["linear_logprobs/forward"] >= counts["linear_logprobs/backward"] == MICRO_BATCHES
    return own, ours


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "dft"},
        {"packing": True, "max_length": 24, "per_device_train_batch_size": 2},
        {"gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=lambda options: next(iter(options), "nll"),
)
def test_sft(folder, options):
    data = prompts_and("completion")
    own, ours = train_twice(SFTTrainer, SFTConfig, folder, data, learning_rate=0.2, **options)
    assert own.head_calls == ours.head_calls == 0
    assert_same(own, ours, TOLERANCE)


def test_sft_of_a_tied_head(tied_folder):
    own, ours = train_twice(SFTTrainer, SFTConfig, tied_folder, prompts_and("completion"))
    assert own.head_calls == ours.head_calls == 0
    assert "lm_head.weight" not in own.weights
    assert_same(own, ours, TOLERANCE)


def test_sft_under_autocast(folder):
    """bfloat16 products; TRL rounds the logits too, 2^-9 of up to 8. Seen: 0.010."""
    own, ours = train_twice(SFTTrainer, SFTConfig, folder, prompts_and("completion"), bf16=True)
    assert own.head_calls == ours.head_calls == 0
    assert_same(own, ours, 0.02)


def test_sft_in_bfloat16(folder):
    own, ours = train_twice(
        SFTTrainer, SFTConfig, folder, prompts_and("completion"), model_dtype=torch.bfloat16
    )
    assert own.head_calls == ours.head_calls == 0
    assert {p.dtype for p in ours.weights.values()} == {torch.bfloat16}
    assert_same(own, ours, 0.05)


def test_sft_with_label_smoothing_uses_the_fused_head_for_its_metrics(folder):
    """TRL takes this loss from full logits, and its metrics alone from the fused head."""
    data = prompts_and("completion")
    own = train(SFTTrainer, SFTConfig, folder, data, label_smoothing_factor=0.1)
    with integration.patch():
        ours = train(SFTTrainer, SFTConfig, folder, data, label_smoothing_factor=0.1)
    assert own.head_calls == ours.head_calls == MICRO_BATCHES
    assert_same(own, ours, TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid"]},
        {"loss_type": ["sigmoid_norm", "sft"], "loss_weights": [1.0, 0.5]},
        {
            "loss_type": [
                "hinge",
                "ipo",
                "nca_pair",
                "sppo_hard",
                "apo_zero",
                "apo_down",
                "discopop",
                "bco_pair",
            ],
            "learning_rate": 1e-4,  # the sum's gradients are of the size of 1000
        },
        {"loss_type": ["robust", "exo_pair"], "label_smoothing": 0.1},
        {"loss_type": ["aot", "aot_unpaired"]},
        {"use_weighting": True},
        {"ld_alpha": 0.5},
        {"f_divergence_type": "js_divergence"},
        {"precompute_ref_log_probs": True},
    ],
    ids=lambda options: "-".join(options["loss_type"] if "loss_type" in options else options),
)
def test_dpo(folder, options):
    """Every loss type (several are summed), and use_weighting, which reads log_sum_sq_probs."""
    data = prompts_and("chosen", "rejected")
    own, ours = train_twice(DPOTrainer, DPOConfig, folder, data, **options)
    assert own.head_calls == ours.head_calls == 0
    assert_same(own, ours, TOLERANCE)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(folder, loss_type):
    data = prompts_and("completion", "label")
    own, ours = train_twice(KTOTrainer, KTOConfig, folder, data, loss_type=loss_type)
    assert own.head_calls == ours.head_calls == 0
    assert_same(own, ours, TOLERANCE)


def test_the_comparison_notices_a_wrong_function(folder, monkeypatch):
    """A temperature that is off by 1e-3 fails it: the tests above could fail."""
    original = integration.linear_logprobs

    def slightly_wrong(*args: Any, temperature: float, **kwargs: Any) -> Any:
        return original(*args, temperature=temperature * 1.001, **kwargs)

    monkeypatch.setattr(integration, "linear_logprobs", slightly_wrong)
    own, ours = train_twice(SFTTrainer, SFTConfig, folder, prompts_and("completion"))
    with pytest.raises(AssertionError, match="gradient of"):
        assert_same(own, ours, TOLERANCE)
    monkeypatch.undo()
