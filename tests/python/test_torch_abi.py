"""The public names' signatures, against torch's and the library's own description; call counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tileloss import torch as tl
from tileloss._core import functions
from tileloss._core.functions import PUBLIC_OPTIONS
from tileloss._core.slots import ROW_OUTPUTS
from torch_problems import FUNCTIONS, OF_TORCH_2_15, problem, run


def test_row_outputs_are_the_librarys() -> None:
    assert set(tl.RowOutputs._fields) == set(ROW_OUTPUTS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_of_the_library_is_an_argument(name: str) -> None:
    function, options = getattr(tl, name), PUBLIC_OPTIONS[name]
    # This version's Python has no shards; compute_dtype is an argument of its own, and autograd adds gradients up.
    left_out = {"vocab_start", "vocab_total", "compute_dtype", "accumulate"}
    assert {*options} == {*functions.FUNCTIONS[name].options} - left_out
    arguments = {*inspect.signature(function).parameters}
    assert {*options} <= arguments and not left_out - {"compute_dtype"} & arguments
    p = problem()
    of_hidden = "linear_" in name
    assert all(f"  {option}: " in function.__doc__ for option in options) != of_hidden
    if "policy" in name:
        assert torch.equal(
            run(name, p, *p.leaves(name), **dict.fromkeys(options)), run(name, p, *p.leaves(name))
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_are_the_librarys(name: str) -> None:
    for option, parameter in inspect.signature(getattr(tl, name)).parameters.items():
        described = functions.FUNCTIONS[name].options.get(option)
        if described is None or parameter.default is None:
            continue
        default = parameter.default
        index = described.choices.index(default) if described.choices else default
        assert index == described.default, option


def parameters(function: Callable[..., Any], kind: Any) -> dict[str, Any]:
    """Names and defaults of the parameters of one kind."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is kind}


BY_POSITION, BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def test_cross_entropy_is_called_as_torchs() -> None:
    ours, theirs = tl.cross_entropy, parameters(F.cross_entropy, BY_POSITION)
    assert list(parameters(ours, BY_POSITION)) == list(theirs)[:3] == ["input", "target", "weight"]
    given = parameters(ours, BY_POSITION) | parameters(ours, BY_NAME)
    assert theirs.keys() - given.keys() == {"size_average", "reduce"}  # deprecated there
    assert {name: given[name] for name in theirs if name in given} == {
        name: default for name, default in theirs.items() if name in given
    }


@OF_TORCH_2_15
def test_linear_cross_entropy_is_called_as_torchs() -> None:
    ours, theirs = tl.linear_cross_entropy, F.linear_cross_entropy
    assert parameters(ours, BY_POSITION) == parameters(theirs, BY_POSITION)
    given, expected = parameters(ours, BY_NAME), parameters(theirs, BY_NAME)
    assert expected.keys() - given.keys() == {"options"}  # its chunks; here workspace_bytes
    assert {name: given[name] for name in expected if name in given} == {
        name: default for name, default in expected.items() if name != "options"
    }


@OF_TORCH_2_15
@pytest.mark.parametrize("options", [{}, {"ignore_index": None}, {"ignore_index": 3}])
def test_a_call_of_torchs_gives_the_same(options: dict[str, Any]) -> None:
    p = problem()
    given = options | {"linear_bias": p.bias, "weight": torch.rand(67), "label_smoothing": 0.1}
    rows = p.labels.flatten().clamp(min=3) if 3 in options.values() else p.labels.flatten()
    ours, theirs = (
        function(p.hidden.flatten(0, 1), p.weight, rows, **given)
        for function in (tl.linear_cross_entropy, F.linear_cross_entropy)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_come_by_position_and_options_by_name(name: str) -> None:
    function = getattr(tl, name)
    expected = ["input", "linear_weight", "target"] if "linear" in name else ["input", "target"]
    expected += ["advantages"] * ("policy" in name) + ["weight"] * (name == "cross_entropy")
    assert list(parameters(function, BY_POSITION)) == expected
    assert ("linear_bias" in parameters(function, BY_NAME)) == ("linear" in name)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.endswith("logprobs")])
def test_where_the_gradient_is_computed_has_one_default(name: str) -> None:
    """None, and each function says what that means for it."""
    assert parameters(getattr(tl, name), BY_NAME)["grad_in_forward"] is None
    documented = inspect.getdoc(getattr(tl, name)) or ""
    assert "grad_in_forward" in documented and "None" in documented


@pytest.mark.parametrize("name", tl.__all__)
def test_public_names_are_documented(name: str) -> None:
    documented = inspect.getdoc(getattr(tl, name))
    assert documented
    assert len(documented) > 60


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_are_counted(name: str) -> None:
    p = problem()
    options = {} if name.endswith("logprobs") else {"grad_in_forward": False}
    modes = [(options, {f"{name}/forward": 2, f"{name}/backward": 2})]
    if options:
        modes.append(({"grad_in_forward": True}, {f"{name}/value_and_grad": 2}))
    for mode, expected in modes:
        before = tl.call_counts()
        for _ in range(2):
            run(name, p, *p.leaves(name), **mode).backward()
        after = tl.call_counts()
        assert {
            k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)
        } == expected
    tl.call_counts().clear()
    assert tl.call_counts() == after


def test_a_call_that_fails_is_not_counted() -> None:
    before = tl.call_counts()
    with pytest.raises(IndexError):
        tl.cross_entropy(torch.zeros(1, 3), torch.tensor([3]))
    assert tl.call_counts() == before
