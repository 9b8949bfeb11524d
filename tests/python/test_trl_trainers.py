"""SFT, DPO and KTO trainers on a tiny Qwen2, with the patch against without.

Losses, metrics, gradients and weights have to be the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from tileloss.integrations import trl as integration
from trl_runs import TOLERANCE, Run, assert_same, make_model, prompts_and, train, train_twice

# transformers and TRL announce what their next major versions drop, some of it each time.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v:FutureWarning")
MICRO_BATCHES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def logprobs_twice(*args: Any, **options: Any) -> tuple[Run, Run, dict[str, int]]:
    return train_twice(*args, "linear_logprobs", **options)


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
    logprobs_twice(
        SFTTrainer, SFTConfig, folder, prompts_and("completion"), learning_rate=0.2, **options
    )


def test_sft_of_a_tied_head(tied_folder):
    own, *_ = logprobs_twice(SFTTrainer, SFTConfig, tied_folder, prompts_and("completion"))
    assert "lm_head.weight" not in own.weights


# bfloat16 products; TRL rounds the logits too, 2^-9 of up to 8. Seen: 0.010 under autocast.
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"bf16": True}, 0.02), ({"model_dtype": torch.bfloat16}, 0.05)],
    ids=["autocast", "bfloat16"],
)
def test_sft_of_narrow_products(folder, options, tolerance):
    data = prompts_and("completion")
    _, ours, _ = logprobs_twice(SFTTrainer, SFTConfig, folder, data, tolerance=tolerance, **options)
    expected = options.get("model_dtype", torch.float32)
    assert {p.dtype for p in ours.weights.values()} == {expected}


class WeightedCollator:
    """Each row of a data set has `input_ids`, `labels` and a weight for each label, here all of one length."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        made = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        return made | {"attention_mask": torch.ones_like(made["input_ids"])}


def weighted_rows(weigh: bool = True) -> Dataset:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 199, (8, 9), generator=generator)
    weights = torch.rand(ids.shape, generator=generator)
    labels = ids.masked_fill(torch.arange(9) < 3, -100)
    columns = {"input_ids": ids.tolist(), "labels": labels.tolist()}
    return Dataset.from_dict(columns | {"token_weights": weights.tolist()} if weigh else columns)


def sft(folder: Path, data: Dataset, compute_loss_func: Any = None, **options: Any) -> SFTTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": 2,
        "logging_steps": 1,
    }
    settings |= {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
    }
    settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    settings |= {"bf16": False, "report_to": [], "save_strategy": "no", "optim": "sgd", "seed": 3}
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=SFTConfig(**(settings | options)),
        train_dataset=data,
        data_collator=WeightedCollator(),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        compute_loss_func=compute_loss_func,
    )


@pytest.mark.parametrize("num_items", [None, 29])
def test_sft_with_a_weight_for_each_token(folder, num_items):
    trainer = sft(folder, weighted_rows())
    model, inputs = trainer.model.train(), WeightedCollator()(list(weighted_rows())[:3])
    labels, weights = inputs["labels"][:, 1:], inputs["token_weights"][:, 1:]
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    want = (losses * weights).sum() / (num_items or (labels != -100).sum())
    gradients = torch.autograd.grad(want, list(model.parameters()))
    with integration.patch():
        got = trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    found = torch.autograd.grad(got, list(model.parameters()))
    largest = max(float(g.abs().max()) for g in gradients)
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * largest)
    own = trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
    assert abs(float(own.detach()) / float(want.detach()) - 1) > 0.1  # TRL swallows them


def test_sft_trains_on_weights(folder):
    """Weights of 1 change nothing, others do."""
    ones = weighted_rows().map(lambda row: {"token_weights": [1.0] * 9})
    losses = []
    with integration.patch():
        for data in (weighted_rows(weigh=False), ones, weighted_rows()):
            trainer = sft(folder, data)
            trainer.train()
            losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] != pytest.approx(losses[0], rel=0.1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"compute_loss_func": lambda *_, **__: None}, "compute_loss_func"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_beside_another_loss_are_refused(folder, options, what):
    trainer = sft(folder, weighted_rows(), **options)
    inputs = WeightedCollator()(list(weighted_rows())[:3])
    with integration.patch():
        with pytest.raises(ValueError, match=f"token_weights: .* beside {what}"):
            trainer.compute_loss(trainer.model, dict(inputs))
        weights = inputs.pop("token_weights")
        with pytest.raises(TypeError, match=r"SFTTrainer: .*'loss_weights'.*token_weights"):
            trainer.compute_loss(trainer.model, dict(inputs) | {"loss_weights": weights})


def test_weights_of_another_shape_are_refused(folder):
    trainer = sft(folder, weighted_rows())
    inputs = WeightedCollator()(list(weighted_rows())[:3])
    inputs["token_weights"] = inputs["token_weights"][:, :-1]
    with (
        integration.patch(),
        pytest.raises(ValueError, match=r"token_weights: expected the labels' sh"),
    ):
        trainer.compute_loss(trainer.model, inputs)


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
    logprobs_twice(DPOTrainer, DPOConfig, folder, prompts_and("chosen", "rejected"), **options)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(folder, loss_type):
    data = prompts_and("completion", "label")
    logprobs_twice(KTOTrainer, KTOConfig, folder, data, loss_type=loss_type)


def test_the_comparison_notices_a_wrong_function(folder, monkeypatch):
    """A temperature that is off by 1e-3 fails it: the tests above could fail."""
    original = integration.linear_logprobs

    def slightly_wrong(*args: Any, temperature: float, **kwargs: Any) -> Any:
        return original(*args, temperature=temperature * 1.001, **kwargs)

    monkeypatch.setattr(integration, "linear_logprobs", slightly_wrong)
    with pytest.raises(AssertionError, match="gradient of"):
        logprobs_twice(SFTTrainer, SFTConfig, folder, prompts_and("completion"))
    monkeypatch.undo()
