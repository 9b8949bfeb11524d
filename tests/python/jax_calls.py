"""The public functions of tileloss.jax on a Problem, and their comparison with the witness."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tileloss.jax as tileloss_jax
from jax_cases import POLICY
from jax_heads import head_differences
from jax_problems import OUTPUTS, Problem, Witness, witness
from jax_stage import differences
from tileloss.jax._sweeps import xla

Operands = tuple[Any, ...]  # (logits,) or (hidden, head, bias), perhaps with the two of low_rank
# Of tests that use the fixture `implementation` and look into the program.
ONLY_XLA = pytest.mark.parametrize("implementation", ["xla"], indirect=True)


def tiles_of(columns: int) -> Any:
    """A fixture of all tests of its module: "xla" goes over so many columns at a time."""

    @pytest.fixture(autouse=True)
    def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(xla, "TILE", columns)

    return small_tiles


def operands_of(problem: Problem, head_layout: str = "HV", rank: int = 0) -> Operands:
    """``rank``: how many of the last columns of hidden states and head are a low-rank part."""
    if problem.head is None:
        return (jnp.asarray(problem.logits),)
    hidden, weight, bias, _ = vars(problem.head).values()
    parts = [(hidden, weight)]
    if rank:
        parts = [(hidden[:, x], weight[:, x]) for x in (slice(None, -rank), slice(-rank, None))]
    pairs = [(jnp.asarray(x), jnp.asarray(y.T if head_layout == "HV" else y)) for x, y in parts]
    return (*pairs[0], None if bias is None else jnp.asarray(bias), *pairs[-1][: 2 * bool(rank)])


def call(problem: Problem, head_layout: str, operands: Operands, *rest: Any, **named: Any) -> Any:
    """The problem's function of operands that may be traced."""
    if problem.head is None:
        return getattr(tileloss_jax, problem.function)(*operands, *rest, **named)
    *matrices, bias = operands[:3]
    named |= {
        "bias": bias,
        "low_rank": operands[3:] or None,
        "compute_dtype": problem.head.compute_dtype,
    }
    function = getattr(tileloss_jax, f"linear_{problem.function}")
    return function(*matrices, *rest, head_layout=head_layout, **named)


def run(problem: Problem, head_layout: str = "HV", rank: int = 0, **how: Any) -> Witness:
    """What the public functions make of a problem, with its gradients in one jitted step. ``how``: grad_in_forward."""
    tensors = {name: jnp.asarray(array) for name, array in problem.tensors.items()}
    operands, labels = operands_of(problem, head_layout, rank), jnp.asarray(problem.labels)
    grads = {n: tensors.pop(n) for n in list(tensors) if n.endswith("_grad")}
    named: dict[str, Any] = {**problem.options, **how}
    if problem.function == "logprobs":
        named["outputs"] = OUTPUTS
    elif problem.function == "cross_entropy":
        named["weight"] = tensors.pop("class_weights", None)
        named |= tensors
    else:
        named |= {"preset": problem.preset, "return_metrics": True, **tensors}
        if length := problem.sequence_length:
            operands = tuple(
                x.reshape(-1, length, x.shape[-1]) if i in (0, 3) else x
                for i, x in enumerate(operands)
            )
            labels = labels.reshape(-1, length)

    @jax.jit
    def step(operands: Operands) -> tuple[Any, Any]:
        found, pull = jax.vjp(lambda x: call(problem, head_layout, x, labels, **named), operands)
        upstream = jax.tree.map(lambda x: _upstream(x, None), found)
        if problem.function == "logprobs":
            given = {n: _upstream(getattr(found, n), grads.get(f"{n}_grad")) for n in OUTPUTS}
            return found, pull(type(found)(**given))[0]
        loss = jax.tree.leaves(found)[0]
        of_loss = grads.get("loss_grad", jnp.ones(loss.size)).reshape(loss.shape)
        return found, pull((of_loss, *upstream[1:]) if isinstance(found, tuple) else of_loss)[0]

    found, gradients = step(operands)
    if problem.function == "logprobs":
        outputs = {name: np.asarray(getattr(found, name)) for name in OUTPUTS}
        return _witness(problem, head_layout, outputs, None, None, gradients)
    if problem.function == "cross_entropy":
        return _witness(problem, head_layout, {}, found, None, gradients)
    loss, metrics = found
    metrics = np.asarray([metrics.get(name, np.nan) for name in POLICY.metrics])
    return _witness(problem, head_layout, {}, loss, metrics, gradients)


def _upstream(output: Any, given: Any) -> Any:
    """Of integers and bools vjp wants a zero of no type."""
    if not jnp.issubdtype(output.dtype, jnp.floating):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jnp.zeros_like(output) if given is None else given


def _witness(
    problem: Problem, head_layout: str, outputs: Any, loss: Any, metrics: Any, gradients: Operands
) -> Witness:
    loss = None if loss is None else np.asarray(loss).reshape(-1)
    first = np.asarray(gradients[0]).reshape(problem.labels.size, -1)
    if problem.head is None:
        return Witness({}, outputs, loss, metrics, first)
    weights = [np.asarray(x) for x in (gradients[1], *gradients[4:])]
    weight = np.concatenate([x.T if head_layout == "HV" else x for x in weights], axis=1)
    others = [np.asarray(x).reshape(problem.labels.size, -1) for x in gradients[3:4]]
    of_head = {"hidden": np.concatenate([first, *others], axis=1), "weight": weight}
    if gradients[2] is not None:
        of_head["bias"] = np.asarray(gradients[2])
    return Witness({}, outputs, loss, metrics, None, of_head)


def assert_agrees(problem: Problem, head_layout: str = "HV", **how: Any) -> None:
    theirs, ours = witness(problem), run(problem, head_layout, **how)
    if problem.function != "logprobs":
        theirs.outputs = {}
    found = differences(problem, ours, theirs)
    if problem.head is not None:
        found |= head_differences(problem, ours, theirs)
    assert not {name: worst for name, worst in found.items() if not worst <= 1}, found
