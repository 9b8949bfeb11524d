"""transformers.Trainer on a patched model against the same run unpatched; label smoothing without logits."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from tileloss.integrations.transformers import make_compute_loss_func, patch, unpatch
from tileloss.torch import call_counts, linear_cross_entropy
from transformers_models import VOCAB, HeadCalls, batch, build, check_gradients
from two_ranks import on_two_ranks

SMOOTHING = 0.1
# See test_transformers_patch.py; a few optimizer steps multiply the difference.
TOLERANCE = 5e-6


def rows(count: int) -> list[dict[str, list[int]]]:
    """Sequences of one length; each has another number of labels, so that num_items_in_batch matters."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB, (count, 10), generator=generator)
    return [
        {"input_ids": row.tolist(), "labels": [-100] * (i % 7) + row.tolist()[i % 7 :]}
        for i, row in enumerate(ids)
    ]


def train(model: PreTrainedModel, folder: Path, smooth: Any = None, **options: Any) -> Trainer:
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **(defaults | options)),
        train_dataset=rows(12),
        eval_dataset=rows(4),
        compute_loss_func=smooth,
    )
    trainer.train()
    return trainer


def logged(trainer: Trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def check_weights(unpatched: PreTrainedModel, patched: PreTrainedModel, tolerance: float) -> None:
    for (name, want), got in zip(unpatched.named_parameters(), patched.parameters(), strict=True):
        atol = tolerance * float(want.detach().abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=name)


# With label smoothing by a compute_loss_func, as Trainer has it by its label_smoother.
@pytest.mark.parametrize(("kind", "smoothing"), [("qwen2", 0.0), ("gemma2", SMOOTHING)])
def test_a_run_with_gradient_accumulation_ends_at_the_same_weights(
    kind: str, smoothing: float, tmp_path: Path
) -> None:
    unpatched = build(kind)
    start = {name: p.detach().clone() for name, p in unpatched.named_parameters()}
    patched = patch(copy.deepcopy(unpatched))
    smooth = make_compute_loss_func(patched, label_smoothing=smoothing) if smoothing else None
    own = train(unpatched, tmp_path, label_smoothing_factor=smoothing)
    calls, head_calls = dict(call_counts()), HeadCalls(patched)
    ours = train(patched, tmp_path, smooth)
    assert head_calls.count == 0
    assert sum(call_counts().values()) - sum(calls.values()) >= 6  # 3 steps of 2 batches
    assert len(logged(ours)) == 3
    assert logged(ours) == pytest.approx(logged(own), rel=1e-5)
    assert any((p - start[name]).abs().max() > 1e-3 for name, p in patched.named_parameters())
    check_weights(unpatched, patched, 1e-5)
    assert ours.evaluate()["eval_loss"] == pytest.approx(own.evaluate()["eval_loss"], rel=1e-5)
    assert head_calls.count > 0


def test_a_run_in_mixed_precision(tmp_path: Path) -> None:
    unpatched = build("llama")
    patched = patch(copy.deepcopy(unpatched))
    own, ours = (train(m, tmp_path, bf16=True) for m in (unpatched, patched))
    assert logged(ours) == pytest.approx(logged(own), rel=2.0**-8)


def test_a_run_in_mixed_precision_and_its_unwrapping_leave_the_patch(tmp_path: Path) -> None:
    """accelerate wraps the forward, leaves it so, and unwraps it down to the innermost __wrapped__."""
    model = patch(build("llama"))
    trainer = train(model, tmp_path, bf16=True)
    assert model.train()(**batch()).logits is None
    assert patch(model) is model
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert model(**batch()).logits is None
    assert unpatch(model)(**batch()).logits is not None
    assert patch(model)(**batch()).logits is None


def test_another_loss_on_hidden_states_says_what_is_missing() -> None:
    model = patch(build("llama"))
    make_compute_loss_func(model)
    inputs = batch()
    labels = inputs.pop("labels")
    with pytest.raises(KeyError, match=r"make_compute_loss_func was called .* unpatch\(\) it"):
        LabelSmoother(SMOOTHING)(model(**inputs), labels, shift_labels=True)


def test_two_processes_with_a_compute_loss_func(tmp_path: Path) -> None:
    """DDP with Trainer's find_unused_parameters, which looks for the head in the graph of the forward's outputs."""
    own, ours = on_two_ranks("ddp_losses.py", str(tmp_path))
    assert ours == pytest.approx(own, rel=1e-5)


def test_label_smoothing_in_mixed_precision_multiplies_in_bfloat16(tmp_path: Path) -> None:
    """Trainer calls the loss function outside of autocast, with an output that accelerate made float32."""
    unpatched = build("llama")
    patched = patch(copy.deepcopy(unpatched))
    smooth = make_compute_loss_func(patched, label_smoothing=SMOOTHING)
    seen = []

    def recording(
        outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor
    ) -> torch.Tensor:
        assert (outputs.hidden.dtype, outputs.compute_dtype) == (torch.float32, torch.bfloat16)
        loss = smooth(outputs, labels, num_items_in_batch=num_items_in_batch)
        moved = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        by_dtype = {
            dtype: linear_cross_entropy(
                outputs.hidden.detach(),
                patched.lm_head.weight.detach(),
                moved,
                label_smoothing=SMOOTHING,
                num_items=num_items_in_batch,
                compute_dtype=dtype,
            )
            for dtype in (torch.bfloat16, torch.float32)
        }
        assert by_dtype[torch.bfloat16] != by_dtype[torch.float32]
        torch.testing.assert_close(loss.detach(), by_dtype[torch.bfloat16], rtol=1e-6, atol=0)
        seen.append(loss)
        return loss

    own = train(unpatched, tmp_path, bf16=True, label_smoothing_factor=SMOOTHING)
    ours = train(patched, tmp_path, recording, bf16=True)
    assert len(seen) == 6
    assert logged(ours) == pytest.approx(logged(own), rel=2.0**-7)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "phi", "gpt2"])
@pytest.mark.parametrize("num_items", [None, 29])
def test_smoothed_loss_and_gradients_are_those_of_label_smoother(
    kind: str, num_items: int | None
) -> None:
    unpatched = build(kind)
    patched = patch(copy.deepcopy(unpatched))
    smooth = make_compute_loss_func(patched, label_smoothing=SMOOTHING)
    inputs = batch()
    labels = inputs.pop("labels")
    want = LabelSmoother(SMOOTHING)(
        unpatched(**inputs), labels, shift_labels=True, num_items_in_batch=num_items
    )
    want.backward()
    outputs = patched(**inputs)
    assert outputs.logits is None
    got = smooth(outputs, labels, num_items_in_batch=num_items)
    got.backward()
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=0)
    check_gradients(unpatched, patched, TOLERANCE)


def test_shift_labels_reach_the_compute_loss_func() -> None:
    patched = patch(build("llama"))
    smooth = make_compute_loss_func(patched)
    inputs = batch()
    labels = inputs.pop("labels")
    moved = torch.full_like(labels, -100)
    moved[0, 5] = 7
    want = patched(**inputs, labels=labels, shift_labels=moved).loss
    got = smooth(patched(**inputs, shift_labels=moved), labels)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_only_training_with_gradients_hands_out_hidden_states() -> None:
    patched = patch(build("llama"))
    inputs = batch()
    inputs.pop("labels")
    make_compute_loss_func(patched)
    assert patched(**inputs).logits is None
    with torch.no_grad():
        assert patched(**inputs).logits is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert patched.generate(inputs["input_ids"], max_new_tokens=2).shape[1] > 11
    assert patched.eval()(**inputs).logits is not None


def test_a_label_smoothing_out_of_range_is_refused() -> None:
    patched = patch(build("llama"))
    smooth = make_compute_loss_func(patched, label_smoothing=1.5)
    inputs = batch()
    labels = inputs.pop("labels")
    with pytest.raises(ValueError, match=r"label_smoothing.*1\.5"):
        smooth(patched(**inputs), labels)


def weighted_rows(count: int) -> list[dict[str, list[float]]]:
    generator = torch.Generator().manual_seed(9)
    weights = torch.rand(count, 10, generator=generator).tolist()
    return [row | {"token_weights": w} for row, w in zip(rows(count), weights, strict=True)]


def trainer_of(model: PreTrainedModel, folder: Path, data: Any, **more: Any) -> Trainer:
    options = {name: more.pop(name) for name in ("compute_metrics",) if name in more}
    settings = TrainingArguments(str(folder), use_cpu=True, report_to="none", **more)
    return Trainer(model, settings, eval_dataset=data, train_dataset=data, **options)


def test_trainer_keeps_a_data_sets_weights(tmp_path: Path) -> None:
    data = [row | {"unused": 1} for row in weighted_rows(4)]
    for model, kept in ((build("llama"), False), (patch(build("llama")), True)):
        batch = next(iter(trainer_of(model, tmp_path, data).get_eval_dataloader()))
        assert ("token_weights" in batch) == kept and "unused" not in batch
    trainer = trainer_of(model, tmp_path, data, per_device_eval_batch_size=4)
    given = {name: torch.tensor([row[name] for row in data]) for name in batch}
    want = model.eval()(**given, num_items_in_batch=(given["labels"][:, 1:] != -100).sum()).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(want.detach()), rel=1e-6)
    assert model(**given | {"token_weights": None}).loss != want


def test_evaluation_makes_no_logits_where_nobody_needs_them(tmp_path: Path) -> None:
    want = trainer_of(build("llama"), tmp_path, rows(4)).evaluate()["eval_loss"]
    for options, uses_liger in (({"logits_in_evaluation": False}, False), ({}, True)):
        patched = patch(build("llama"), **options)
        calls = HeadCalls(patched)
        trainer = trainer_of(patched, tmp_path, rows(4), prediction_loss_only=True)
        trainer.args.use_liger_kernel = uses_liger  # then Trainer says skip_logits
        assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-5)
        assert calls.count == 0


def test_compute_metrics_gets_the_token_accuracy(tmp_path: Path) -> None:
    """Of each batch, in place of its logits."""
    patched = patch(build("llama"), token_accuracy=True, logits_in_evaluation=False)
    found = []

    def metrics(given: Any) -> dict[str, float]:
        found.append(given.predictions)
        return {"accuracy": float(given.predictions.mean())}

    options = {"compute_metrics": metrics, "per_device_eval_batch_size": 2}
    result = trainer_of(patched, tmp_path, rows(6), **options).evaluate()
    assert found[0].shape == (3,) and result["eval_accuracy"] == pytest.approx(found[0].mean())
    by_hand = []
    for pair in (rows(6)[n : n + 2] for n in (0, 2, 4)):
        given = {name: torch.tensor([row[name] for row in pair]) for name in pair[0]}
        labels = given.pop("labels")[:, 1:]
        right = build("llama").eval()(**given).logits[:, :-1].argmax(-1) == labels
        by_hand.append(float(right[labels != -100].float().mean()))
    assert found[0].tolist() == pytest.approx(by_hand, rel=1e-6)
