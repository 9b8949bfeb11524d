"""A head with a low-rank part: every function is that of the two heads side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tileloss import torch as tl
from torch_problems import (
    ALL_FUNCTIONS,
    OF_TORCH_2_15,
    V,
    assert_same,
    forget_calls,
    problem,
    run,
)

R = 6
FUNCTIONS = [name for name in ALL_FUNCTIONS if name.startswith("linear")]


def low_rank(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    x, b = torch.randn(3, 5, R), 0.3 * torch.randn(V, R)
    return x.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()


def as_two(
    name: str, p: Any, h: Tensor, w: Tensor, c: Tensor, x: Tensor, b: Tensor, **options: Any
) -> Tensor:
    return run(name, p, h, w, c, low_rank=(x, b), **options)


def as_one(
    name: str, p: Any, h: Tensor, w: Tensor, c: Tensor, x: Tensor, b: Tensor, **options: Any
) -> Tensor:
    return run(name, p, torch.cat([h, x], -1), torch.cat([w, b], -1), c, **options)


def found(
    of: Any, name: str, p: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensor, ...]:
    leaves = (*p.leaves(name), *low_rank(dtype))
    loss = of(name, p, *leaves, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"workspace_bytes": 400000}], ids=str)
def test_all_functions_and_gradients(name: str, options: dict[str, Any]) -> None:
    p = problem()
    assert_same(found(as_two, name, p, **options), found(as_one, name, p, **options))
    assert_same(found(as_two, name, p, **options), found(as_one, name, p, **options))  # as kept


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_of_the_gradients_alone(name: str) -> None:
    p, every = problem(), None
    for which in (range(5), *([n] for n in range(5)), [0, 3, 4]):
        leaves = [x.detach() for x in (*p.leaves(name), *low_rank())]
        for n in which:
            leaves[n].requires_grad_()
        asked = [leaves[n] for n in which]
        gradients = torch.autograd.grad(as_two(name, p, *leaves), asked)
        every = every or gradients
        assert_same(gradients, tuple(every[n] for n in which))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_in_bfloat16(dtype: torch.dtype) -> None:
    """peft keeps adapters in float32 beside a head in bfloat16."""
    p = problem(torch.bfloat16)
    ours = found(as_two, "linear_cross_entropy", p, dtype)
    exact = found(as_one, "linear_cross_entropy", problem_in_float32(p), torch.float32)
    assert_same(ours, exact, 0.02)
    assert ours[4].dtype == ours[5].dtype == dtype


def problem_in_float32(p: Any) -> Any:
    values = {
        name: x.detach().float() if x.is_floating_point() else x for name, x in vars(p).items()
    }
    return type(p)(**{n: x.requires_grad_(vars(p)[n].requires_grad) for n, x in values.items()})


@OF_TORCH_2_15
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph(name: str) -> None:
    p = problem()
    compiled = torch.compile(as_two, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_same(found(compiled, name, p), found(as_two, name, p), 1e-6)


@OF_TORCH_2_15
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "soft" not in name])
def test_under_autocast(name: str) -> None:
    """The low-rank part's operands are rounded as hidden states and head are, and get gradients of their own types."""
    p = problem()
    with torch.autocast("cpu", torch.bfloat16):
        ours = found(as_two, name, p)
        assert_same(ours, found(as_one, name, p), 0.02)
    given = found(as_two, name, p, compute_dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(ours, given, strict=True))


@pytest.mark.parametrize(
    "module",
    [
        tl.LinearCrossEntropyLoss, tl.LinearPolicyLoss, tl.LinearDistillationLoss, tl.LinearSparseDistillationLoss,
    ],
)  # fmt: skip
def test_modules(module: Any) -> None:
    p, name = problem(), module._function.__name__
    loss_of = module(16, V, bias=True)

    def called(
        hidden: Tensor, weight: Tensor, *given: Any, linear_bias: Tensor, **named: Any
    ) -> Any:
        loss_of.linear.weight, loss_of.linear.bias = weight, linear_bias
        return loss_of(hidden, *given, **named)

    def through_the_module(
        name: str, p: Any, h: Tensor, w: Tensor, c: Tensor, *part: Tensor
    ) -> Tensor:
        of = SimpleNamespace(**{name: called})
        return run(name, p, h, nn.Parameter(w), nn.Parameter(c), low_rank=part, of=of)

    leaves = *p.leaves(name), *low_rank()
    loss, expected = (of(name, p, *leaves) for of in (through_the_module, as_two))
    assert torch.equal(loss, expected)
    asked = [leaves[n] for n in (0, 3, 4)]
    assert_same(torch.autograd.grad(loss, asked), torch.autograd.grad(expected, asked))


def test_a_modules_layer_that_does_more() -> None:
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + input.sum()

    p, loss_of = problem(), tl.LinearCrossEntropyLoss(16, V)
    plain = nn.Linear(16, V, bias=False)
    plain.forward = lambda x: 2 * x  # type: ignore[assignment]
    loss_of.linear = plain
    with pytest.raises(TypeError, match="got torch.nn.modules.linear.Linear with its own"):
        loss_of(p.hidden, p.labels)
    loss_of.linear = Adapted(16, V, bias=False)
    with pytest.raises(
        TypeError,
        match="linear: expected a layer whose forward .* got .*Adapted with its own; .* is low_rank",
    ):
        loss_of(p.hidden, p.labels)
    with pytest.raises(TypeError, match="unexpected keyword argument 'low_rank'"):
        tl.CrossEntropyLoss()(p.logits, p.labels, low_rank=low_rank())


def test_a_head_whose_gradient_is_added_up() -> None:
    p, sums = problem(), torch.zeros(V, 16)
    x, b = low_rank()
    loss = as_two("linear_cross_entropy", p, *p.leaves("linear"), x, b, linear_weight_grad=sums)
    loss.backward()
    expected = found(as_one, "linear_cross_entropy", p)
    assert_same((sums, x.grad, b.grad), (expected[2], *expected[4:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "low_rank: expected None or two tensors, .* got str"),
        ((None, None), "low_rank: expected None or two tensors, .* got tuple of NoneType, NoneType"),
        ((torch.ones(3, 5, R), torch.ones(V, R), 2.0), "low_rank: .* got tuple of Tensor, Tensor, float"),
        ((torch.ones(3, 5, R), None), r"low_rank\[1\]: expected a Tensor, got NoneType"),
        ((None, torch.ones(V, R)), r"low_rank\[0\]: expected a Tensor, got NoneType"),
        ((torch.ones(3, 5, R), torch.ones(V, R + 1)), r"low_rank\[1\]: expected shape \[67, 6\], got \[67, 7\]"),
        ((torch.ones(3, 4, R), torch.ones(V, R)), r"low_rank\[0\]: expected shape \[3, 5, R\], got \[3, 4, 6\]"),
        ((torch.ones(3, 5, R).long(), torch.ones(V, R)), r"low_rank\[0\]: expected"),
        ((torch.ones(3, 5, 513), torch.ones(V, 513)), r"low_rank\[0\].cols: expected 1 to 512, got 513"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    forget_calls()
    p = problem()
    with pytest.raises((TypeError, ValueError), match=message):
        tl.linear_cross_entropy(p.hidden, p.weight, p.labels, low_rank=given)
