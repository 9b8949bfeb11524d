"""cross_entropy against its definition in float64, in every type and with every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checks import check, leaf
from tileloss.torch import cross_entropy, linear_cross_entropy

V = 131
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 1e-2},
    "class weights": {"weight": torch.linspace(0.1, 2, V)},
    "token weights": {"token_weights": torch.linspace(0, 2, 22).view(2, 11)},
    "mask": {"mask": torch.arange(22).view(2, 11) % 4},
    "num_items": {"num_items": 7.0},
    "scale": {"logit_scale": 0.3},
    "softcap": {"softcap": 4.0},
    "temperature": {"temperature": 1.7},
    "ignored label": {"ignore_index": 3},
    "everything": {
        "label_smoothing": 0.2,
        "z_loss": 1e-3,
        "weight": torch.linspace(0.1, 2, V),
        "token_weights": torch.linspace(0, 2, 22).view(2, 11),
        "logit_scale": 1.5,
        "softcap": 6.0,
        "temperature": 0.8,
    },
}


def batch(dtype: torch.dtype = torch.float32, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Logits [2, 11, V] and labels of which some are ignored and one is far above the rest."""
    x, labels = 3 * torch.randn(2, 11, V), torch.randint(4, V, (2, 11))
    x[0, 1, labels[0, 1]] = 30
    labels[0, ::3] = ignore_index
    return leaf(x.to(dtype)), labels


@pytest.mark.parametrize(
    ("reduction", "one_pass"),
    [("mean", False), ("sum", False), ("none", False), ("mean", True), ("sum", True)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, dtype: torch.dtype, reduction: str, one_pass: bool) -> None:
    only_mean = {"num_items"} if reduction != "mean" else set()
    options = {key: value for key, value in OPTIONS[name].items() if key not in only_mean}
    x, labels = batch(dtype, options.get("ignore_index", -100))
    # One pass rounds the gradient before it is scaled: a power of two rounds nothing again, but float16's subnormals grow.
    scale = (-1.0 if dtype == torch.float16 else -2.0) if one_pass else 0.7
    check(
        "cross_entropy",
        x,
        labels,
        reduction=reduction,
        upstream=torch.randn(2, 11) if reduction == "none" else torch.tensor(scale),
        grad_in_forward=one_pass,
        **options,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_temperature_on_the_log_probability(dtype: torch.dtype) -> None:
    x, labels = batch(dtype)
    check("cross_entropy", x, labels, temperature=1.7, temperature_on="logprob", z_loss=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_columns_are_outside_the_softmax(dtype: torch.dtype, smoothing: float) -> None:
    x, labels = batch(dtype)
    with torch.no_grad():
        x[..., 100:] = float("nan")
    labels %= 100
    labels[0, ::3] = -100
    check("cross_entropy", x, labels, valid_vocab=100, label_smoothing=smoothing)
    assert not x.grad[..., 100:].any()


@pytest.mark.parametrize("name", ["num_items", "temperature"])
def test_numbers_that_change_may_be_tensors(name: str) -> None:
    x, labels = batch()
    gradients = []
    for value in (3.5, torch.tensor(3.5), torch.tensor([3.5]), torch.tensor(3.5).double()):
        loss = cross_entropy(x, labels, **{name: value})
        gradients.append(torch.autograd.grad(loss, x)[0])
    assert all(torch.equal(g, gradients[0]) for g in gradients)
    plain = torch.autograd.grad(cross_entropy(x, labels), x)[0]
    assert not torch.equal(plain, gradients[0])


@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_ignored_rows_are_never_read(grad_in_forward: bool) -> None:
    x, labels = batch()
    with torch.no_grad():
        x[labels == -100] = float("nan")
    check("cross_entropy", x, labels, grad_in_forward=grad_in_forward)
    assert (x.grad[labels == -100] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_row_to_count_gives_zero(reduction: str) -> None:
    x, labels = batch()
    loss = cross_entropy(x, torch.full_like(labels, -100), reduction=reduction)
    loss.backward()
    assert loss.item() == 0
    assert (x.grad == 0).all()


def test_labels_of_32_bits_are_the_same() -> None:
    x, labels = batch()
    assert torch.equal(cross_entropy(x, labels), cross_entropy(x, labels.int()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_weights_of_other_types_are_converted(dtype: torch.dtype) -> None:
    x, labels = batch()
    classes = torch.randint(1, 5, (V,))
    tokens = torch.randint(0, 3, labels.shape)
    expected = cross_entropy(x, labels, classes.float(), token_weights=tokens.float())
    given = cross_entropy(x, labels, classes.to(dtype), token_weights=tokens.to(dtype))
    assert torch.equal(given, expected)


def test_class_weights_need_not_lie_together() -> None:
    x, labels = batch()
    classes = torch.rand(2 * V)[::2]
    assert torch.equal(
        cross_entropy(x, labels, classes), cross_entropy(x, labels, classes.contiguous())
    )


def test_class_weights_may_have_the_padding() -> None:
    x, labels = batch()
    labels, classes = labels % 100, torch.rand(V)
    loss, short = (cross_entropy(x, labels, c, valid_vocab=100) for c in (classes, classes[:100]))
    assert torch.equal(loss, short)
    hidden, weight = torch.randn(2, 11, 16), torch.randn(V, 16)
    loss, short = (
        linear_cross_entropy(hidden, weight, labels, weight=c, valid_vocab=100)
        for c in (classes, classes[:100])
    )
    assert torch.equal(loss, short)
