"""tileloss.jax under the switches by which JAX's users look for mistakes: the same results, and no complaint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_calls import ONLY_XLA, tiles_of
from tileloss.jax import (
    cross_entropy,
    distillation,
    linear_cross_entropy,
    linear_distillation,
    linear_logprobs,
    logprobs,
    policy_loss,
    sparse_distillation,
)

pytestmark = pytest.mark.usefixtures("implementation")
Loss = Callable[..., Any]

keys = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(keys[0], (2, 3, 7))
TEACHER = jax.random.normal(keys[1], X.shape)
HIDDEN = jax.random.normal(keys[2], (2, 3, 5))
HEAD = jax.random.normal(keys[3], (5, 7))
LABELS = jnp.array([[0, 3, -100], [6, 2, 5]])
LOGP = jnp.full((2, 3), -2.0)
WEIGHT = jnp.linspace(0.5, 1.5, 7)
IDS = jnp.tile(jnp.arange(3), (2, 3, 1))
SEVERAL = jnp.stack([LABELS, jnp.array([[4, 3, -100], [-100, 2, 1]])], -1)
number = jnp.float32(1.5)  # of an option that may be traced
small_tiles = tiles_of(4)


# Of the operand and of a number; what they are given makes for as many of the sweeps' arrays as there are.
LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda x, t: cross_entropy(
        x, LABELS, WEIGHT, temperature=t, num_items=t, label_smoothing=0.1, z_loss=0.1
    ),
    "linear_cross_entropy": lambda x, t: linear_cross_entropy(
        HIDDEN, HEAD, LABELS, bias=x[0, 0], temperature=t, weight=WEIGHT, label_smoothing=0.1
    ),
    "soft_cross_entropy": lambda x, t: cross_entropy(
        x, jax.nn.softmax(TEACHER), WEIGHT, temperature=t
    ),
    "logprobs": lambda x, t: sum(
        y.astype(jnp.float32).sum()
        for y in logprobs(x, LABELS, temperature=t, outputs=("entropy", "argmax", "mean_logit"))
        if y is not None
    ),
    "several labels": lambda x, t: logprobs(x, SEVERAL, temperature=t).logp.sum(),
    "several labels, head": lambda x, t: linear_logprobs(
        HIDDEN, HEAD, SEVERAL, bias=x[0, 0], temperature=t
    ).logp.sum(),
    "policy_loss": lambda x, t: policy_loss(
        x, LABELS, jnp.array([1.0, -1.0]), old_logp=LOGP, ref_logp=LOGP, beta=t, entropy_coef=0.1,
        preset="gspo", kl_importance=True, dual_clip=t + 2, return_metrics=True,
    )[0],
    "distillation": lambda x, t: distillation(
        x, TEACHER, LABELS, divergence="jsd", label_weight=0.5, temperature=t, label_temperature=t + 1,
        outputs=("entropy", "agreement"),
    )[0],
    "linear_distillation": lambda x, t: linear_distillation(
        HIDDEN, HEAD, HIDDEN, HEAD, bias=x[0, 0], teacher_bias=WEIGHT, temperature=t
    ),
    "sparse_distillation": lambda x, t: sparse_distillation(
        x, IDS, jax.nn.log_softmax(TEACHER)[..., :3], LABELS, label_weight=0.5, temperature=t
    ),
}  # fmt: skip
OF_EVERY_COMMIT = ("cross_entropy", "linear_cross_entropy", "policy_loss")
by_loss = pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, id=name, marks=() if name in OF_EVERY_COMMIT else pytest.mark.full)
        for name, loss in LOSSES.items()
    ],
)


def traced(loss: Loss) -> Any:
    """Value and gradient, lowered anew."""
    return jax.jit(lambda x, t: jax.value_and_grad(loss)(x, t)).lower(X, number)


# What these look at is known once a program is traced.
@by_loss
def test_no_rank_or_type_is_promoted_and_no_tracer_is_kept(loss: Loss) -> None:
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.checking_leaks(),
    ):
        traced(loss)


@pytest.mark.full
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy", "distillation"])
def test_no_rank_is_promoted_in_second_derivatives(name: str) -> None:
    def second(x: Any, t: Any) -> Any:
        return jax.grad(lambda x: (jax.grad(LOSSES[name])(x, t) ** 2).sum())(x)

    with jax.numpy_rank_promotion("raise"):
        jax.jit(second).lower(X, number)


# That of policy_loss takes ten seconds to compile.
@ONLY_XLA
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "cross_entropy" else pytest.mark.full) for n in LOSSES],
)
def test_a_program_has_no_nan_inside(name: str) -> None:
    step = jax.jit(jax.value_and_grad(LOSSES[name]))
    error, _ = checkify.checkify(step, errors=checkify.float_checks)(X, number)
    error.throw()


@pytest.mark.parametrize("implementation", ["cpu"], indirect=True)
def test_checkpoint_costs_what_the_page_says() -> None:
    products = {"0": 1, "1": 3, "2": 3}  # of a forward, a backward and both in one pass

    def count(wrapped: Callable[[Loss], Loss], grad_in_forward: bool) -> int:
        def loss(hidden: Any, head: Any) -> Any:
            return linear_cross_entropy(hidden, head, LABELS, grad_in_forward=grad_in_forward)

        step = jax.jit(jax.value_and_grad(wrapped(loss), argnums=(0, 1)))
        calls = re.findall(r"call_pass = (\d)", step.lower(HIDDEN, HEAD).compile().as_text() or "")
        return sum(products[call] for call in calls)

    assert [count(lambda f: f, x) for x in (True, False)] == [3, 4]
    assert [count(jax.checkpoint, x) for x in (True, False)] == [6, 5]


def test_without_jit_it_is_the_same() -> None:
    step = jax.value_and_grad(LOSSES["cross_entropy"])
    loss, gradient = jax.jit(step)(X, number)
    with jax.disable_jit():
        eager = step(X, number)
    np.testing.assert_allclose(eager[0], loss, rtol=1e-6)
    np.testing.assert_allclose(eager[1], gradient, rtol=1e-5, atol=1e-7)


def test_a_step_that_returns_metrics_returns_no_nan() -> None:
    @jax.jit
    def step(x: Any) -> Any:
        return policy_loss(x, LABELS, jnp.ones(2), preset="grpo", return_metrics=True)

    with jax.debug_nans(True):
        _, metrics = step(X)
    clipped = {"clip_low_fraction", "clip_high_fraction", "clip_fraction"}
    assert set(metrics) == {"entropy", "ratio_mean", "dropped_sequences", "tokens", *clipped}


@pytest.fixture
def custom_vjp3() -> Iterator[None]:
    jax.config.update("jax_custom_vjp3", True)
    yield
    jax.config.update("jax_custom_vjp3", False)


def test_with_the_newer_custom_vjp_it_is_the_same(request: pytest.FixtureRequest) -> None:
    def step(wrapped: Callable[[Loss], Loss]) -> Any:
        return jax.jit(jax.grad(wrapped(lambda x: LOSSES["linear_cross_entropy"](x, number))))(X)

    expected = step(lambda f: f)
    request.getfixturevalue("custom_vjp3")
    np.testing.assert_array_equal(step(lambda f: f), expected)
    if jax.__version_info__ < (0, 12):  # there JAX has no symbolic zeros under checkpoint
        with pytest.raises(NotImplementedError if jax.__version_info__ < (0, 10) else TypeError):
            step(jax.checkpoint)
    else:
        np.testing.assert_allclose(step(jax.checkpoint), expected, rtol=1e-6)
