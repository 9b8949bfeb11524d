"""torch.compile: the whole graph, shapes and numbers that change without a recompilation, results as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tileloss import torch as tl
from torch_problems import (
    ALL_FUNCTIONS,
    FUNCTIONS,
    LINEAR_FUNCTIONS,
    OF_TORCH_2_15,
    TEACHER_FUNCTIONS,
    Problem,
    assert_same,
    gradients,
    problem,
    run,
)

V, H = 67, 16
LINEAR_TARGETS = ("linear_distillation", "linear_soft_labels")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compilations:
    """A backend that counts its graphs and leaves the work to aot_eager."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        self.count += 1
        return lookup_backend("aot_eager")(module, inputs)


def forward_and_backward(
    function: Callable[..., Tensor], name: str, p: Problem, **options: Any
) -> tuple[Tensor, ...]:
    leaves = tuple(x.detach().requires_grad_() for x in p.leaves(name))
    loss = function(name, p, *leaves, **options)
    return loss.detach(), *torch.autograd.grad(2 * loss, leaves)


def agree(
    compiled: Any, eager: Any, name: str, p: Problem, rtol: float = 1e-6, **options: Any
) -> None:
    ours = forward_and_backward(compiled, name, p, **options)
    assert_same(ours, forward_and_backward(eager, name, p, **options), rtol)


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_every_function_and_mode_is_one_graph(name: str) -> None:
    """fullgraph=True raises where a graph would break."""
    backend = Compilations()
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend=backend)
    p = problem()
    modes: list[dict[str, Any]] = [{}]
    modes += [{"inplace_backward": True}] if "linear" not in name else []
    modes += [] if name.endswith("logprobs") else [{"grad_in_forward": "linear" not in name}]
    modes += (
        [{"grad_in_forward": True, "inplace_backward": True}] if name == "cross_entropy" else []
    )
    for number, mode in enumerate(modes):
        agree(compiled, run, name, p, **mode)
        assert backend.count == number + 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *product(["cross_entropy", "linear_cross_entropy"], [torch.float32, torch.float16]),
        *((name, torch.float32) for name in (*TEACHER_FUNCTIONS, *LINEAR_TARGETS)),
    ],
    ids=str,
)
def test_inductor(name: str, dtype: torch.dtype) -> None:
    """65536: the scale that AMP begins with, above float16's range."""

    def scaled(name: str, p: Problem, *leaves: Tensor, **options: Any) -> Tensor:
        return 65536 * run(name, p, *leaves, **options)

    rtol = 1e-6 if dtype == torch.float32 else 2.0**-10
    compiled = torch.compile(scaled, fullgraph=True)
    agree(compiled, scaled, name, problem(dtype), rtol, grad_in_forward=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_shapes_that_change_compile_twice_at_most(name: str) -> None:
    backend = Compilations()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for batch in (3, 4, 7, 6, 2):
        agree(compiled, run, name, problem(batch=batch))
    assert backend.count <= 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dynamic_shapes_compile_for_the_first_call_only(name: str) -> None:
    """Where an argument's default is a float, torch.compile starts a second time once it is found to be constant."""
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (3, 5, 8):
        with torch._dynamo.config.patch(error_on_recompile=batch > 3):
            agree(compiled, run, name, problem(batch=batch))


def run_on_used_rows(name: str, p: Problem, *leaves: Tensor, **options: Any) -> Tensor:
    """Of the rows that are not ignored, each time found anew: how many there are a graph learns only when it runs."""
    first, *rest = leaves
    used = Problem(
        *(first[p.labels != -100],) * 2, p.weight, p.bias, p.labels[p.labels != -100],
        p.row_weights[p.labels != -100], p.old_logp[p.labels != -100], p.old_logp[p.labels != -100] + 3.5,
        p.teacher_hidden, p.teacher,
    )  # fmt: skip
    if "policy" in name:
        options |= {"advantage_level": "token", "ref_logp": used.old_logp, "beta": 0.1}
        options["mask"] = used.row_weights > 0.6
        if "linear" in name:
            *rest, options["linear_bias"] = rest
        function = getattr(tl, name)
        loss: Tensor = function(used.logits, *rest, used.labels, used.advantages, **options)
        return loss
    return run(name, used, used.logits, *rest, **options)


@pytest.mark.parametrize("mode", [{}, {"grad_in_forward": False}], ids=["", "two passes"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_that_are_known_when_the_graph_runs(name: str, mode: dict[str, Any]) -> None:
    options = {} if name.endswith("logprobs") else mode
    compiled = torch.compile(run_on_used_rows, fullgraph=True, backend="aot_eager")
    agree(compiled, run_on_used_rows, name, problem(), **options)


@pytest.mark.parametrize("name", ["policy_loss", "linear_policy_loss"])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_sequences_whose_number_is_known_when_the_graph_runs(name: str, level: str) -> None:
    p, kept = problem(), torch.tensor([True, False, True])
    advantages = p.advantages if level == "sequence" else p.old_logp + 3.5

    def chosen(name: str, p: Problem, first: Tensor, *rest: Tensor) -> Tensor:
        bias = dict(zip(["linear_bias"], rest[1:], strict=False))
        tensors = (first[kept], *rest[:1], p.labels[kept], advantages[kept])
        loss: Tensor = getattr(tl, name)(*tensors, **bias)
        return loss

    agree(torch.compile(chosen, fullgraph=True, backend="aot_eager"), chosen, name, p)


def test_inductor_on_rows_that_a_mask_keeps() -> None:
    def loss(x: Tensor, labels: Tensor) -> Tensor:
        used = labels != -100
        return tl.cross_entropy(x[used], labels[used], token_weights=weights[used])

    p = problem()
    weights, x = p.row_weights, p.logits
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        value = function(x, p.labels)
        results.append((value.detach(), *torch.autograd.grad(value, x)))
    assert_same(results[1], results[0], 1e-6)


def test_sizes_that_differ_when_the_graph_runs() -> None:
    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return tl.cross_entropy(x[labels != -100], labels[labels != 3])

    p = problem()
    p.labels[0, 1] = 3
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(
        RuntimeError, match=r"Runtime assertion failed for expression Eq\(u\d, u\d\)"
    ):
        compiled(p.logits, p.labels)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_temperature_that_is_a_tensor_compiles_once(name: str) -> None:
    backend = Compilations()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    p = problem()
    for value in (1.0, 0.7, 1.3):
        given = {"temperature": torch.tensor(value)}
        ours = forward_and_backward(compiled, name, p, **given)
        assert_same(ours, forward_and_backward(run, name, p, temperature=value), 1e-6)
    assert backend.count == 1


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("cross_entropy", "temperature", (1.5, 0.7, 1.3, 0.9)),
        ("linear_policy_loss", "temperature", (1.5, 0.7, 1.3, 0.9)),
        ("linear_policy_loss", "temperature", (4, 5, 2, 3)),
        ("cross_entropy", "num_items", (10, 11, 12, 13)),
    ],
)
def test_a_number_that_changes_compiles_twice_at_most(name: str, option: str, values: Any) -> None:
    backend = Compilations()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    p = problem()
    for value in values:
        agree(compiled, run, name, p, **{option: value})
    assert backend.count <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["cross_entropy", "linear_policy_loss"])
def test_a_number_is_float32_whatever_the_default_type(name: str, dtype: torch.dtype) -> None:
    p, compiled = problem(), torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = forward_and_backward(run, name, p, temperature=0.7)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        ours = forward_and_backward(compiled, name, p, temperature=0.7)
    finally:
        torch.set_default_dtype(default)
    assert_same(ours, expected, 1e-6)


def test_a_large_ignore_index_is_exact_in_a_graph() -> None:
    p = problem()
    p.labels[0, 1:3] = 2**53
    p.labels[:, 0] = 2**53 + 1
    compiled = torch.compile(tl.cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(
        IndexError, match=r"target\[1\]: .* or ignore_index 9007199254740993, got 90"
    ):
        compiled(p.logits, p.labels, ignore_index=2**53 + 1)
    p.labels[0, 1:3] = 3
    loss = compiled(p.logits, p.labels, ignore_index=2**53 + 1)
    p.labels[:, 0] = -100
    assert torch.equal(loss, tl.cross_entropy(p.logits, p.labels))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["logprobs", "linear_cross_entropy", "linear_distillation"])
def test_an_exported_program_is_trained(name: str, strict: bool) -> None:
    """Whatever asked for a gradient while it was made: nothing, or the parameters alone."""

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = torch.nn.ParameterList(p.leaves(name)[1:])

        def forward(self, first: Tensor) -> Tensor:
            return run(name, constant, first, *list(self.rest))

    p = problem()
    constant = replace(p, weight=p.weight.detach())  # a teacher's head
    first = p.leaves(name)[0]
    for is_recorded in (False, True):
        with torch.set_grad_enabled(is_recorded):
            program = torch.export.export(Loss(), (first.detach(),), strict=strict).module()
        loss = program(first)
        found = torch.autograd.grad(loss, (first, *program.parameters()))
        assert_same((loss, *found), gradients(name, p), 1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_labels_of_8_bits_in_a_graph(name: str) -> None:
    p = problem()
    p.labels = torch.randint(0, V, p.labels.shape).to(torch.uint8)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    ours = forward_and_backward(compiled, name, p, ignore_index=3)
    p.labels = p.labels.long()
    assert_same(ours, forward_and_backward(run, name, p, ignore_index=3), 1e-6)


# At a break of the graph older ones forget that a tensor is dual: its tangent is None.
@OF_TORCH_2_15
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_is_refused_in_a_graph(name: str) -> None:
    p = problem()
    first, *rest = (x.detach() for x in p.leaves(name))

    def loss(x: Tensor) -> Tensor:
        return run(name, p, x, *rest)

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(loss, (x,), (x,))[1]

    def dual(x: Tensor) -> Any:
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(x, x)
            return torch.autograd.forward_ad.unpack_dual(loss(x)).tangent

    for function in (tangent, dual):
        with pytest.raises(NotImplementedError, match="^tileloss: "):
            torch.compile(function, backend="aot_eager")(first)
        torch._dynamo.reset()  # what it has left to Python it would leave there again
        with pytest.raises(torch._dynamo.exc.Unsupported, match="forward-mode"):
            torch.compile(function, fullgraph=True, backend="aot_eager")(first)


def test_metrics_and_offsets_in_a_graph() -> None:
    def loss(x: Tensor, labels: Tensor, advantages: Tensor, offsets: Tensor) -> Any:
        options: dict[str, Any] = {"preset": "gspo", "beta": 0.1, "ref_logp": -3 - torch.rand(15)}
        return tl.policy_loss(
            x, labels, advantages, sequence_offsets=offsets, return_metrics=True, **options
        )

    p = problem()
    offsets = torch.tensor([0, 4, 9, 15])
    given = (p.logits.detach().view(-1, V), p.labels.view(-1), p.advantages, offsets)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    value, metrics = compiled(*given)
    torch.manual_seed(3)
    expected, expected_metrics = loss(*given)
    assert torch.equal(value, expected)
    torch.testing.assert_close(metrics, expected_metrics, rtol=0, atol=0, equal_nan=True)


def test_every_row_output_in_a_graph() -> None:
    p = problem()

    def rows(x: Tensor) -> tl.RowOutputs:
        return tl.logprobs(x, p.labels, outputs=tl.RowOutputs._fields)

    compiled = torch.compile(rows, fullgraph=True, backend="aot_eager")
    for value, expected in zip(compiled(p.logits), rows(p.logits), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", ["cross_entropy", *LINEAR_FUNCTIONS])
def test_modules_and_autocast_in_a_graph(name: str) -> None:
    def cast(name: str, p: Problem, *leaves: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(name, p, *leaves)

    agree(torch.compile(cast, fullgraph=True, backend="aot_eager"), cast, name, problem())


def test_a_module_in_a_graph() -> None:
    module = tl.LinearCrossEntropyLoss(H, V, bias=True, label_smoothing=0.1)
    p = problem()
    hidden = p.hidden.detach()
    expected = module(hidden, p.labels)
    expected.backward()
    gradient = module.linear.weight.grad.clone()
    module.zero_grad()
    loss = torch.compile(module, fullgraph=True, backend="aot_eager")(hidden, p.labels)
    loss.backward()
    assert torch.equal(loss, expected)
    torch.testing.assert_close(module.linear.weight.grad, gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", LINEAR_FUNCTIONS)
def test_a_heads_gradient_is_added_in_a_graph(name: str, backend: str) -> None:
    """The graph's mutation: of two heads in one graph, and of another tensor in a graph that is there."""
    if backend == "inductor" and name != "linear_cross_entropy":
        pytest.skip("one function of inductor's is enough")

    def step(p: Problem, leaves: tuple[Tensor, ...], head_grad: Tensor) -> Tensor:
        first = run(name, p, *leaves, linear_weight_grad=head_grad)
        return first + 0.5 * run(name, p, *leaves, softcap=3.0, linear_weight_grad=head_grad)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        p = problem()
        leaves, found = p.leaves(name), []
        for function in (step, compiled):
            head_grad = torch.ones(V, H)
            for x in leaves:
                x.grad = None
            (0.3 * function(p, leaves, head_grad)).backward()
            assert leaves[1].grad is None
            found.append((head_grad, leaves[0].grad, leaves[2].grad))
        assert_same(*found, 1e-6)


@pytest.mark.parametrize(
    ("backend", "name"), [("aot_eager", "cross_entropy"), ("eager", "linear_cross_entropy")]
)
def test_double_backward_is_refused_in_a_graph(backend: str, name: str) -> None:
    p = problem()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    inputs = tuple(x * 1 for x in p.leaves(name))
    once = torch.autograd.grad(compiled(name, p, *inputs), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(once[0].sum(), inputs[0], allow_unused=True)
