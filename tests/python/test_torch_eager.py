"""Eager calls go to the kernels directly; whoever watches torch's operators sees them as before."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from test_torch_modes import IN_PLACE, MODES, ONE_PASS, OVERWRITTEN, TWO_PASSES, mode_id, non_leaves
from tileloss import torch as tl
from tileloss._core import calls
from torch_problems import (
    ALL_FUNCTIONS,
    FUNCTIONS,
    assert_same,
    forget_calls,
    problem,
    run,
    weighted_sum,
)  # fmt: skip


class Watcher(TorchDispatchMode):
    """The names of the operators that were called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def ours(self) -> list[str]:
        return [name for name in self.names if name.startswith("tileloss::")]


def loss_and_gradients(p: Any, name: str, mode: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs = tuple(x * 1 for x in p.leaves(name))
    loss = run(name, p, *inputs, **mode)
    return loss.detach(), *(g.clone() for g in torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize(("name", "mode"), MODES, ids=mode_id)
def test_a_watched_call_is_the_operator_and_gives_the_same(name: str, mode: dict[str, Any]) -> None:
    p = problem()
    direct = loss_and_gradients(p, name, mode)
    with Watcher() as watcher:
        watched = loss_and_gradients(p, name, mode)
    passes = 1 if mode.get("grad_in_forward", "linear" in name) and "logprobs" not in name else 2
    assert len(watcher.ours()) == passes
    assert all(torch.equal(a, b) for a, b in zip(direct, watched, strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tensor_subclass_meets_the_operator(name: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    p = problem()
    expected = loss_and_gradients(p, name, {})
    leaves = tuple(
        TwoTensor(x.detach().clone(), x.detach().clone()).requires_grad_() for x in p.leaves(name)
    )
    loss = run(name, p, *leaves)
    gradients = torch.autograd.grad(loss, leaves)
    for ours, one in zip((loss, *gradients), expected, strict=True):
        assert torch.equal(ours.a, one)
        assert torch.equal(ours.b, one)


@pytest.mark.parametrize(("name", "mode"), [*TWO_PASSES, *ONE_PASS, *OVERWRITTEN], ids=mode_id)
def test_batched_upstream_gradients(name: str, mode: dict[str, Any]) -> None:
    """torch.autograd.grad(is_grads_batched=True), which torch.autograd.functional.jacobian(vectorize=True) calls."""
    p, inputs = non_leaves(name)
    loss = run(name, p, *inputs, **mode)
    one = torch.autograd.grad(loss, inputs, retain_graph=True)
    upstream = torch.tensor([1.0, 2.0, -0.5])
    with pytest.raises(RuntimeError, match="^tileloss: double backward .* is_grads_batched"):
        torch.autograd.grad(loss, inputs, upstream, is_grads_batched=True, create_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the batch is gone through one by one
        batched = torch.autograd.grad(loss, inputs, upstream, is_grads_batched=True)
    for g, expected in zip(batched, one, strict=True):
        for factor, scaled in zip(upstream, g, strict=True):
            torch.testing.assert_close(scaled, expected * factor, rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated; shapes become constants
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_trace_holds_the_operator(requires_grad: bool) -> None:
    p = problem()
    logits = p.logits.detach().requires_grad_(requires_grad)
    traced = torch.jit.trace(tl.cross_entropy, (logits, p.labels), check_trace=False)
    assert "tileloss::cross_entropy(" in str(traced.graph)
    torch.testing.assert_close(traced(2 * logits, p.labels), tl.cross_entropy(2 * logits, p.labels))


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_a_trace_gives_gradients_that_it_was_made_without(name: str) -> None:
    """Of all that is differentiable, or of the first input alone."""
    p = problem()
    expected = loss_and_gradients(p, name, {})
    constant = dataclasses.replace(p, weight=p.weight.detach())  # a teacher's head
    modes = [{}] if name.endswith("logprobs") else [{}, {"grad_in_forward": True}]
    for mode, needed in itertools.product(modes, (0, 1)):
        plain = [x.detach().requires_grad_(i < needed) for i, x in enumerate(p.leaves(name))]
        traced = torch.jit.trace(
            lambda *leaves: run(name, constant, *leaves, **mode),  # noqa: B023
            tuple(plain),
            check_trace=False,
        )
        leaves = tuple(x * 1 for x in p.leaves(name))
        loss = traced(*leaves)
        found = (loss, *torch.autograd.grad(loss, leaves))
        assert_same(found, expected, 1e-6)


@pytest.mark.parametrize(("name", "mode"), IN_PLACE, ids=mode_id)
def test_writing_over_the_logits_is_known_to_autograd(name: str, mode: dict[str, Any]) -> None:
    p, (logits,) = non_leaves(name)
    before = logits._version
    torch.autograd.grad(run(name, p, logits, **mode), logits)
    assert logits._version == before + 1


@pytest.mark.parametrize(("name", "mode"), MODES, ids=mode_id)
def test_the_default_device_is_not_asked(name: str, mode: dict[str, Any]) -> None:
    """Outputs are where the inputs are."""
    p = problem()
    expected = loss_and_gradients(p, name, mode)
    with torch.device("meta"):
        found = loss_and_gradients(p, name, mode)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_graphs_name_the_function() -> None:
    p = problem()
    loss = tl.cross_entropy(p.logits, p.labels)
    assert loss.grad_fn is not None
    assert loss.grad_fn.name() == "tileloss_cross_entropyBackward"
    assert weighted_sum(
        tl.logprobs(p.logits, p.labels, outputs=("logp", "lse", "entropy")), p
    ).grad_fn


def host_calls(function: Callable[[], Any]) -> int:
    """Calls of Python's and C's functions, as sys.setprofile sees them, in one of many calls."""
    events: list[str] = []
    for _ in range(3):
        function()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


@pytest.mark.parametrize(("name", "mode"), MODES, ids=mode_id)
def test_what_a_step_costs_on_the_host(name: str, mode: dict[str, Any]) -> None:
    """Counted, as times depend on the machine. F.cross_entropy's step has 39 of them. Where each call is checked, encoded
    and planned anew, a step of these has 190 to 510 more, and cross_entropy's takes 3.4 times as long at [8, 512], not 2.3."""
    p, leaf = problem(), torch.randn(8, 16, requires_grad=True)
    torchs = host_calls(lambda: F.cross_entropy(leaf, torch.zeros(8, dtype=torch.int64)).backward())
    in_place = bool(mode.get("inplace_backward"))

    def step() -> None:
        leaves = [x * 1 if in_place else x for x in p.leaves(name)]
        run(name, p, *leaves, **mode).backward()

    older = 0 if torch.__version__ >= (2, 15) else 5  # torch 2.11 on Python 3.12: up to 4
    assert host_calls(step) - torchs <= (165 if "linear" in name else 135) + older


@pytest.mark.parametrize(("name", "mode"), MODES, ids=mode_id)
def test_a_call_like_an_earlier_one_is_one_call_of_the_library(
    name: str, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no plan, and each pass is validated once."""
    p = problem()
    expected = loss_and_gradients(p, name, mode)
    called: list[str] = []
    own = calls.lib

    class Recording:
        def __getattr__(self, function: str) -> Any:
            called.append(function)
            return getattr(own, function)

    monkeypatch.setattr(calls, "lib", Recording())
    found = loss_and_gradients(p, name, mode)
    passes = 1 if mode.get("grad_in_forward", "linear" in name) and "logprobs" not in name else 2
    assert called == ["tileloss_call"] * passes
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


LABELS, BAD_LABELS = torch.tensor([1, 0, 4, 2]), torch.tensor([1, 0, 5, 2])


def over_the_logits(first: int) -> Tensor:
    """A loss whose gradient goes over the logits, and whose teacher begins at that row of the same memory."""
    memory = torch.zeros(8, 5)
    logits = memory[:4].requires_grad_()
    with torch.no_grad():
        teacher = memory[first:][:4]
    return tl.distillation(logits, teacher, grad_in_forward=True, inplace_backward=True)


# What is right and what is wrong by values or addresses alone, or by a type that equals the right one.
ALIKE: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "label": (lambda y: tl.cross_entropy(torch.zeros(4, 5), y), LABELS, BAD_LABELS),
    "label with a gradient": (
        lambda y: tl.cross_entropy(torch.zeros(4, 5, requires_grad=True), y).backward(),
        LABELS,
        BAD_LABELS,
    ),
    "label with the head": (
        lambda y: tl.linear_cross_entropy(torch.zeros(4, 3), torch.zeros(5, 3), y),
        LABELS,
        BAD_LABELS,
    ),
    "number": (
        lambda t: tl.cross_entropy(torch.zeros(4, 5), LABELS, temperature=torch.tensor(t)),
        1.0,
        -1.0,
    ),
    "offsets": (
        lambda n: tl.policy_loss(
            torch.zeros(4, 5), LABELS, torch.ones(2), sequence_offsets=torch.tensor([0, n, 4])
        ),
        2,
        5,
    ),
    "type": (
        lambda flag: tl.distillation(
            torch.zeros(4, 5), torch.zeros(4, 5), scale_by_temperature_squared=flag
        ),
        True,
        1,
    ),
    "memory": (over_the_logits, 4, 2),
}


@pytest.mark.parametrize(("call", "right", "wrong"), ALIKE.values(), ids=ALIKE)
def test_what_is_wrong_is_said_after_a_call_that_was_right(
    call: Callable[[Any], Any], right: Any, wrong: Any
) -> None:
    words = []
    for before in ((), (right,), (wrong, right, right)):
        forget_calls()
        for each in before:
            with contextlib.suppress(Exception):
                call(each)
        with pytest.raises(Exception, match=": expected ") as error:
            call(wrong)
        words.append((error.type, str(error.value)))
    assert len({*words}) == 1
    call(right)


SCRIPT = """
import sys, torch
from tileloss import torch as tl
x, h, w, y = (torch.randn(s, requires_grad=True) for s in ((3, 9), (3, 4), (9, 4), 3))
y = torch.tensor([1, 2, 3])
for loss in (tl.cross_entropy(x, y), tl.linear_cross_entropy(h, w, y), tl.logprobs(x, y).logp.sum(),
             tl.cross_entropy(x * 1, y, grad_in_forward=True, inplace_backward=True)):
    loss.backward()
sys.exit("torch._dynamo" in sys.modules)
"""


def test_eager_calls_do_not_import_dynamo() -> None:
    """Which takes 1.4 s. torch's custom_op imports it at an operator's first call."""
    assert subprocess.run([sys.executable, "-c", SCRIPT]).returncode == 0
