"""The functions of tileloss.jax with their gradients on a GPU, or by CUDA's handlers on the host, in a process of its own, as JAX
looks for its devices once: test_jax_cuda.py."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tileloss.jax
import torch_problems
from torch_problems import ALL_FUNCTIONS, LOGIT_FUNCTIONS, Problem, assert_same, problem

PLATFORM, IMPLEMENTATION = (
    ("gpu", "cuda") if os.environ.get("TILELOSS_TEST_DEVICE") == "gpu" else ("cpu", "cpu")
)
ROUNDING = {torch.float32: 4e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LOSSES = [name for name in ALL_FUNCTIONS if "logprobs" not in name]


def array(x: torch.Tensor) -> Any:
    if not x.is_floating_point():
        return jnp.asarray(x.numpy())
    return jnp.asarray(x.detach().float().numpy()).astype(str(x.dtype).removeprefix("torch."))


def tensor(x: Any) -> torch.Tensor:
    assert {device.platform for device in x.devices()} == {PLATFORM}
    return torch.from_numpy(np.array(x, np.float64))


def targets(name: str, p: Problem) -> tuple[Any, ...]:
    """What the function is given after the logits, or after hidden states and head."""
    kind, labels = name.removeprefix("linear_"), array(p.labels)
    if kind == "policy_loss":
        return labels, array(p.advantages)
    if kind == "soft_labels":
        return (array(p.teacher.float().softmax(-1)),)
    if kind == "sparse_distillation":
        logprobs, ids = p.teacher.float().log_softmax(-1).topk(4)
        return array(ids), array(logprobs), labels
    if kind == "distillation":
        teacher = (p.teacher_hidden, p.weight) if name != kind else (p.teacher,)
        return *map(array, teacher), labels
    return (labels,)


def gradients(name: str, p: Problem, donate: bool = False, **options: Any) -> Any:
    """As torch_problems.gradients: the loss and the leaves' gradients, of a jitted step; and the arrays that it was given."""
    function = getattr(tileloss.jax, name.replace("soft_labels", "cross_entropy"))
    options |= {"implementation": IMPLEMENTATION}
    if name.endswith("policy_loss"):
        options["old_logp"] = array(p.old_logp)
    if name.endswith("logprobs"):
        options["outputs"] = torch_problems.ROWS
    weights = array(p.row_weights)

    def loss(*leaves: Any) -> Any:
        named = dict(options)
        if "linear" in name:
            *leaves, named["bias"] = leaves
            named["head_layout"] = "VH"
        found = function(*leaves, *targets(name, p), **named)
        if name.endswith("logprobs"):
            found = (weights * (found.logp - 0.3 * found.lse + 0.2 * found.entropy)).sum()
        return found

    leaves = tuple(map(array, p.leaves(name)))
    step = jax.value_and_grad(loss, tuple(range(len(leaves))))
    value, found = jax.jit(step, donate_argnums=0 if donate else ())(*leaves)
    return tuple(map(tensor, (value, *found))), leaves


def hold(name: str, p: Problem, **how: Any) -> None:
    wide = dataclasses.replace(p, teacher=p.teacher.double())
    exact = torch_problems.gradients(name, wide, torch_problems.plain)
    found, _ = gradients(name, p, **how)
    products = 2 if name.startswith("linear_") else 1  # of rounded dlogits
    for ours, theirs, leaf in zip(found[1:], exact[1:], p.leaves(name), strict=True):
        assert_same((ours,), (theirs,), products * ROUNDING[leaf.dtype])
    assert_same(found[:1], exact[:1], ROUNDING[torch.float32])


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    hold(name, problem(dtype))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("grad_in_forward", [True, False])
def test_one_pass_and_two(name: str, grad_in_forward: bool) -> None:
    hold(name, problem(), grad_in_forward=grad_in_forward)


@pytest.mark.parametrize("name", LOGIT_FUNCTIONS)
def test_donated_logits(name: str) -> None:
    p = problem(torch.bfloat16)
    expected, (kept,) = gradients(name, p)
    found, (given,) = gradients(name, p, donate=True)
    assert given.is_deleted() and not kept.is_deleted()
    assert all(map(torch.equal, found, expected))


def test_rows_of_a_models_width() -> None:
    torch.manual_seed(1)
    p = dataclasses.replace(
        problem(),
        logits=(2 * torch.randn(4, 8, 50257)).bfloat16().requires_grad_(),
        labels=torch.randint(0, 50257, (4, 8)),
    )
    for grad_in_forward in (True, False):
        hold("cross_entropy", p, grad_in_forward=grad_in_forward)


def test_a_label_out_of_range_is_nan_in_its_row() -> None:
    p = problem()
    labels = array(p.labels).at[1, 1].set(torch_problems.V)
    loss = tileloss.jax.cross_entropy(
        array(p.logits), labels, reduction="none", implementation=IMPLEMENTATION
    )
    assert np.argwhere(np.isnan(loss)).tolist() == [[1, 1]]
