"""The tokens of a row in tileloss.jax: every function by each implementation against the definitions, shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import Tensor

import definitions
import tileloss.jax as tj
from definitions import unpacked
from jax_calls import tiles_of
from test_jax_shards import assert_same_on
from tileloss import torch as tl

B, T, V, H = 2, 3, 77, 8
ROWS = ("logp", "lse", "entropy", "mean_logit")
Function = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("implementation")
small_tiles = tiles_of(32)


def array(x: Tensor) -> Any:
    return jnp.asarray(x.numpy())


class Case:
    """Tensors of both, and what is called with them: ``module`` and what makes a tensor its array."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.x, self.labels = 2 * torch.randn(B, T, V), torch.randint(0, V, (B, T))
        self.hidden, self.head = torch.randn(B, T, H), torch.randn(H, V)
        self.teacher, self.weight = 2 * torch.randn(B, T, V), torch.rand(V) + 0.5
        self.ids = torch.stack([torch.randperm(V)[:5] for _ in range(B * T)]).view(B, T, 5)
        self.is_in = torch.rand(B, T, V) < 0.4
        self.is_in.scatter_(-1, self.labels[..., None], True)
        self.is_in.scatter_(-1, self.ids[..., :2], True)
        self.labels[1, 2] = -100

    def loss(self, name: str, module: Any, to: Function, *leaves: Any, **how: Any) -> Any:
        labels, rest = to(self.labels), dict(how)
        function = getattr(module, name.replace("soft_labels", "cross_entropy"))
        if name.endswith("soft_labels"):
            q = self.teacher.masked_fill(~self.is_in, -torch.inf).softmax(-1)
            return function(*leaves, to(q), label_smoothing=0.1, **rest)
        if name.endswith("sparse_distillation"):
            log_q = self.teacher.log_softmax(-1).gather(-1, self.ids)
            return function(*leaves, to(self.ids), to(log_q), labels, divergence="jsd", **rest)
        if name.endswith("distillation"):
            return function(*leaves, to(self.teacher), labels, label_weight=0.3, **rest)
        if name.endswith("policy_loss"):
            return function(
                *leaves, labels, to(torch.tensor([0.5, -1.0])), entropy_coef=0.1, **rest
            )
        if name.endswith("logprobs"):
            rows = function(*leaves, labels, outputs=ROWS, **rest)
            return sum((i + 1.0) * getattr(rows, n).sum() for i, n in enumerate(ROWS))
        return function(*leaves, labels, to(self.weight), label_smoothing=0.2, z_loss=0.1, **rest)


def found_and_exact(case: Case, name: str, allowed: Tensor) -> tuple[list[Any], list[Any]]:
    """The loss and its gradients, of tileloss.jax and of the definitions."""
    is_linear = name.startswith("linear_")
    is_in = unpacked(allowed, case.x).expand(case.x.shape)
    seen = case.x.masked_fill(~is_in, torch.nan)  # nobody looks at the others
    leaves = (case.hidden, case.head) if is_linear else (seen,)

    def ours(*leaves: Any) -> Any:
        if name == "linear_cross_entropy":
            labels, weight = array(case.labels), array(case.weight)
            return tj.linear_cross_entropy(
                *leaves,
                labels,
                weight=weight,
                label_smoothing=0.2,
                z_loss=0.1,
                allowed=array(allowed),
            )
        return case.loss(name, tj, array, *leaves, allowed=array(allowed))

    every = tuple(range(len(leaves)))
    value, gradients = jax.jit(jax.value_and_grad(ours, argnums=every))(*map(array, leaves))
    exact_leaves = [x.double().nan_to_num().requires_grad_() for x in leaves]
    x = exact_leaves[0] @ exact_leaves[1] if is_linear else exact_leaves[0]
    exact = case.loss(
        name.removeprefix("linear_"),
        definitions,
        lambda t: t.double() if t.is_floating_point() else t,
        x,
        allowed=allowed,
    )
    return [value, *gradients], [exact, *torch.autograd.grad(exact, exact_leaves)]


NAMES = (
    "cross_entropy",
    "soft_labels",
    "logprobs",
    "policy_loss",
    "distillation",
    "sparse_distillation",
)


@pytest.mark.parametrize("is_one", (False, True), ids=("a set a row", "one set"))
@pytest.mark.parametrize("name", (*NAMES, "linear_cross_entropy", "linear_logprobs"))
def test_values_and_gradients_are_the_definitions(name: str, is_one: bool) -> None:
    case = Case()
    if is_one:
        case.is_in = case.is_in.any(0).any(0).expand(B, T, V)
    allowed = tl.allowed_from(case.is_in[0, 0] if is_one else case.is_in)
    found, exact = found_and_exact(case, name, allowed)
    for ours, theirs in zip(found, exact, strict=True):
        right = theirs.detach().numpy()
        np.testing.assert_allclose(ours, right, rtol=3e-5, atol=3e-5 * np.abs(right).max())
    if not name.startswith("linear_"):
        assert not np.asarray(found[1])[~case.is_in.numpy()].any()


def test_all_tokens_are_as_none_given() -> None:
    case = Case()
    every = tj.allowed_from(jnp.ones(V, bool))

    def step(allowed: Any) -> Any:
        loss = lambda x: tj.cross_entropy(x, array(case.labels), allowed=allowed)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(array(case.x))

    for ours, theirs in zip(step(every), step(None), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_label_outside_and_a_row_without_tokens() -> None:
    x, is_in = array(Case().x[0]), np.zeros((T, V), bool)
    is_in[:2, 1:5] = True
    allowed, labels = tj.allowed_from(jnp.asarray(is_in)), jnp.array([7, 2, 7])
    rows = tj.logprobs(x, labels, allowed=allowed, outputs=("logp", "lse", "argmax", "mean_logit"))
    assert rows.logp[0] == -np.inf and np.isnan(rows.logp[2])
    assert rows.lse[2] == -np.inf and rows.argmax[2] == 0 and rows.mean_logit[2] == -np.inf
    loss = lambda x: tj.cross_entropy(x, labels, allowed=allowed, reduction="none")  # noqa: E731
    found, pull = jax.vjp(loss, x)
    assert found[0] == np.inf and np.isnan(found[2])
    gradient = np.asarray(pull(jnp.ones(T))[0])
    np.testing.assert_allclose(gradient[0, 1:5], jax.nn.softmax(x[0, 1:5]), rtol=1e-5)
    assert not gradient[:2][~is_in[:2]].any() and np.isnan(gradient[2]).all()


def test_no_rows() -> None:
    labels, words = jnp.zeros(0, jnp.int32), jnp.zeros((0, 3), jnp.int32)
    loss, gradient = jax.value_and_grad(lambda x: tj.cross_entropy(x, labels, allowed=words))(
        jnp.zeros((0, V))
    )
    assert loss == 0 and gradient.shape == (0, V)


def test_shards_take_the_words_of_their_columns() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x, columns = jax.random.normal(keys[0], (B, T, 256)), 256
    labels = jax.random.randint(keys[1], (B, T), 0, columns)
    is_in = jax.random.bernoulli(keys[2], 0.4, (B, T, columns))
    is_in |= jax.nn.one_hot(labels, columns, dtype=bool)
    words, weight = tj.allowed_from(is_in), jnp.linspace(0.5, 2, columns)

    def loss(x: Any, **axis: Any) -> Any:
        mine = words
        if axis["vocab_axis"]:
            width = x.shape[-1] // 32
            start = jax.lax.axis_index("tp") * width
            mine = jax.lax.dynamic_slice_in_dim(words, start, width, axis=-1)
        return tj.cross_entropy(x, labels, weight, label_smoothing=0.1, allowed=mine, **axis)

    assert_same_on(loss, (x,), P(None, None, "tp"), (1, 4))


def test_sets_are_those_of_pytorch() -> None:
    is_in = Case().is_in.view(-1, V)
    tokens = is_in.nonzero()[:, 1]
    offsets = torch.tensor([0, *is_in.sum(1).cumsum(0)])
    exact = tl.allowed_from(is_in).numpy()
    assert np.array_equal(tj.allowed_from(array(is_in)), exact)
    twice = tj.allowed_from(array(tokens.repeat_interleave(2)), array(2 * offsets), V)
    assert np.array_equal(twice, exact)
    made = jax.jit(lambda tokens, offsets: tj.allowed_from(tokens, offsets, V))
    assert np.array_equal(made(array(tokens), array(offsets)), exact)
    with pytest.raises(ValueError, match=r"tokens\[0\]: expected 0 to 4, got 5"):
        tj.allowed_from(jnp.array([5]), jnp.array([0, 1]), 5)
