"""Each argument of a patched forward that concerns the loss is used, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import definitions
from tileloss.integrations._loss_call import INSTEAD, OWN
from tileloss.integrations.transformers import make_compute_loss_func, patch
from transformers_families import build_small
from transformers_models import HeadCalls, backward, batch, build, check_gradients, pair

TOLERANCE = 1e-5


def shifted(values: torch.Tensor, filler: float) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, 1), value=filler)[:, 1:].contiguous()


def weights() -> torch.Tensor:
    """For each label; some are 0, and so is one of an ignored label."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(batch()["labels"].shape, generator=generator)
    return drawn.masked_fill(drawn < 0.2, 0)


def defined(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_items_in_batch: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """The loss by its definition; labels and weights are in their places."""
    x = logits.double()
    return definitions.cross_entropy(x, labels, num_items=num_items_in_batch, **options).float()


OPTIONS: dict[str, dict[str, Any]] = {
    "token_weights": {"token_weights": weights()},
    "token_weights, num_items_in_batch": {"token_weights": weights(), "num_items_in_batch": 29},
    "label_smoothing": {"label_smoothing": 0.1},
    "all": {"token_weights": weights(), "num_items_in_batch": 29, "label_smoothing": 0.1},
    "neither": {},
}


@pytest.mark.parametrize("places", ["labels", "shift_labels", "both"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_argument_of_the_loss_means_what_its_name_says(
    options: dict[str, Any], places: str
) -> None:
    unpatched, patched = pair("qwen2")
    inputs = batch()
    labels = inputs.pop("labels")
    given = {"labels": labels, "shift_labels": shifted(labels, -100)}
    given = given if places == "both" else {places: given[places]}
    moved = dict(options)
    if "token_weights" in options:
        moved["token_weights"] = shifted(options["token_weights"], 0)
        options = options if places == "labels" else moved
    want = defined(unpatched(**inputs).logits, shifted(labels, -100), **moved)
    want.backward()
    calls = HeadCalls(patched)
    got = backward(patched, inputs | given | options)
    assert calls.count == 0 and got.logits is None
    torch.testing.assert_close(got.loss, want, rtol=TOLERANCE, atol=0)
    check_gradients(unpatched, patched, TOLERANCE)
    for more in ({}, {"skip_logits": True}, {"skip_logits": False}):  # in eval: with logits
        calls.count = 0
        got = patched.eval()(**inputs, **given, **options, **more)
        torch.testing.assert_close(got.loss, want, rtol=TOLERANCE, atol=0)
        assert (got.logits is None) == (calls.count == 0) == more.get("skip_logits", False)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_token_accuracy_is_the_share_of_the_labels_that_are_the_likeliest_token(kind: str) -> None:
    unpatched = build(kind)
    patched = patch(build(kind), token_accuracy=True)
    inputs = batch()
    labels = inputs.pop("labels")
    logits = unpatched(**inputs).logits
    third = labels[:, 1:] % 3 == 0
    labels[:, 1:][third] = logits[:, :-1].argmax(-1)[third]
    labels[0, :4] = -100
    counted = labels[:, 1:] != -100
    want = (logits[:, :-1].argmax(-1) == labels[:, 1:])[counted].float().mean()
    assert 0.1 < want < 0.9
    own = unpatched(**inputs, labels=labels)
    calls = HeadCalls(patched)
    for is_training in (True, False):
        got = patched.train(is_training)(**inputs, labels=labels)
        assert isinstance(got, type(own))
        torch.testing.assert_close(got.token_accuracy, want, rtol=1e-6, atol=0)
        torch.testing.assert_close(got.loss, own.loss, rtol=TOLERANCE, atol=0)
        assert (calls.count == 0) == is_training == (got.logits is None)
    ignored = patched.train()(**inputs, labels=torch.full_like(labels, -100))
    assert float(ignored.token_accuracy) == 0
    patch(patched)
    assert "token_accuracy" not in patched(**inputs, labels=labels)
    found = patched(**inputs, labels=labels, return_token_accuracy=True, return_dict=False)
    assert found[-1] == want


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi"])  # qwen2's embedding is its head
def test_the_heads_gradient_is_added_to_its_main_grad(kind: str) -> None:
    unpatched, patched = pair(kind)
    patch(patched, main_grad=True)
    weight = patched.get_output_embeddings().weight
    with pytest.raises(
        ValueError, match=r"lm_head.weight.main_grad: expected a float32 .* got none"
    ):
        patched(**batch())
    weight.main_grad = torch.zeros_like(weight).T
    with pytest.raises(
        ValueError, match=r"lm_head.weight.main_grad: expected float32 \[.* got torch.float32 \["
    ):
        patched(**batch())
    weight.main_grad = torch.zeros_like(weight)
    for model in (unpatched, patched):
        for _ in range(2):
            model(**batch()).loss.backward()
    is_tied = weight is patched.get_input_embeddings().weight
    assert (weight.grad is not None) == is_tied
    weight.grad = weight.main_grad + weight.grad if is_tied else weight.main_grad
    check_gradients(unpatched, patched, TOLERANCE)
    before = weight.main_grad.clone()
    with torch.no_grad():
        patched(**batch())
    weight.requires_grad_(False)
    patched(**batch()).loss.backward()
    assert torch.equal(weight.main_grad, before)


def test_evaluation_without_logits() -> None:
    unpatched, patched = pair("gemma2")
    patch(patched, logits_in_evaluation=False)
    unpatched.eval(), patched.eval()
    calls = HeadCalls(patched)
    with torch.no_grad():
        want, got = unpatched(**batch()), patched(**batch())
        assert got.logits is None and calls.count == 0
        torch.testing.assert_close(got.loss, want.loss, rtol=TOLERANCE, atol=0)
        asked = patched(**batch(), skip_logits=False)
        assert torch.equal(asked.logits, want.logits) and torch.equal(asked.loss, want.loss)
        inputs = batch()
        inputs.pop("labels")
        assert torch.equal(patched(**inputs).logits, want.logits)


def test_logits_in_training_for_whoever_asks() -> None:
    unpatched, patched = pair("llama")
    want, got = unpatched(**batch()), patched(**batch(), skip_logits=False)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)


@pytest.mark.parametrize(
    "given",
    [
        {"token_weights": weights()},
        {"label_smoothing": 0.1},
        {"return_token_accuracy": True},
        {"skip_logits": True},
    ],
    ids=lambda given: next(iter(given)),
)
@pytest.mark.parametrize("is_training", [True, False])
def test_what_has_no_effect_without_labels_is_refused(
    given: dict[str, Any], is_training: bool
) -> None:
    inputs = batch()
    inputs.pop("labels")
    patched = patch(build("llama")).train(is_training)
    with pytest.raises(
        ValueError, match=f"LlamaForCausalLM.forward: {next(iter(given))}: expected labels"
    ):
        patched(**inputs, **given)
    for name in given:
        assert patched(**inputs, **{name: None}).logits is not None


@pytest.mark.parametrize("name", INSTEAD)
def test_what_others_call_their_options_is_refused_by_name(name: str) -> None:
    patched = patch(build("llama"))
    with pytest.raises(TypeError, match=rf"LlamaForCausalLM.forward: .*'{name}'.*; \w+"):
        patched(**batch(), **{name: torch.ones(2, 11)})
    assert patched(**batch(), **{name: None}).logits is None


@pytest.mark.parametrize("name", [*OWN, *INSTEAD])
def test_the_page_for_users_lists_it(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "users" / "huggingface.md"
    table = (
        page.read_text().partition("## Arguments of a call")[2].partition("\n\n`token_weights`")[0]
    )
    assert f"`{name}`" in table


def test_other_arguments_go_where_the_unpatched_forward_sends_them() -> None:
    seen = []

    def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(
            {name for name in kwargs if name not in ("return_dict", "output_hidden_states")}
        )

    for model in pair("llama"):
        model.model.register_forward_pre_hook(see, with_kwargs=True)
        more = {"num_items_in_batch": 29, "ignore_index": -100, "of_an_attention": 1}
        own = {} if not seen else {"token_weights": weights(), "skip_logits": True}
        model(**batch(), **more, **own)
    assert seen[0] == seen[1] and more.keys() <= seen[0]


def test_token_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"token_weights: expected the labels' shape \[2, 11\], got"
    ):
        patch(build("llama"))(**batch(), token_weights=torch.ones(2, 10))


def test_a_loss_that_does_not_shift_takes_no_shift_labels_and_no_other_option() -> None:
    """Bart's own, torch.nn.CrossEntropyLoss()."""
    patched, inputs = patch(build_small("BartForCausalLM")), batch()
    with pytest.raises(ValueError, match=r"shift_labels: expected None.*give them as labels"):
        patched(**inputs, shift_labels=inputs["labels"])
    with pytest.raises(ValueError, match=r"ignore_index: expected -100.*got 0"):
        patched(**inputs, ignore_index=0)
    with pytest.warns(UserWarning, match=r"num_items_in_batch: .* does not take it"):
        found = patched(**inputs, num_items_in_batch=29).loss
    assert found == patched(**inputs).loss
    logits = patched.eval()(**inputs).logits
    want = defined(logits, inputs["labels"], token_weights=weights())
    for is_training in (True, False):
        got = patched.train(is_training)(**inputs, token_weights=weights()).loss
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=0)


def test_a_compute_loss_func_gets_the_weights_and_refuses_the_rest() -> None:
    patched = patch(build("llama"))
    inputs = batch()
    want = patched(**inputs, token_weights=weights(), label_smoothing=0.1).loss
    smooth = make_compute_loss_func(patched, label_smoothing=0.1)
    labels = inputs.pop("labels")
    got = smooth(patched(**inputs, token_weights=weights(), skip_logits=True), labels)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for given in ({"label_smoothing": 0.1}, {"return_token_accuracy": True}):
        with pytest.raises(ValueError, match=rf"{next(iter(given))}: expected none, as make_comp"):
            patched(**inputs, **given)
    assert patched(**inputs, skip_logits=False).logits is not None
