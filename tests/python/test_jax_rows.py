"""The JAX row stage against the C library: every option, pairs of them, every preset."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jax_cases import (
    ALL,
    LOGITS,
    POLICY,
    POLICY_LOSS,
    cases,
    preset_options,
    with_weights,
)
from jax_problems import Problem, plain_problem, policy_problem, witness
from jax_stage import assert_agrees, differences, resolved
from tileloss._core.functions import PUBLIC_OPTIONS


@pytest.mark.parametrize("function", ALL)
def test_every_option_has_a_case(function: str) -> None:
    assert set(ALL[function]) == set(PUBLIC_OPTIONS[function])
    for name, values in ALL[function].items():
        assert all(name in value or name == "kind" for value in values if name != "sampler_min")


@pytest.mark.parametrize("options", cases("logprobs"))
def test_logprobs_agrees_on_every_option(options: dict[str, Any]) -> None:
    assert_agrees(plain_problem("logprobs", **options))


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("options", cases("cross_entropy"))
def test_cross_entropy_agrees_on_every_option(options: dict[str, Any], which: int) -> None:
    assert_agrees(with_weights(plain_problem("cross_entropy", **options), which))


@pytest.mark.parametrize("batch", [False, True], ids=["offsets", "batch"])
@pytest.mark.parametrize("options", cases("policy_loss"))
def test_policy_loss_agrees_on_every_option(options: dict[str, Any], batch: bool) -> None:
    assert_agrees(policy_problem(batch=batch, **options))


@pytest.mark.parametrize("name", [n for n in POLICY_LOSS if n not in LOGITS])
def test_every_case_shows_its_option(name: str) -> None:
    """Without the option the library gives something else: an option that the row stage ignored could not pass."""
    for options in POLICY_LOSS[name]:
        value = options.get(name)
        if value in (None, 1.0) or value == POLICY.options[name].usual:
            continue
        problem = policy_problem(**options)
        fewer = {k: v for k, v in problem.options.items() if k != name}
        if name in ("kind", "sampler_correction"):  # others depend on it
            fewer = {}
        if name in ("advantage_level", "aggregation", "epsilon_high", "max_length"):
            continue  # without it the call is another, or refused
        theirs, without = witness(problem), witness(problem.but(options=fewer))
        assert max(differences(problem, without, theirs).values()) > 10, options


@pytest.mark.parametrize(
    "dropped",
    ["old_logp", "ref_logp", "sampler_logp", "mask", "old_logp ref_logp sampler_logp mask"],
)
@pytest.mark.parametrize("preset", POLICY.presets)
def test_presets_agree_whatever_inputs_are_there(preset: str, dropped: str) -> None:
    problem = policy_problem(seed=3, preset=preset, **preset_options(preset))
    left = {k: v for k, v in problem.tensors.items() if k not in dropped.split()}
    if "mask" in dropped:
        # Nothing hides their NaN then.
        logits = np.where(np.isnan(problem.logits), 0.5, problem.logits).astype(np.float32)
        left |= {k: np.nan_to_num(v) for k, v in left.items() if k.endswith("_logp")}
        problem = problem.but(logits=logits)
    assert_agrees(problem.but(tensors=left))


def random_pairs(function: str, count: int) -> list[Any]:
    random = np.random.default_rng(18)
    values = [value for values in ALL[function].values() for value in values]
    pairs = list(itertools.combinations(range(len(values)), 2))
    chosen = random.choice(len(pairs), count, replace=False)
    return [
        pytest.param({**values[a], **values[b]}, i, id=f"{a}-{b}")
        for i, (a, b) in enumerate(pairs[c] for c in chosen)
    ]


def refused(problem: Problem) -> bool:
    """Whether options do not go together: the library says so, and so does the row stage's check, in the same words."""
    try:
        witness(problem)
    except ValueError as error:
        with pytest.raises(ValueError) as ours:
            resolved(problem)
        assert str(ours.value) == str(error)
        return True
    return False


@pytest.mark.parametrize(("options", "number"), random_pairs("cross_entropy", 60))
def test_cross_entropy_agrees_on_pairs_of_options(options: dict[str, Any], number: int) -> None:
    problem = with_weights(plain_problem("cross_entropy", number, **options), number % 4)
    if not refused(problem):
        assert_agrees(problem)


@pytest.mark.parametrize(("options", "number"), random_pairs("policy_loss", 400))
def test_policy_loss_agrees_on_pairs_of_options(options: dict[str, Any], number: int) -> None:
    preset = ["", *POLICY.presets][number % 11]
    problem = policy_problem(
        number, preset, batch=number % 3 == 0, **{**preset_options(preset), **options}
    )
    if number % 4 == 1:
        problem = problem.but(tensors={k: v for k, v in problem.tensors.items() if k != "old_logp"})
    if not refused(problem):
        assert_agrees(problem)
