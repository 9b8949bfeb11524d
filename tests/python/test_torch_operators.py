"""torch.library.opcheck over every operator of torch.ops.tileloss, called as the public functions call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tileloss import torch as tl
from tileloss._core import structs
from torch_problems import ALL_FUNCTIONS, H, V, problem, run


def registered() -> list[str]:
    """Every operator of the library, from torch's registry."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n.removeprefix("tileloss::") for n in names if n.startswith("tileloss::"))


class Recorder(TorchDispatchMode):
    """Keeps each operator's arguments as the public functions and their formulas make them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "tileloss":
            self.calls[name] = tuple(
                a.detach().clone() if isinstance(a, Tensor) else a for a in args
            )
        return func(*args, **(kwargs or {}))


MIXED = {"label_weight": torch.tensor(0.3), "outputs": ("divergence",)}
MORE: dict[str, dict[str, Any]] = {
    "distillation": MIXED,
    "sparse_distillation": MIXED,
    "soft_labels": {"label_smoothing": 0.1},
}


def recorded() -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator, from every function in every mode."""
    calls: dict[str, tuple[Any, ...]] = {}
    for name in ALL_FUNCTIONS:
        modes: list[dict[str, Any]] = [{}, {"temperature": torch.tensor(1.3)}]
        if "linear" in name:
            modes.append({"linear_weight_grad": torch.zeros(V, H)})
        else:
            modes.append({"inplace_backward": True})
        if not name.endswith("logprobs"):
            modes += [{"grad_in_forward": True}, {"grad_in_forward": False}]
            modes += [{"grad_in_forward": True, "inplace_backward": True}] * ("linear" not in name)
        for mode in modes:
            p = problem()
            with Recorder() as recorder:
                inputs = tuple(x * 1 for x in p.leaves(name))
                found = run(name, p, *inputs, **mode, **MORE.get(name.removeprefix("linear_"), {}))
                (found[0] if isinstance(found, tuple) else found).backward()
            calls |= recorder.calls
    return calls


CALLS = recorded()


def test_every_operator_is_called_by_a_function() -> None:
    assert sorted(CALLS) == registered()
    assert len(CALLS) >= 2 * 5 + 3 + 2 * 3 + 2 + 2 * 6


@pytest.mark.parametrize("name", registered())
def test_opcheck(name: str) -> None:
    operator = getattr(torch.ops.tileloss, name).default
    arguments = list(CALLS[name])
    differentiable = "_backward" not in name and not name.endswith("_")
    if differentiable:
        for i, a in enumerate(arguments[:3]):
            if isinstance(a, Tensor) and a.is_floating_point():
                arguments[i] = a.requires_grad_()
        assert any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
    torch.library.opcheck(operator, tuple(arguments))


def test_opcheck_finds_a_wrong_fake() -> None:
    """The check can fail: an operator whose fake kernel gives another shape."""
    operator = torch.library.custom_op(
        "tileloss_test::wrong", lambda x: x.sum(-1), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(lambda x: x.new_empty(x.shape))
    with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
        torch.library.opcheck(operator, (torch.randn(3, 4),))


@pytest.mark.parametrize("function", [tl.cross_entropy, tl.logprobs], ids=lambda f: f.__name__)
def test_fake_tensors_need_no_kernel(function: Callable[..., Any]) -> None:
    """Shapes, types and which outputs need gradients, as torch.export sees them."""
    from torch._subclasses import FakeTensorMode

    p = problem(torch.bfloat16)
    before = tl.call_counts()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        logits = mode.from_tensor(p.logits)
        result = function(logits, mode.from_tensor(p.labels))
    loss = result if isinstance(result, Tensor) else result.logp
    assert loss.dtype == torch.float32
    assert loss.shape == (() if isinstance(result, Tensor) else p.labels.shape)
    assert tl.call_counts() == before


def on_cuda(x: Any) -> Any:
    """Inside of a FakeTensorMode, which needs no GPU."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:1")


@pytest.mark.parametrize("name", registered())
def test_an_operator_of_cuda_tensors_gives_cuda_tensors(name: str) -> None:
    from torch._subclasses import FakeTensorMode

    operator = getattr(torch.ops.tileloss, name).default
    assert operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CUDA)
    with FakeTensorMode():
        found = operator(*map(on_cuda, CALLS[name]))
    results = found if isinstance(found, tuple) else (found,)
    assert {None if x is None else x.device for x in results} == {
        None if name.endswith("backward_") and "linear" not in name else torch.device("cuda", 1)
    }


@pytest.mark.parametrize("number", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_a_program_of_cuda_tensors(number: Any) -> None:
    """As torch.export makes it: one operator, on the device, with what CUDA's autocast says of the head."""
    from torch._subclasses import FakeTensorMode

    class Head(torch.nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor, number: Any) -> Tensor:
            return tl.linear_cross_entropy(hidden, weight, labels, temperature=number)

    p = problem()
    torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses where there is no GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            tensors = tuple(map(on_cuda, (p.hidden, p.weight, p.labels, number)))
            program = torch.export.export(Head(), tensors)
    finally:
        torch.set_autocast_enabled("cuda", False)
    graphs = [
        m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)
    ]
    calls = [n for graph in graphs for n in graph.nodes if str(n.target).startswith("tileloss.")]
    assert [str(n.target) for n in calls] == ["tileloss.linear_cross_entropy.default"]
    (loss,) = (v for v in calls[0].meta["val"] if v.numel() == 1)
    assert (loss.device, loss.shape) == (torch.device("cuda", 1), ())
    assert structs.BFLOAT16 in calls[0].args
