"""Patched models whose forward is spelt unlike Llama's, against the same models unpatched."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from tileloss.integrations.transformers import make_compute_loss_func, patch, unpatch
from tileloss.torch import call_counts
from transformers_families import CLASSES, WITH_PICTURES, build_small
from transformers_models import OF_THE_DOCUMENT, backward, batch, check_gradients, check_step

pytestmark = OF_THE_DOCUMENT  # which says how many of these there are
TOLERANCE = 2e-5


def inputs_of(model: Any, name: str) -> dict[str, torch.Tensor]:
    known = inspect.signature(model.forward).parameters
    inputs = {key: value for key, value in batch().items() if key in known}
    inputs["labels"] = inputs["labels"].clamp(max=80)  # Inkling's logits are cut
    if name in WITH_PICTURES:
        inputs["pixel_values"] = torch.randn(
            2, 3, 28, 28, generator=torch.Generator().manual_seed(2)
        )
    return inputs


def as_tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else output.to_tuple()


@pytest.mark.parametrize("name", CLASSES)
def test_loss_gradients_and_outputs_are_those_of_the_unpatched_model(name: str) -> None:
    unpatched = build_small(name)
    patched = patch(copy.deepcopy(unpatched))
    inputs, calls = inputs_of(unpatched, name), sum(call_counts().values())
    want, got = check_step(unpatched, patched, inputs, TOLERANCE, rtol=1e-6, least=1e-3)
    assert sum(call_counts().values()) > calls
    assert type(got) is type(want)
    assert list(got.keys()) == [key for key in want.keys() if key != "logits"]


@pytest.mark.parametrize("name", ["Bart", "Roberta", "XGLM", "LlavaNextForConditionalGeneration"])
def test_eval_and_calls_without_labels_give_logits_as_before(name: str) -> None:
    unpatched = build_small(name)
    patched = patch(copy.deepcopy(unpatched))
    inputs = inputs_of(unpatched, name)
    labels = inputs.pop("labels")
    assert torch.equal(patched(**inputs).logits, unpatched(**inputs).logits)
    unpatched.eval(), patched.eval()
    want, got = unpatched(**inputs, labels=labels), patched(**inputs, labels=labels)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Bart", {"num_items_in_batch": 29}),  # torch's CrossEntropyLoss knows of no such option
        ("Bart", {"logits_to_keep": 5, "labels": batch()["labels"][:, -5:].contiguous()}),
        ("XGLM", {"output_hidden_states": True, "output_attentions": True}),  # capture_outputs
        ("XGLM", {"num_items_in_batch": 29, "return_dict": False}),
        ("LlavaNextForConditionalGeneration", {"return_dict": False}),
        ("CpmAnt", {"return_dict": False}),  # by hand
        ("PPFormulaNetForConditionalGeneration", {"shift_labels": batch()["labels"].flip(1)}),
        ("PPFormulaNetForConditionalGeneration", {"num_items_in_batch": 29}),
        ("T5Gemma2ForConditionalGeneration", {"num_items_in_batch": 29}),
        (
            "Moshi",
            {"logits_to_keep": torch.tensor([1, 4, 9]), "labels": batch()["labels"][:, [1, 4, 9]]},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_an_option_of_the_call_means_what_it_means_unpatched(
    name: str, options: dict[str, Any]
) -> None:
    unpatched = build_small(name)
    unpatched.set_attn_implementation("eager")
    patched = patch(copy.deepcopy(unpatched))
    inputs = inputs_of(unpatched, name) | options
    want, got = unpatched(**inputs), patched(**inputs)
    assert type(got) is type(want)
    own, ours = as_tuple(want)[0], as_tuple(got)[0]
    torch.testing.assert_close(ours, own, rtol=1e-6, atol=0)
    own.backward(), ours.backward()
    check_gradients(unpatched, patched, TOLERANCE, least=1e-3)
    assert len(as_tuple(got)) == len(as_tuple(want)) - 1
    for kept in options.keys() & {"output_hidden_states", "output_attentions"}:
        field = kept.removeprefix("output_")
        torch.testing.assert_close(getattr(got, field), getattr(want, field), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["Bart", "Roberta", "Electra", "Inkling", "T5Gemma2ForConditionalGeneration"]
)
def test_smoothed_labels_are_those_of_label_smoother(name: str) -> None:
    """Which shifts the labels of every causal LM, Bart's too, and of no other."""
    unpatched = build_small(name)
    patched = patch(copy.deepcopy(unpatched))
    smooth = make_compute_loss_func(patched, label_smoothing=0.1)
    inputs = inputs_of(unpatched, name)
    labels = inputs.pop("labels")
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    shifts = not name.startswith("T5")
    want = LabelSmoother(epsilon=0.1)(unpatched(**inputs), labels, shift_labels=shifts)
    got = smooth(patched(**inputs), labels)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    want.backward(), got.backward()
    check_gradients(unpatched, patched, TOLERANCE, least=1e-3)
    torch.testing.assert_close(smooth(patched.eval()(**inputs), labels), got, rtol=1e-6, atol=0)


def test_an_argument_is_renamed_as_the_decorator_says() -> None:
    """And refused by position, where the model's own forward would overlook it."""
    model = build_small("VideoLlavaForConditionalGeneration")
    model.model.register_forward_pre_hook(
        lambda *call: seen.append(call[-1]["pixel_values"]), with_kwargs=True
    )
    inputs, seen = inputs_of(model, "VideoLlavaForConditionalGeneration"), []
    for each in (model, patch(model)):
        with pytest.raises(AttributeError, match="'str' object has no attribute 'shape'"):
            each(**inputs, pixel_values_images="pictures")
    assert seen == ["pictures", "pictures"]
    with pytest.raises(TypeError, match="pixel_values_images: expected by keyword"):
        model(inputs["input_ids"], None, "pictures", labels=inputs["labels"])


@pytest.mark.parametrize("name", ["Bart", "Roberta"])
def test_a_head_of_another_size_than_the_config_says_is_refused(name: str) -> None:
    model = build_small(name)
    model.config.vocab_size += 1
    if name == "Bart":  # whose forward folds the logits by it
        with pytest.raises(ValueError, match=r"config\.vocab_size: expected the 96 rows .* got 97"):
            patch(model)
    else:
        patch(model)


def test_a_hook_within_a_head_of_several_modules_is_refused() -> None:
    model = build_small("BertLMHeadModel")
    model.cls.predictions.register_forward_hook(lambda *call: call[-1] * 0.5)
    with pytest.raises(ValueError, match=r"cls\.predictions: .* without hooks"):
        patch(model)


def test_a_text_model_inside_can_be_patched_where_the_whole_cannot() -> None:
    """Kosmos 2 hands its labels to the causal LM inside."""
    unpatched = build_small("Kosmos2ForConditionalGeneration")
    patched = copy.deepcopy(unpatched)
    with pytest.raises(ValueError, match="no statement of the kind"):
        patch(patched)
    patch(patched.text_model)
    inputs = batch() | {"image_embeds": torch.zeros(2, 4, 32)}
    inputs["image_embeds_position_mask"] = torch.arange(11).expand(2, 11) < 4
    check_step(unpatched, patched, inputs, TOLERANCE, rtol=1e-6, least=1e-3)


@pytest.mark.parametrize("name", ["Roberta", "LlavaNextForConditionalGeneration"])
def test_compiled_whole(name: str) -> None:
    """A head of several modules, a decorator."""
    unpatched = build_small(name)
    patched = patch(copy.deepcopy(unpatched))
    inputs = inputs_of(unpatched, name) | {"use_cache": False}
    torch._dynamo.reset()
    want = backward(unpatched, inputs)
    got = torch.compile(patched, fullgraph=True, backend="aot_eager")(**inputs)
    got.loss.backward()
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    check_gradients(unpatched, patched, TOLERANCE, least=1e-3)


def test_a_patch_around_a_causal_lm_ends_with_unpatch_and_reaches_no_other_call() -> None:
    unpatched = build_small("Llama4ForConditionalGeneration")
    patched = patch(copy.deepcopy(unpatched))
    inputs = inputs_of(unpatched, "Llama4ForConditionalGeneration")
    assert patch(patched) is patched
    inner, own = patched.language_model, unpatched.language_model
    without = {name: value for name, value in inputs.items() if name != "labels"}
    assert torch.equal(inner(**without).logits, own(**without).logits)
    assert torch.equal(patched(**without).logits, unpatched(**without).logits)
    tuples = unpatched(**inputs, return_dict=False), patched(**inputs, return_dict=False)
    torch.testing.assert_close(tuples[1][0], tuples[0][0], rtol=1e-6, atol=0)
    assert len(tuples[1]) == len(tuples[0]) - 1
    inner.eval(), own.eval()  # a part that is not trained
    torch.testing.assert_close(patched(**inputs).loss, unpatched(**inputs).loss, rtol=1e-6, atol=0)
    assert patched(**inputs).logits is None
    got = patched(**inputs, num_items_in_batch=29).loss
    torch.testing.assert_close(
        got, unpatched(**inputs, num_items_in_batch=29).loss, rtol=1e-6, atol=0
    )
    with pytest.raises(ValueError, match="one whose own forward has the head"):
        make_compute_loss_func(patched)
    unpatch(patched)
    for model, twin in ((patched, unpatched), (inner, own)):
        assert type(model) is type(twin) and "_tileloss_patch" not in model.__dict__
    assert patched(**inputs).logits is not None


def test_arguments_of_the_loss_reach_a_model_around_a_causal_lm() -> None:
    name = "Llama4ForConditionalGeneration"
    unpatched = build_small(name)
    patched = pickle.loads(pickle.dumps(patch(copy.deepcopy(unpatched))))
    inputs = inputs_of(unpatched, name)
    labels = inputs.pop("labels")
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(3))
    logits, moved = unpatched(**inputs).logits[:, :-1], labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), moved, reduction="none")
    weighed = weights[:, 1:].masked_fill(moved == -100, 0)
    want = (losses * weighed).sum() / weighed.sum()
    share = (logits.argmax(-1) == moved)[moved != -100].float().mean()
    more = {"token_weights": weights, "return_token_accuracy": True}
    for given in ({}, {"skip_logits": False}):
        got = patched(**inputs, labels=labels, **more, **given)
        torch.testing.assert_close(got.loss, want, rtol=1e-6, atol=0)
        torch.testing.assert_close(got.token_accuracy, share, rtol=1e-6, atol=0)
        assert (got.logits is None) == (not given)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    plain = unpatched(**inputs, labels=labels)
    for is_training in (True, False):
        got = patched.train(is_training)(**inputs, shift_labels=shifted)
        torch.testing.assert_close(got.loss, plain.loss, rtol=1e-6, atol=0)
        assert (got.logits is None) == is_training
    both = {"labels": labels, "shift_labels": shifted}
    with torch.no_grad():
        assert patched(**inputs, labels=labels, skip_logits=True).logits is None
        assert torch.equal(
            patched(**inputs, **both).logits, unpatched.eval()(**inputs, **both).logits
        )
        assert torch.equal(patched(**inputs).logits, unpatched.eval()(**inputs).logits)
    with pytest.raises(ValueError, match=f"{name}.forward: token_weights: expected labels"):
        patched(**inputs, token_weights=weights)
    with pytest.raises(TypeError, match=f"{name}.forward: unexpected argument 'loss_weights'"):
        patched(**inputs, labels=labels, loss_weights=weights)
