"""logprobs and linear_logprobs: every row output and its gradient against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checks import check, leaf
from tileloss.torch import RowOutputs, linear_logprobs, logprobs

V, H = 131, 24
ALL = RowOutputs._fields
TRANSFORMS: list[dict[str, float]] = [
    {}, {"temperature": 0.6}, {"logit_scale": 1.5, "softcap": 6.0, "temperature": 0.8}
]  # fmt: skip
ON_LOGPROB: dict[str, Any] = {"temperature": 2.0, "temperature_on": "logprob"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRADIENTS = [("logp",), ("lse",), ("entropy",), ("mean_logit",), ("logp", "lse", "entropy")]


def head(labels: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Hidden states, head and bias."""
    drawn = torch.randn(*labels.shape, H), 0.3 * torch.randn(V, H), torch.randn(V)
    return tuple(leaf(x.to(dtype)) for x in drawn)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, labels = 3 * torch.randn(2, 11, V), torch.randint(0, V, (2, 11))
    x[0, 1, labels[0, 1]] = 30
    labels[1, 4:6] = -100
    return leaf(x.to(dtype)), labels


@pytest.mark.parametrize("transform", [*TRANSFORMS, ON_LOGPROB], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_output(dtype: torch.dtype, transform: dict[str, Any]) -> None:
    x, labels = batch(dtype)
    check("linear_logprobs", head(labels, dtype), labels, outputs=ALL, **transform)
    rows = check("logprobs", x, labels, outputs=ALL, **transform)
    used = labels != -100
    assert rows["argmax"].dtype == torch.int64
    assert rows["correct"].dtype == torch.bool
    assert (rows["argmax"][~used] == -1).all()
    assert 0 < rows["correct"].sum() < used.sum()


@pytest.mark.parametrize("name", ALL)
def test_an_output_alone_is_the_same_and_the_others_are_none(name: str) -> None:
    x, labels = batch()
    alone = logprobs(x, labels, outputs=(name,))
    assert torch.equal(getattr(alone, name), getattr(logprobs(x, labels, outputs=ALL), name))
    assert [n for n in ALL if getattr(alone, n) is not None] == [name]


@pytest.mark.parametrize("names", [("logp",), ("argmax", "lse")])
def test_outputs_may_be_named_by_anything_that_is_gone_through_once(names: tuple[str, ...]) -> None:
    x, labels = batch()
    hidden, weight = torch.randn(2, 11, H), torch.randn(V, H)
    for rows in (
        logprobs(x, labels, outputs=iter(names)),
        linear_logprobs(hidden, weight, labels, outputs=(name for name in names)),
    ):
        assert {n for n in ALL if getattr(rows, n) is not None} == set(names)


def test_logp_is_what_is_given_unless_told_otherwise() -> None:
    x, labels = batch()
    rows = logprobs(x, labels)
    assert [n for n in ALL if getattr(rows, n) is not None] == ["logp"]


def test_which_outputs_are_differentiable() -> None:
    x, labels = batch()
    rows = logprobs(x, labels, outputs=ALL)
    assert [v.requires_grad for v in rows] == [True, True, True, False, False, False, True]


@pytest.mark.parametrize("names", GRADIENTS, ids="-".join)
@pytest.mark.parametrize("transform", [*TRANSFORMS, ON_LOGPROB], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype, transform: dict[str, Any], names: tuple[str, ...]) -> None:
    x, labels = batch(dtype)
    upstream = {name: torch.randn(labels.shape) for name in names}
    check("logprobs", x, labels, upstream=upstream, outputs=names, **transform)
    if transform.keys() == {"temperature"}:
        return
    labels = torch.randint(0, V, (3, 7))
    labels[1, 2:4] = -100
    upstream = {name: torch.randn(labels.shape) for name in names}
    given = {"upstream": upstream, "outputs": names, **transform}
    check("linear_logprobs", head(labels, dtype), labels, **given)


def test_an_output_that_the_loss_leaves_out_has_no_part_in_the_gradient() -> None:
    x, labels = batch()
    rows = logprobs(x, labels, outputs=("logp", "entropy"))
    (both,) = torch.autograd.grad(rows.logp.sum(), x)
    (alone,) = torch.autograd.grad(logprobs(x, labels).logp.sum(), x)
    torch.testing.assert_close(both, alone, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------------------ several labels a row


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_several_labels(transform: dict[str, float], count: int, is_linear: bool) -> None:
    labels = torch.randint(0, V, (2, 11, count))
    labels[0, 1] = labels[0, 1, 0]  # one that is there several times
    labels[0, 2, 0] = labels[1, 4:6] = -100
    upstream = {"logp": torch.randn(labels.shape), "entropy": torch.randn(2, 11)}
    name, given = "logprobs", [leaf(torch.randn(2, 11, V))]
    if is_linear:
        name, given = "linear_logprobs", head(labels[..., 0])
    check(name, given, labels, outputs=tuple(upstream), upstream=upstream, **transform)


def test_one_label_in_a_dimension_of_its_own_has_the_bits_of_one() -> None:
    x, labels = batch()
    rows, alone = logprobs(x, labels[..., None]), logprobs(x, labels)
    assert torch.equal(rows.logp[..., 0], alone.logp)
    grads = [torch.autograd.grad(r.logp.sum(), x)[0] for r in (rows, alone)]
    assert torch.equal(*grads)


def test_no_labels_at_all() -> None:
    x, labels = batch()
    none, outputs = labels[..., None][..., :0], ("logp", "lse")
    head = torch.eye(x.shape[-1])
    for rows in (
        logprobs(x, none, outputs=outputs),
        linear_logprobs(x, head, none, outputs=outputs),
    ):
        assert rows.logp.shape == (2, 11, 0)
        assert not rows.lse.any()


def test_several_labels_in_a_graph_and_in_place() -> None:
    x, labels = batch()
    several = torch.stack([labels, labels.flip(1), torch.full_like(labels, 3)], -1)
    compiled = torch.compile(
        lambda x: logprobs(x, several).logp.square().sum(), backend="aot_eager"
    )
    own = x.detach().clone().requires_grad_()
    in_place = logprobs(own * 1, several, inplace_backward=True).logp.square().sum()
    grads = [
        torch.autograd.grad(loss, at)[0]
        for loss, at in (
            (compiled(x), x),
            (logprobs(x, several).logp.square().sum(), x),
            (in_place, own),
        )
    ]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_what_several_labels_do_not_go_with() -> None:
    x, labels = batch()
    several = torch.stack([labels, labels], -1)
    with pytest.raises(ValueError, match="correct: expected none with several labels a row"):
        logprobs(x, several, outputs=("correct",))
    with pytest.raises(IndexError, match=r"target\[1,2\]: expected 0 <= label < 131"):
        logprobs(x.reshape(-1, V)[:2], torch.tensor([[1, 2, 3], [1, 2, 131]]))
