"""Heads as people have them, patched against unpatched: offloaded, quantized, partly trained, sharded, cut over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from peft import TrainableTokensConfig, get_peft_model
from transformers.trainer_pt_utils import LabelSmoother

from peft_models import with_lora
from tileloss.integrations.transformers import make_compute_loss_func, patch, unpatch
from tileloss.torch import call_counts
from transformers_families import build_small
from transformers_models import HeadCalls, backward, batch, build, check_gradients
from two_ranks import on_two_ranks
from wrapped_tensors import NormalFloat, Opaque, Quantized, quantized

TOLERANCE = 1e-5


def check_same(unpatched: Any, patched: Any) -> None:
    """A step of both, and an evaluation without logits."""
    calls = dict(call_counts())
    want, got = backward(unpatched, batch()), backward(patched, batch())
    assert sum(call_counts().values()) > sum(calls.values()) and got.logits is None
    torch.testing.assert_close(got.loss, want.loss, rtol=TOLERANCE, atol=0)
    if any(p.grad is not None for p in unpatched.parameters()):
        check_gradients(unpatched, patched, TOLERANCE)
    unpatched.eval(), patched.eval()
    with torch.no_grad():
        want, got = unpatched(**batch()), patched(**batch(), skip_logits=True)
        assert got.logits is None
        torch.testing.assert_close(got.loss, want.loss, rtol=TOLERANCE, atol=0)
        assert torch.equal(patched(**batch()).logits, want.logits)
    unpatched.train(), patched.train()


# ------------------------------------------------------------------------------------------------------------ accelerate's hooks


def with_hidden_gradient(model: Any) -> Any:
    """Of an offloaded model, whose parameters get none: the gradient of what goes into it is what is compared."""
    inputs = batch()
    embeddings = torch.randn(
        *inputs.pop("input_ids").shape, 32, generator=torch.Generator().manual_seed(6)
    )
    outputs = model(**inputs, inputs_embeds=embeddings.requires_grad_())
    outputs.loss.backward()
    return outputs, embeddings.grad


CPU = torch.device("cpu")
DISPATCHED: dict[str, Callable[[Any, Path], Any]] = {
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device=CPU),
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device=CPU),
    "device_map": lambda model, folder: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "device_map of parts": lambda model, folder: dispatch_model(
        model, {name: "cpu" for name, _ in model.named_children()}, force_hooks=True
    ),
}


def in_second_tier(*values: Any, first: Any) -> list[Any]:
    return [first, *(pytest.param(value, marks=pytest.mark.full) for value in values)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", in_second_tier("qwen2", "phi", "BertLMHeadModel", first="llama"))
@pytest.mark.parametrize("dispatch", DISPATCHED.values(), ids=DISPATCHED)
def test_a_dispatched_model(
    dispatch: Callable[[Any, Path], Any], kind: str, when: str, tmp_path: Path
) -> None:
    unpatched = build_small(kind) if kind.startswith("Bert") else build(kind)
    patched = copy.deepcopy(unpatched)
    if when == "before":
        patch(dispatch(patched, tmp_path / "patched"))
    else:
        dispatch(patch(patched), tmp_path / "patched")
    dispatch(unpatched, tmp_path / "unpatched")
    (want, want_gradient), (got, gradient) = map(with_hidden_gradient, (unpatched, patched))
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss, rtol=TOLERANCE, atol=0)
    largest = float(want_gradient.abs().max())
    torch.testing.assert_close(gradient, want_gradient, rtol=0, atol=TOLERANCE * largest)
    check_same(unpatched, patched)
    assert unpatch(patched)(**batch()).logits is not None
    assert patch(patched)(**batch()).logits is None
    remove_hook_from_module(patched, recurse=True)
    unpatch(patched), patch(patched)


def test_an_offloaded_head_in_a_compute_loss_func() -> None:
    models = [cpu_offload(build("llama"), CPU), cpu_offload(patch(build("llama")), CPU)]
    inputs = batch()
    labels = inputs.pop("labels")
    want = LabelSmoother(0.1)(models[0](**inputs), labels, shift_labels=True)
    loss_of = make_compute_loss_func(models[1], label_smoothing=0.1)
    outputs = models[1](**inputs)
    assert outputs.logits is None
    torch.testing.assert_close(loss_of(outputs, labels), want, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("append", [False, True])
def test_a_hook_that_is_not_accelerates_own_is_refused(append: bool) -> None:
    class Halving(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return output * 0.5

    patched, model = patch(build("llama")), build("llama")
    for each in (patched, model):
        if append:  # in a row, nested as accelerate nests them
            add_hook_to_module(each.lm_head, AlignDevicesHook("cpu"))
        add_hook_to_module(each.lm_head, Halving(), append=append)
        if append:
            add_hook_to_module(each.lm_head, AlignDevicesHook("cpu"), append=True)
    with pytest.raises(
        ValueError, match=r"hooks of its own alone, got one with .*(Halving|Sequen)"
    ):
        patched(**batch())
    with pytest.raises(ValueError, match="without hooks, got one with a forward of its own"):
        patch(model)


def test_a_head_offloaded_in_a_way_that_is_not_known_is_refused_by_that_name() -> None:
    patched = patch(build("llama"))
    patched.lm_head.to("meta")
    with pytest.raises(
        NotImplementedError, match=r"LlamaForCausalLM.lm_head: .*meta.*offloaded by"
    ):
        patched(**batch())


def test_a_forward_over_accelerates_hook_is_refused() -> None:
    model = cpu_offload(build("llama"), execution_device=torch.device("cpu"))
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden) * 0.5
    with pytest.raises(ValueError, match="without hooks, got one with a forward of its own"):
        patch(model)


# ----------------------------------------------------------------------------------------------------- peft's trained rows


def with_trained_tokens(model: Any, indices: Any, after: bool, tuner: bool) -> Any:
    if tuner:  # as a tuner by itself, around both modules
        config = TrainableTokensConfig(
            token_indices=[4, 7, 30], target_modules=["embed_tokens", "lm_head"]
        )
        adapted = get_peft_model(model, config)
    else:
        adapted = with_lora(model, trainable_token_indices=indices)
    for name, parameter in adapted.named_parameters():
        if "trainable_tokens_delta" in name:
            torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(8))
    if after:
        patch(adapted.get_base_model())
    return adapted


TOKENS: dict[str, tuple[str, Any, bool]] = {
    "tied": ("qwen2", [4, 7, 30], False),
    "tied, soft-cap": ("gemma2", [4, 7, 30], False),
    "embedding and head": ("llama", {"embed_tokens": [4, 7], "lm_head": [9, 30]}, False),
    "embedding alone": ("llama", [4, 7], False),
    "a tuner by itself": ("llama", None, True),
}


@pytest.mark.parametrize("after", [False, True], ids=["patched before", "patched after"])
@pytest.mark.parametrize(("kind", "indices", "tuner"), TOKENS.values(), ids=TOKENS)
def test_trained_tokens(kind: str, indices: Any, tuner: bool, after: bool) -> None:
    unpatched = with_trained_tokens(build(kind), indices, False, tuner)
    model = build(kind) if after else patch(build(kind))
    patched = with_trained_tokens(model, indices, after, tuner)
    assert any("trainable_tokens_delta" in n for n, p in patched.named_parameters())
    check_same(unpatched, patched)
    with unpatched.disable_adapter(), patched.disable_adapter():
        torch.testing.assert_close(
            patched(**batch()).loss, unpatched(**batch()).loss, rtol=TOLERANCE, atol=0
        )
    for adapted in (unpatched, patched):
        adapted.merge_adapter()
    torch.testing.assert_close(
        patched(**batch()).loss, unpatched(**batch()).loss, rtol=TOLERANCE, atol=0
    )


def test_trained_tokens_reach_a_compute_loss_func() -> None:
    tokens = {"embed_tokens": [4, 7], "lm_head": [9]}
    unpatched = with_trained_tokens(build("llama"), tokens, False, False)
    patched = with_trained_tokens(patch(build("llama")), tokens, False, False)
    loss_of = make_compute_loss_func(patched.get_base_model())
    inputs = batch()
    want = backward(unpatched, inputs).loss
    labels = inputs.pop("labels")
    outputs = patched(**inputs)
    assert {trace.shape for trace in outputs.head} == {(0, 32)} and len(
        outputs.head
    ) == 2  # for DDP
    got = loss_of(outputs, labels)
    got.backward()
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=0)
    check_gradients(unpatched, patched, TOLERANCE)


def test_trained_tokens_of_a_head_with_bias_are_refused_by_that_name() -> None:
    adapted = with_trained_tokens(patch(build("phi")), {"lm_head": [4, 7]}, False, False)
    with pytest.raises(ValueError, match=r"without bias under peft's trainable_token_indices.*mod"):
        adapted(**batch())


# ------------------------------------------------------------------------------------------------------------- ZeRO-3, quantized


@pytest.mark.parametrize("attribute", ["ds_id", "ds_shape"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_zero3_is_refused_by_that_name(attribute: str, when: str) -> None:
    model = build("llama")
    if when == "after":
        patch(model)
    setattr(model.lm_head.weight, attribute, model.lm_head.weight.shape)
    model.lm_head.weight.data = torch.empty(0)
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM.lm_head: DeepSpeed ZeRO-3.*"):
        (patch(model) if when == "before" else model)(**batch())


@pytest.mark.parametrize("weight", [Quantized, NormalFloat])
def test_a_quantized_weight(weight: type[Quantized]) -> None:
    unpatched = build("llama")
    patched = copy.deepcopy(unpatched)
    patched.lm_head.weight = quantized((96, 32), weight)
    unpatched.lm_head.weight = torch.nn.Parameter(
        Quantized.dequantize(patched.lm_head.weight), requires_grad=False
    )
    calls = HeadCalls(unpatched)
    got = backward(patch(patched), batch())
    want = backward(unpatched, batch())
    torch.testing.assert_close(got.loss, want.loss, rtol=TOLERANCE, atol=0)
    check_gradients(unpatched, patched, TOLERANCE)
    assert calls.count > 0 and got.logits is None


def test_a_quantized_weight_without_a_way_back_is_refused() -> None:
    model = build("llama")
    model.lm_head.weight = quantized((96, 32), Opaque)
    with pytest.raises(
        TypeError, match=r"linear_weight: .*wrapper subclass wrapped_tensors.Opaque"
    ):
        patch(model)(**batch())


def test_a_module_of_a_quantized_head_is_refused_with_what_to_do() -> None:
    class Linear4bit(torch.nn.Linear):
        """As bitsandbytes': packed, with its own product."""

    model = build("llama")
    model.lm_head = Linear4bit(32, 96)
    with pytest.raises(
        ValueError, match=r"got .*Linear4bit.*leave the head out of the quantization"
    ):
        patch(model)


# ----------------------------------------------------------------------------------------------------------------- two processes


@pytest.mark.full
def test_two_processes_train_as_unpatched() -> None:
    """FSDP1, and transformers' tensor parallelism: loss and gradients to 1e-5."""
    for cases in on_two_ranks("head_ranks.py"):
        wrong = {case: error for case, error in cases.items() if not error <= TOLERANCE}
        assert wrong == {} and len(cases) == 16
