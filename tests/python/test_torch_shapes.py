"""Leading shapes, strides, empty batches; upstream gradients of every shape; gradients for any subset of the head's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from checks import check, leaf
from tileloss import torch as tl
from torch_problems import (
    FUNCTIONS,
    LINEAR_FUNCTIONS,
    LOGIT_FUNCTIONS,
    allocations,
    assert_same,
    gradients,
    plain,
    problem,
    run,
)  # fmt: skip
from wrapped_tensors import NormalFloat, Quantized, quantized

V, H = 67, 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES: list[tuple[int, ...]] = [(), (1,), (6,), (2, 5), (1, 4), (3, 1), (2, 3, 4), (2, 1, 3, 2)]
VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], bool]] = {
    # name: shape of the leaf, view, whether the view is taken without a copy
    "all but the last": ((3, 6, V), lambda x: x[:, :-1], True),
    "all but the first": ((3, 6, V), lambda x: x[:, 1:], True),
    "every other": ((3, 10, V), lambda x: x[:, ::2], True),
    "every other batch": ((6, 5, V), lambda x: x[::2], True),
    "some columns": ((3, 5, V + 9), lambda x: x[..., 3 : 3 + V], True),
    "every other of some columns": ((3, 5, V + 9), lambda x: x[:, ::2, 3 : 3 + V], True),
    "of four dimensions": ((2, 2, 6, V), lambda x: x[:, :, :-1], True),
    "three levels of strides": ((2, 3, 6, V), lambda x: x[:, :-1, :-1], False),
    "batch and time swapped": ((5, 3, V), lambda x: x.transpose(0, 1), False),
    "class in the middle": ((3, V, 5), lambda x: x.movedim(1, -1), False),
    "last stride 2": ((3, 5, 2 * V), lambda x: x[..., ::2], False),
    "one row for all": ((1, V), lambda x: x.expand(3, 5, V), False),
    "one batch for all": ((5, V), lambda x: x.expand(3, 5, V), False),
    "one logit for all": ((3, 5, 1), lambda x: x.expand(3, 5, V), False),
}


def labels_of(shape: tuple[int, ...]) -> Tensor:
    labels = torch.randint(0, V, shape)
    if labels.numel() > 1:
        labels.view(-1)[0] = -100
    return labels


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_any_leading_shape(shape: tuple[int, ...], reduction: str) -> None:
    upstream = torch.randn(shape) if reduction == "none" else None
    x = leaf(3 * torch.randn(*shape, V))
    check("cross_entropy", x, labels_of(shape), reduction=reduction, upstream=upstream)
    loss = tl.cross_entropy(x, labels_of(shape), reduction=reduction)
    assert loss.shape == (shape if reduction == "none" else ())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_leading_shape_with_the_head(shape: tuple[int, ...]) -> None:
    hidden, weight = leaf(torch.randn(*shape, H)), leaf(torch.randn(V, H))
    check("linear_cross_entropy", (hidden, weight), labels_of(shape))
    assert tl.linear_logprobs(hidden, weight, labels_of(shape)).logp.shape == shape


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, reduction: str, dtype: torch.dtype) -> None:
    shape, view, _ = VIEWS[name]
    x = leaf((2 * torch.randn(shape)).to(dtype))
    labels = labels_of(view(x).shape[:-1])
    loss = tl.cross_entropy(view(x), labels, reduction=reduction)
    upstream = torch.randn(loss.shape)
    (gradient,) = torch.autograd.grad(loss, x, upstream)
    copied = leaf(view(x).contiguous())
    expected = tl.cross_entropy(copied, labels, reduction=reduction)
    assert torch.equal(loss, expected)
    (dense,) = torch.autograd.grad(expected, copied, upstream)
    (back,) = torch.autograd.grad(view(x), x, dense)
    assert torch.equal(gradient, back)


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_copied_only_where_strides_cannot_say_it(name: str) -> None:
    shape, view, as_it_lies = VIEWS[name]
    x = torch.randn(shape)
    labels = labels_of(view(x).shape[:-1])
    blocks = allocations(lambda: tl.cross_entropy(view(x), labels))
    assert (max(blocks) < view(x).numel() * 4) == as_it_lies, blocks


@pytest.mark.parametrize("function", LOGIT_FUNCTIONS)
@pytest.mark.parametrize("name", ["all but the last", "every other", "batch and time swapped"])
def test_views_for_every_function(name: str, function: str) -> None:
    p = problem()
    shape, view, _ = VIEWS[name]
    whole = torch.randn(shape)
    view(whole).copy_(p.logits.detach())
    whole.requires_grad_()
    (gradient,) = torch.autograd.grad(run(function, p, view(whole)), whole)
    assert torch.equal(view(gradient), gradients(function, p)[1])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("mode", [{}, {"grad_in_forward": True}])
def test_no_rows(shape: tuple[int, ...], mode: dict[str, bool]) -> None:
    labels = torch.zeros(shape, dtype=torch.int64)
    x = leaf(torch.randn(*shape, V))
    hidden, weight, bias = (
        leaf(torch.randn(*shape, H)),
        leaf(torch.randn(V, H)),
        leaf(torch.randn(V)),
    )
    tl.cross_entropy(x, labels, **mode).backward()
    assert x.grad.shape == x.shape
    loss = tl.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **mode)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.shape == hidden.shape
    assert (weight.grad == 0).all()
    assert (bias.grad == 0).all()
    assert tl.cross_entropy(x, labels, reduction="none").shape == shape
    rows = tl.logprobs(x, labels, outputs=tl.RowOutputs._fields)
    assert all(r.shape == shape for r in rows)
    rows.logp.sum().backward()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (0, 0)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        *({"preset": name} for name in ("grpo", "gspo", "vespo", "dr_grpo")),
        {"preset": "dr_grpo", "max_length": 7},
        {"aggregation": "seq_mean_token_sum_norm", "temperature": torch.tensor(0.7)},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_policy_loss_of_no_tokens(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    x, labels = leaf(torch.randn(*shape, V)), torch.zeros(shape, dtype=torch.int64)
    hidden, weight = leaf(torch.randn(*shape, H)), leaf(torch.randn(V, H))
    advantages = torch.ones(1 if len(shape) == 1 else shape[0])
    loss = tl.policy_loss(x, labels, advantages, **options)
    loss += tl.linear_policy_loss(hidden, weight, labels, advantages, **options)
    loss.backward()
    assert loss.item() == 0
    assert x.grad.shape == x.shape
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_labels_of_8_bits(name: str) -> None:
    """As torch's cross_entropy takes them. 200: no label is -56, and -100 is no row's."""
    p = problem()
    p.labels = torch.randint(0, V, p.labels.shape)
    p.labels[1] = 200
    narrow = replace(p, labels=p.labels.to(torch.uint8))
    modes = [{}] if name.endswith("logprobs") else [{}, {"grad_in_forward": True}]
    for mode in modes:
        ours = gradients(name, narrow, ignore_index=200, **mode)
        assert_same(ours, gradients(name, p, ignore_index=200, **mode), 0)
    with pytest.raises(IndexError, match=r"target\[5\]: .* got 200"):
        gradients(name, narrow)


# ------------------------------------------------------------------------------------- upstream gradients

UPSTREAMS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.randn(3, 5),
    "one number for all": lambda: torch.tensor(0.7).expand(3, 5),
    "one a batch": lambda: torch.randn(3, 1).expand(3, 5),
    "one a position": lambda: torch.randn(5).expand(3, 5),
    "sliced": lambda: torch.randn(3, 11)[:, 1:11:2],
    "transposed": lambda: torch.randn(5, 3).T,
}


@pytest.mark.parametrize("name", UPSTREAMS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_upstream_gradients_of_rows(name: str, dtype: torch.dtype) -> None:
    upstream, labels = UPSTREAMS[name](), labels_of((3, 5))
    x = leaf((2 * torch.randn(3, 5, V)).to(dtype))
    check("cross_entropy", x, labels, reduction="none", upstream=upstream)
    x.grad = None
    names = ("logp", "entropy")
    check("logprobs", x, labels, outputs=names, upstream=dict.fromkeys(names, upstream))
    head = leaf(torch.randn(3, 5, H)), leaf(torch.randn(V, H))
    check("linear_cross_entropy", head, labels, reduction="none", upstream=upstream)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_of_a_sum_is_the_broadcast_one(name: str) -> None:
    """loss.sum() hands an expanded, stride 0, gradient down."""
    p = problem()
    if name.endswith("logprobs"):
        loss = getattr(tl, name)(*p.leaves(name)[:2], p.labels).logp
    else:
        per_row = "aggregation" if "policy" in name else "reduction"
        loss = run(name, p, *p.leaves(name), **{per_row: "none"})
    assert loss.shape == p.labels.shape
    inputs = p.leaves(name)[:2]
    of_sum = torch.autograd.grad(loss.sum(), inputs, retain_graph=True)
    dense = torch.autograd.grad(loss, inputs, torch.ones_like(loss))
    assert all(torch.equal(a, b) for a, b in zip(of_sum, dense, strict=True))


# ------------------------------------------------------------------------------------------- with the head


@pytest.mark.parametrize("needs", list(product([False, True], repeat=3))[1:], ids=str)
@pytest.mark.parametrize("name", LINEAR_FUNCTIONS)
@pytest.mark.parametrize("one_pass", [False, True])
def test_gradients_of_any_subset(name: str, needs: tuple[bool, ...], one_pass: bool) -> None:
    p = problem()
    options = {} if name.endswith("logprobs") else {"grad_in_forward": one_pass}
    expected = gradients(name, p, **options)[1:]
    leaves = [
        x.detach().requires_grad_(need) for x, need in zip(p.leaves(name), needs, strict=True)
    ]
    run(name, p, *leaves, **options).backward()
    for x, full, need in zip(leaves, expected, needs, strict=True):
        assert (x.grad is not None) == need
        if need:
            torch.testing.assert_close(x.grad, full, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LINEAR_FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_head_that_lies_the_other_way_is_taken_as_it_lies(name: str, dtype: torch.dtype) -> None:
    p = problem(dtype)
    flax = leaf(p.weight.detach().T.contiguous())
    hidden, weight, bias = p.leaves(name)
    loss = run(name, p, hidden, flax.T, bias)
    (gradient,) = torch.autograd.grad(loss, flax)
    expected = gradients(name, p)
    rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
    assert_same((loss, gradient.T), (expected[0], expected[2]), rtol)
    with torch.no_grad():
        blocks = allocations(lambda: run(name, p, hidden, flax.T, bias))
    assert max(blocks) < weight.nbytes, blocks


@pytest.mark.parametrize("kind", [Quantized, NormalFloat])
@pytest.mark.parametrize("name", [*LINEAR_FUNCTIONS, "linear_distillation"])
def test_a_wrapper_subclass_is_what_its_own_method_makes_of_it(
    name: str, kind: type[Quantized]
) -> None:
    """A quantized head; linear_distillation's teacher has it too."""
    weight = quantized((V, H), kind)
    p = replace(problem(), weight=weight)
    plain = replace(p, weight=Quantized.dequantize(weight))
    losses = [run(name, each, p.hidden, each.weight, p.bias) for each in (p, plain)]
    gradients = [torch.autograd.grad(loss, (p.hidden, p.bias)) for loss in losses]
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtypes", list(product(DTYPES, repeat=2)), ids=str)
def test_hidden_and_head_of_different_types(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    hidden, weight = (
        leaf(torch.randn(9, H).to(dtypes[0])),
        leaf((0.3 * torch.randn(V, H)).to(dtypes[1])),
    )
    head = (hidden, weight, leaf(torch.randn(V)))
    check("linear_cross_entropy", head, labels_of((9,)))
    assert (hidden.grad.dtype, weight.grad.dtype) == dtypes


@pytest.mark.parametrize("name", LINEAR_FUNCTIONS)
def test_hidden_states_that_are_not_contiguous(name: str) -> None:
    p = problem()
    longer = torch.cat([p.hidden.detach(), torch.randn(3, 2, H)], 1).requires_grad_()
    (gradient,) = torch.autograd.grad(run(name, p, longer[:, :-2], p.weight, p.bias), longer)
    assert torch.equal(gradient[:, :-2], gradients(name, p)[1])
    assert (gradient[:, -2:] == 0).all()


# The last row of every second column ends before a whole number of strides.
STRIDED: dict[str, tuple[tuple[int, int], Callable[[Tensor], Tensor]]] = {
    "every second column": ((V, 2 * H - 1), lambda w: w[:, ::2]),
    "every third column of [H, V]": ((H, 3 * V - 2), lambda w: w[:, ::3].T),
    "every second row": ((2 * V, H + 5), lambda w: w[::2, :H]),
}


@pytest.mark.parametrize("name", STRIDED)
def test_a_head_with_strides_is_taken_as_it_lies(name: str) -> None:
    shape, view = STRIDED[name]
    whole = leaf(0.3 * torch.randn(shape))
    hidden, labels = leaf(torch.randn(9, H)), labels_of((9,))
    found = []
    for weight in (view(whole), view(whole).contiguous()):
        loss = tl.linear_cross_entropy(hidden, weight, labels)
        found.append((loss, *torch.autograd.grad(loss, (hidden, whole))))
    assert_same(found[0], found[1])
    with torch.no_grad():
        blocks = allocations(lambda: tl.linear_cross_entropy(hidden, view(whole), labels))
    assert max(blocks) < V * H * 4, blocks


@pytest.mark.parametrize("shape", [(1, H), (V, 1)], ids=["one row", "one feature"])
def test_heads_that_share_memory_are_copied(shape: tuple[int, int]) -> None:
    """The student's, and a teacher's."""
    hidden, narrow, teacher = leaf(torch.randn(9, H)), leaf(torch.randn(shape)), torch.randn(shape)
    labels, found = labels_of((9,)), []
    for own in (narrow.expand(V, H), narrow.expand(V, H).contiguous()):
        other = teacher.expand(V, H) if not found else teacher.expand(V, H).contiguous()
        for loss in (
            tl.linear_cross_entropy(hidden, own, labels),
            tl.linear_distillation(hidden, own, hidden.detach(), other),
        ):
            found.append((loss, *torch.autograd.grad(loss, (hidden, narrow), retain_graph=True)))
    for ours, expected in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


EXPANDED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "one row": ((H,), lambda x: x.expand(15, H)),
    "one batch": ((5, H), lambda x: x.expand(3, 5, H)),
    "one position": ((3, 1, H), lambda x: x.expand(3, 5, H)),
    "one feature": ((3, 5, 1), lambda x: x.expand(3, 5, H)),
    "sliding": ((H + 28,), lambda x: x.unfold(0, H, 2)),
    "none": ((0, 1), lambda x: x.expand(0, H)),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_hidden_states_that_share_memory_are_copied(name: str) -> None:
    shape, view = EXPANDED[name]
    hidden, weight = leaf(torch.randn(shape)), leaf(0.3 * torch.randn(V, H))
    labels = labels_of(view(hidden).shape[:-1])
    for mode in ({}, {"grad_in_forward": False}):
        expected = tl.linear_cross_entropy(view(hidden).contiguous(), weight, labels, **mode)
        loss = tl.linear_cross_entropy(view(hidden), weight, labels, **mode)
        assert torch.equal(loss, expected)
        both = [torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_that_negate(name: str) -> None:
    """As z.conj().imag: the memory holds the opposite."""
    p = problem()
    expected = gradients(name, p)
    negated = problem()
    negated.__dict__.update(p.__dict__)
    for key in ("old_logp", "advantages", "row_weights"):
        setattr(negated, key, torch._neg_view(-getattr(p, key)))
    inputs = tuple(leaf(-x.detach()) for x in p.leaves(name))
    loss = run(name, negated, *map(torch._neg_view, inputs))
    found = loss.detach(), *(-g for g in torch.autograd.grad(loss, inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_upstream_gradients_that_are_negated() -> None:
    p, upstream = problem(), torch.randn(3, 5)
    found = []
    for given in (upstream, torch._neg_view(-upstream)):
        loss = tl.cross_entropy(p.logits, p.labels, reduction="none")
        (gradient,) = torch.autograd.grad(loss, p.logits, given)
        found.append(gradient)
    assert torch.equal(*found)


def test_logits_that_are_negated_are_not_written_over() -> None:
    logits = torch._neg_view(problem().logits * 1)
    with pytest.raises(ValueError, match=r"^inplace_backward: expected logits .* negated$"):
        tl.cross_entropy(logits, problem().labels, inplace_backward=True, grad_in_forward=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_of_the_vocabulary(name: str) -> None:
    """Columns from valid_vocab on: outside the softmax, with a gradient of exactly 0."""
    p = problem()
    p.labels %= 50
    p.labels[:, 0] = -100
    ours = gradients(name, p, valid_vocab=50)
    assert_same(ours, gradients(name, p, plain, valid_vocab=50))
    padding = [g[50:] for g in ours[2:]] if "linear" in name else [ours[1][..., 50:]]
    assert not any(g.any() for g in padding)
