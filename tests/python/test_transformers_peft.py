"""Patched models that peft adapts: with the head trained whole as unpatched, with LoRA on the head too."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peft_models import with_lora
from tileloss.integrations.transformers import make_compute_loss_func, patch, unpatch
from transformers_models import HeadCalls, backward, batch, build, check_gradients, check_step

TOLERANCE = 1e-5
ADAPTED: dict[str, Callable[[Any], Any]] = {
    "before": lambda model: with_lora(patch(model), modules_to_save=["lm_head"]),
    "after": lambda model: patched_inside(with_lora(model, modules_to_save=["lm_head"])),
}


def patched_inside(adapted: Any) -> Any:
    patch(adapted.get_base_model())
    return adapted


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi", "gemma2"])  # tied, bias, soft-cap
@pytest.mark.parametrize("when", ADAPTED)
def test_a_head_in_modules_to_save_is_trained_as_unpatched(kind: str, when: str) -> None:
    unpatched = with_lora(build(kind), modules_to_save=["lm_head"])
    patched = ADAPTED[when](build(kind))
    calls = HeadCalls(patched.get_base_model())
    check_step(unpatched, patched)
    assert calls.count == 0
    head = patched.get_base_model().lm_head
    assert head.modules_to_save["default"].weight.grad.abs().max() > 0
    assert head.original_module.weight.grad is None


@pytest.mark.parametrize("which", ["disabled", "another adapter", "an adapter without a head"])
def test_the_head_is_that_of_the_active_adapter(which: str) -> None:
    models = {}
    for name in ("unpatched", "patched"):
        adapted = with_lora(build("llama"), modules_to_save=["lm_head"])
        base = adapted.get_base_model()
        models[name] = adapted if name == "unpatched" else patched_inside(adapted)
        with torch.no_grad():
            base.lm_head.modules_to_save["default"].weight.mul_(1.5)
        saved = None if which == "an adapter without a head" else ["lm_head"]
        config = copy.deepcopy(adapted.peft_config["default"])
        config.modules_to_save = saved
        adapted.add_adapter("second", config)
        if which != "disabled":
            adapted.set_adapter("second")
    losses = []
    for model in models.values():
        off = model.disable_adapter() if which == "disabled" else contextlib.nullcontext()
        with off:
            losses.append(model(**batch()).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=TOLERANCE, atol=0)
    if which != "disabled":  # then nothing is trained
        losses[0].backward(), losses[1].backward()
        check_gradients(*models.values(), TOLERANCE)
    models["patched"].set_adapter("default")
    other = models["patched"](**batch()).loss
    assert abs(float(other.detach() - losses[1].detach())) > 1e-2


def test_smoothed_labels_with_a_head_in_modules_to_save() -> None:
    losses = []
    for adapted in (with_lora(build("llama"), modules_to_save=["lm_head"]) for _ in range(2)):
        smooth = make_compute_loss_func(patch(adapted.get_base_model()), label_smoothing=0.1)
        inputs = batch()
        labels = inputs.pop("labels")
        adapted.train(not losses)  # the second time from logits
        losses.append(smooth(adapted(**inputs), labels))
    torch.testing.assert_close(losses[0], losses[1], rtol=TOLERANCE, atol=0)


IN_HEAD = ["q_proj", "lm_head"]


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma2"])  # bias, tied with soft-cap
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_lora_on_the_head_is_trained_as_unpatched(kind: str, when: str, dropout: float) -> None:
    def adapted(model: Any) -> Any:
        return with_lora(model, target_modules=IN_HEAD, lora_dropout=dropout)

    unpatched = adapted(build(kind)).train()
    patched = (
        adapted(patch(build(kind))) if when == "before" else patched_inside(adapted(build(kind)))
    )
    calls = HeadCalls(patched.get_base_model())
    found = []
    for model in (unpatched, patched.train()):
        torch.manual_seed(3)
        found.append(backward(model, batch()))
    assert found[1].logits is None and calls.count == 0
    torch.testing.assert_close(found[1].loss, found[0].loss, rtol=TOLERANCE, atol=0)
    check_gradients(unpatched, patched, TOLERANCE)
    head = patched.get_base_model().lm_head
    assert head.base_layer.weight.grad is None
    assert head.lora_A["default"].weight.grad.abs().max() > 0
    assert head.lora_B["default"].weight.grad.abs().max() > 0


@pytest.mark.parametrize("which", ["disabled", "merged", "both", "the second"])
def test_lora_on_the_head_is_that_of_the_active_adapters(which: str) -> None:
    losses, inputs = [], batch()
    for prepare in (lambda model: model, patch):
        adapted = with_lora(prepare(build("llama")), target_modules=IN_HEAD)
        config = copy.deepcopy(adapted.peft_config["default"])
        config.r = 3
        adapted.add_adapter("second", config)
        torch.nn.init.normal_(
            adapted.get_base_model().lm_head.lora_B["second"].weight,
            generator=torch.Generator().manual_seed(5),
        )
        torch.nn.init.normal_(
            adapted.get_base_model().lm_head.lora_A["second"].weight,
            generator=torch.Generator().manual_seed(6),
        )
        if which == "merged":
            adapted.merge_adapter()
        elif which != "disabled":
            adapted.base_model.set_adapter(["default", "second"] if which == "both" else "second")
        off = adapted.disable_adapter() if which == "disabled" else contextlib.nullcontext()
        with off:
            losses.append(adapted(**inputs).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=TOLERANCE, atol=0)


def test_hooks_on_lora_of_the_head_are_refused() -> None:
    adapted = with_lora(patch(build("llama"), logits_in_evaluation=False), target_modules=IN_HEAD)
    adapted.add_adapter("second", copy.deepcopy(adapted.peft_config["default"]))
    inputs = batch()
    handle = adapted.get_base_model().lm_head.lora_B["default"].register_forward_hook(print)
    with pytest.raises(
        ValueError, match=r"expected plain LoRA .* got hooks of lora_B\['default'\]"
    ):
        adapted.train()(**inputs)
    handle.remove()
    assert adapted(**inputs).logits is None
    names = ["second"] * len(inputs["input_ids"])
    with pytest.raises(ValueError, match=r"expected a batch of one adapter, .* got adapter_names"):
        adapted.eval()(**inputs, adapter_names=names)


def test_a_variant_of_lora_in_the_head_is_refused_with_what_to_do() -> None:
    message = (
        r"LlamaForCausalLM\.lm_head: expected plain LoRA on the LM head, got adapter 'default', of a variant .*: leave the head "
        r"out of target_modules, or train it whole by modules_to_save"
    )
    adapted = with_lora(patch(build("llama")), target_modules=IN_HEAD, use_dora=True)
    with pytest.raises(ValueError, match=message):
        adapted(**batch())
    unpatch(adapted.get_base_model())
    assert adapted(**batch()).logits is not None
