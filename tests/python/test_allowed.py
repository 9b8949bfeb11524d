"""The tokens of a row: every function of tileloss.torch against the definitions with -inf elsewhere, and what makes the sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from checks import check, leaf
from definitions import unpacked
from tileloss import torch as tl
from torch_problems import (
    ALL_FUNCTIONS,
    B,
    T,
    V,
    assert_same,
    gradients,
    of_sets,
    plain,
    problem,
    run,
)

WORDS = -(-V // 32)


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_values_and_gradients_are_the_definitions(name: str) -> None:
    p, is_in = of_sets()
    allowed = tl.allowed_from(is_in)
    expected = gradients(name, p, plain, allowed=allowed)
    if "linear" not in name:  # nobody looks at the others
        logits = p.logits.detach().masked_fill(~is_in, torch.nan).requires_grad_()
        p = replace(p, logits=logits)
    found = gradients(name, p, allowed=allowed)
    assert_same(found, expected)
    if "linear" not in name:
        assert not found[1][~is_in].any()


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_all_tokens_give_the_bits_of_none_given(name: str) -> None:
    p, expected = (p := problem()), gradients(name, p)
    for lead in ((), (B, T), (B * T,)):
        every = torch.full((*lead, WORDS), -1, dtype=torch.int32)
        for value, exact in zip(gradients(name, p, allowed=every), expected, strict=True):
            assert torch.equal(value, exact)


@pytest.mark.parametrize("name", ("cross_entropy", "linear_policy_loss"))
def test_one_set_is_that_of_every_row(name: str) -> None:
    p, _ = of_sets()
    one = tl.allowed_from(torch.arange(V) >= 3)
    p.labels.clamp_(min=3)
    for value, exact in zip(
        gradients(name, p, allowed=one),
        gradients(name, p, allowed=one.expand(B, T, WORDS)),
        strict=True,
    ):
        assert torch.equal(value, exact)


@pytest.mark.parametrize("smoothing", (0.0, 0.3))
def test_smoothing_and_weights_are_over_the_set(smoothing: float) -> None:
    p, is_in = of_sets()
    weight = torch.rand(V) + 0.5
    given: dict[str, Any] = {"allowed": tl.allowed_from(is_in), "label_smoothing": smoothing}
    given |= {"weight": weight, "z_loss": 0.1, "softcap": 5.0, "temperature": 1.3}
    for name in ("cross_entropy", "linear_cross_entropy"):
        assert_same(gradients(name, p, **given), gradients(name, p, plain, **given))


def test_row_outputs_are_of_the_set() -> None:
    p, is_in = of_sets()
    given = {"allowed": tl.allowed_from(is_in), "upstream": {"mean_logit": torch.randn(B, T)}}
    check("logprobs", leaf(p.logits), p.labels, outputs=tl.RowOutputs._fields, **given)


def test_a_label_outside_and_a_row_without_tokens() -> None:
    x = torch.randn(2, V, requires_grad=True)
    is_in = torch.zeros(2, V, dtype=torch.bool)
    is_in[0, 1:5] = True
    labels, allowed = torch.tensor([7, 7]), tl.allowed_from(is_in)
    rows = tl.logprobs(x, labels, allowed=allowed, outputs=("logp", "lse", "argmax", "mean_logit"))
    assert rows.logp is not None and rows.lse is not None and rows.argmax is not None
    assert rows.logp[0] == -torch.inf and rows.logp[1].isnan()
    assert rows.lse[1] == -torch.inf and rows.argmax[1] == 0
    loss = tl.cross_entropy(x, labels, allowed=allowed, reduction="none")
    assert loss[0] == torch.inf and loss[1].isnan()
    (gradient,) = torch.autograd.grad(loss, x, torch.ones(2))
    torch.testing.assert_close(gradient[0, 1:5], x[0, 1:5].softmax(0), rtol=1e-5, atol=1e-7)
    assert not gradient[0][~is_in[0]].any()


def test_rows_in_groups_in_place_and_without_a_copy() -> None:
    whole = torch.randn(B, T + 1, V)
    is_in = torch.rand(B, T + 1, V) < 0.5
    labels = torch.randint(0, V, (B, T))
    is_in[:, :-1].scatter_(-1, labels[..., None], True)
    allowed = tl.allowed_from(is_in)
    given = {"allowed": allowed[:, :-1], "reduction": "sum"}
    check("cross_entropy", leaf(whole), labels, view=lambda x: x[:, :-1], **given)
    in_place = {"view": lambda x: x[:, :-1] * 1, "inplace_backward": True}
    check("cross_entropy", leaf(whole), labels, **given, **in_place)


@pytest.mark.full
@pytest.mark.parametrize("name", ("cross_entropy", "linear_logprobs", "linear_policy_loss"))
def test_compiled_programs_take_it(name: str) -> None:
    p, is_in = of_sets()
    allowed = tl.allowed_from(is_in)
    compiled = torch.compile(
        lambda *leaves, allowed: run(name, p, *leaves, allowed=allowed),
        fullgraph=True,
        backend="aot_eager",
    )
    leaves = p.leaves(name)
    loss = compiled(*leaves, allowed=allowed)
    found = loss.detach(), *torch.autograd.grad(loss, leaves)
    assert_same(found, gradients(name, p, allowed=allowed), rtol=1e-6)


def test_modules_take_it() -> None:
    p, is_in = of_sets()
    allowed = tl.allowed_from(is_in)
    module = tl.CrossEntropyLoss()
    expected = tl.cross_entropy(p.logits, p.labels, allowed=allowed)
    assert torch.equal(module(p.logits, p.labels, allowed=allowed), expected)


# ------------------------------------------------------------------------------------------------------------------ the sets


def test_sets_of_masks_and_of_tokens_are_the_same() -> None:
    is_in = torch.rand(4, 3, 70) < 0.3
    words = tl.allowed_from(is_in)
    assert words.dtype == torch.int32 and words.shape == (4, 3, 3)
    assert torch.equal(unpacked(words, torch.empty(4, 3, 70)), is_in)
    rows = is_in.view(12, 70)
    tokens = torch.cat([row.nonzero()[:, 0].flip(0).repeat(2) for row in rows])
    offsets = torch.tensor([0, *(2 * rows.sum(1)).cumsum(0)])
    for kind in (torch.int64, torch.int32):
        found = tl.allowed_from(tokens.to(kind), offsets.to(kind), 70)
        assert torch.equal(found, words.view(12, 3))
    assert tl.allowed_from(torch.tensor([31]), torch.tensor([0, 0, 1]), 32).tolist() == [
        [0],
        [-(2**31)],
    ]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (([1, 40], [0, 2], 40), ValueError, r"tokens\[1\]: expected 0 to 39, got 40"),
        (([-1], [0, 1], 40), ValueError, r"tokens\[0\]: expected 0 to 39, got -1"),
        (([1, 2], [0, 3], 40), ValueError, "offsets: expected ascending .*tokens, 2, got 0 to 3"),
        (([1, 2], [0, 2, 1, 2], 40), ValueError, "got 0 to 2 with a step back"),
        (
            ([1, 2], [0, 2], None),
            ValueError,
            "vocab_size: expected beside tokens of integers, got None",
        ),
        (([1.0], [0, 1], 40), TypeError, "tokens: expected bool or integers"),
        (([True], [0, 1], 40), ValueError, "offsets: expected none beside a bool mask, got one"),
        (([1], [0, 1], 0), ValueError, "vocab_size: expected an integer >= 1, got 0"),
    ],
)
def test_what_makes_no_sets(arguments: Any, kind: Any, message: str) -> None:
    tokens, offsets, size = arguments
    with pytest.raises(kind, match=message):
        tl.allowed_from(torch.tensor(tokens), torch.tensor(offsets), size)
