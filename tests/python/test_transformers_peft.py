"""Patched models that peft adapts: with the head trained whole as unpatched, with an adapter in the head refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peft_models import with_lora
from tileloss.integrations.transformers import make_compute_loss_func, patch, unpatch
from transformers_models import HeadCalls, backward, batch, build, check_gradients

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
    want, got = backward(unpatched, batch()), backward(patched, batch())
    assert got.logits is None and calls.count == 0
    torch.testing.assert_close(got.loss, want.loss, rtol=TOLERANCE, atol=0)
    check_gradients(unpatched, patched, TOLERANCE)
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


def test_an_adapter_in_the_head_is_refused_with_what_to_do() -> None:
    message = (
        r"LlamaForCausalLM\.lm_head: expected a plain torch\.nn\.Linear .* got peft\.tuners\.lora\.layer\.Linear, an adapter of "
        r"peft, .* leave the head out of target_modules, or train it whole by modules_to_save"
    )
    targets = ["q_proj", "lm_head"]
    with pytest.raises(ValueError, match=message):
        patched_inside(with_lora(build("llama"), target_modules=targets))
    adapted = with_lora(patch(build("llama")), target_modules=targets)
    with pytest.raises(ValueError, match=message):
        adapted(**batch())
    unpatch(adapted.get_base_model())
    assert adapted(**batch()).logits is not None
