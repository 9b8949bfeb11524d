"""The TPU kernels from logits in the strict interpreter, through the public functions, against the C library."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_calls import assert_agrees
from jax_cases import with_weights
from jax_problems import Problem, plain_problem, policy_problem
from tileloss.jax import cross_entropy
from tileloss.jax._sweeps.operands import UNUSED, Logits, Sums
from tpu_checks import COLUMNS, assert_forward_agrees, logits_problem, strict, use_kernels


@pytest.fixture(autouse=True)
def strict_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_kernels(monkeypatch)
    with strict():
        yield


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "weights and padding": lambda: with_weights(
        plain_problem("cross_entropy", label_smoothing=0.1, z_loss=0.2, valid_vocab=130), 3
    ),
    "softcap": lambda: plain_problem("cross_entropy", label_smoothing=0.1, softcap=5.0),
    "outputs": lambda: plain_problem("logprobs", temperature=1.7),
    "entropy": lambda: policy_problem(entropy_coef=0.1),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees(name: str) -> None:
    assert_agrees(PROBLEMS[name]())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_special_values_agree_in_every_tile(smoothing: float) -> None:
    problem = plain_problem("cross_entropy", 7, label_smoothing=smoothing)
    row = 5
    for value in (np.inf, -np.inf, np.nan):
        for column in (2, 200, COLUMNS - 1):
            row += 1
            if row != 15:  # which is ignored
                problem.logits[row, column] = value
    problem.logits[1] = -np.inf
    problem.logits[2, problem.labels[2]] = -np.inf
    problem.logits[3, np.arange(COLUMNS) != problem.labels[3]] = -np.inf
    problem.logits[5] += 1e4
    assert_agrees(problem)


def test_a_traced_temperature_is_one_program() -> None:
    problem = plain_problem("cross_entropy", 3)
    x, labels = jnp.asarray(problem.logits), jnp.asarray(problem.labels)
    step = jax.jit(jax.value_and_grad(lambda x, t: cross_entropy(x, labels, temperature=t)))
    for temperature in (1.0, 0.7):
        loss, gradient = step(x, jnp.float32(temperature))
        plain = jax.value_and_grad(
            lambda x, t=temperature: cross_entropy(x, labels, temperature=t, implementation="xla")
        )
        expected = plain(x)
        np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-7)
    assert step._cache_size() == 1


def test_every_sum_of_a_slice_of_the_columns() -> None:
    problem = logits_problem()
    problem.spec = problem.spec._replace(columns=150, sums=Sums(True, True, True, True))
    problem.labels = np.where(problem.used, problem.labels % 150, UNUSED)
    shifted = jnp.roll(problem.operand.logits, 100, axis=1)
    problem.__post_init__()
    problem.operand, problem.spec = Logits(shifted), problem.spec._replace(first=100)
    assert_forward_agrees(problem)


def test_bfloat16_is_rounded_once() -> None:
    problem = logits_problem()
    problem.spec = problem.spec._replace(has_uniform=False)
    narrow = problem.operand.logits.astype(jnp.bfloat16)
    found = []
    for x in (narrow, narrow.astype(jnp.float32)):
        problem.operand = Logits(x)
        found.append(problem.run_backward().logits)
    assert found[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(found[1].astype(jnp.bfloat16)))
