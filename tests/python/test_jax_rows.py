"""The JAX row stage against the C library: every option, pairs of them, every preset; -inf, +inf and NaN, p = 1, rows that do not
count, and no rows at all."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jax_cases import (
    ALL,
    BONUS,
    CISPO,
    LOGITS,
    MASKING,
    POLICY,
    POLICY_LOSS,
    SAMPLER,
    SAPO,
    VESPO,
    WITH_KL,
    cases,
    preset_options,
    with_weights,
)
from jax_problems import IGNORED, ROWS, VOCABULARY, Problem, plain_problem, policy_problem, witness
from jax_stage import assert_agrees, differences, resolved, run, to_state
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


# ----------------------------------------------------------------------------------------------------------- special values


def special_logits() -> tuple[np.ndarray, np.ndarray]:
    """Rows of z that losses.md's table names, and labels."""
    problem = plain_problem("logprobs", seed=5)
    x, labels = problem.logits.copy(), problem.labels.copy()
    x[np.isnan(x)] = 0.25
    labels[labels == IGNORED] = 7
    x[0, 3], labels[0] = -np.inf, 5  # another logit is -inf
    x[1, labels[1]] = -np.inf  # the label's is
    x[2, :], x[2, 4], labels[2] = -np.inf, 1.5, 4  # the label is the only finite column
    x[3, :], labels[3] = -np.inf, 2  # all are
    x[5, 6] = np.inf
    x[6, 8] = np.nan
    x[7, :], x[7, 1], labels[7] = -40, 40, 1  # p = 1 in float32
    x[8, :], x[8, 1], labels[8] = -40, 40, 2  # p = 1 of another
    x[9] += 1e4  # a common offset
    x[10, :], labels[10] = 3.0, 0  # all equal
    x[11, :], x[11, :2], labels[11] = -9, 5, 1  # a tie of the label and a lower class
    x[13, labels[13]] = np.inf
    labels[12], x[12] = IGNORED, np.nan
    return x, labels


def special_problem(function: str, **options: Any) -> Problem:
    x, labels = special_logits()
    base = plain_problem if function != "policy_loss" else policy_problem
    per_row = {"cross_entropy": {"reduction": "none"}, "policy_loss": {"aggregation": "none"}}
    problem = (
        base(function, **options) if base is plain_problem else base(**options, aggregation="none")
    )
    tensors = dict(problem.tensors)
    for name in ("old_logp", "ref_logp", "sampler_logp"):
        if name in tensors:
            tensors[name] = np.nan_to_num(tensors[name], nan=-3.0)
    if function != "logprobs":
        tensors["loss_grad"] = np.linspace(0.5, 2, ROWS, dtype=np.float32)
    merged = {**options, **per_row.get(function, {})}
    return problem.but(logits=x, labels=labels, options=merged, tensors=tensors)


@pytest.mark.parametrize("which", [0, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.2}, {"label_smoothing": 1.0}, {"z_loss": 0.1}, {"softcap": 5.0}],
)
def test_cross_entropy_agrees_on_special_rows(options: dict[str, Any], which: int) -> None:
    assert_agrees(with_weights(special_problem("cross_entropy", **options), which))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_logprobs_agrees_on_special_rows(softcap: float) -> None:
    assert_agrees(special_problem("logprobs", softcap=softcap))


@pytest.mark.parametrize(
    "options",
    [
        {},
        CISPO,
        SAPO,
        {"kind": "reinforce"},
        WITH_KL,
        {**WITH_KL, "kl_importance": True},
        {**BONUS, "entropy_reduction": "as_loss"},
        {"entropy_threshold": 1.0},
        SAMPLER,
        {"delta": 1.1, "dual_clip": 1.5},
    ],
)
def test_policy_loss_agrees_on_special_rows(options: dict[str, Any]) -> None:
    """Rows that do not touch one another: each has its own NaN or infinity, or none."""
    problem = special_problem("policy_loss", advantage_level="token", **options)
    assert_agrees(problem)
    tensors = dict(problem.tensors)
    tensors["advantages"] = np.where(np.arange(ROWS) % 2, 0, tensors["advantages"]).astype(
        np.float32
    )
    # rho = e^115 is inf in float32, which the clipped kinds take; a KL times it would be.
    far = -60 if "kl_importance" in options else -120
    tensors["old_logp"] = np.where(np.arange(ROWS) % 3, tensors["old_logp"], far).astype(np.float32)
    tensors["ref_logp"][4:8] = np.nan
    tensors["sampler_logp"][16:] = np.nan
    assert_agrees(problem.but(tensors=tensors))


@pytest.mark.parametrize(
    "options",
    [
        {"ratio_level": "sequence", **WITH_KL},
        VESPO,
        {"entropy_quantile": 0.5},
        {"off_policy_threshold": 0.0},
        {**BONUS, "entropy_quantile": 0.5},
        {**SAMPLER, "sampler_level": "sequence"},
    ],
)
def test_coupled_rows_agree_with_one_label_at_minus_infinity(options: dict[str, Any]) -> None:
    problem = policy_problem(seed=8, **options)
    problem.logits[8, problem.labels[8]] = -np.inf
    assert_agrees(problem)
    problem.logits[14, 3] = np.nan
    assert_agrees(problem)


def all_unused(function: str, by: str, options: dict[str, Any]) -> Problem:
    problem = (
        plain_problem(function, **options)
        if function != "policy_loss"
        else policy_problem(**options)
    )
    logits = np.full_like(problem.logits, np.nan)
    if by == "ignored":
        return problem.but(logits=logits, labels=np.full(ROWS, IGNORED))
    return problem.but(logits=logits, tensors={**problem.tensors, "mask": np.zeros(ROWS, np.uint8)})


def assert_zero(problem: Problem) -> None:
    assert_agrees(problem)
    ours = run(problem, to_state(witness(problem).state))
    assert not np.any(ours.loss) and not np.any(ours.dlogits)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}])
def test_cross_entropy_of_ignored_rows_is_zero(reduction: str, options: dict[str, Any]) -> None:
    assert_zero(all_unused("cross_entropy", "ignored", {"reduction": reduction, **options}))


@pytest.mark.parametrize("by", ["ignored", "mask"])
@pytest.mark.parametrize("preset", POLICY.presets)
def test_policy_loss_of_unused_rows_is_zero(preset: str, by: str) -> None:
    options = {"entropy_quantile": 0.5, **BONUS, **WITH_KL, **MASKING}
    given = {**preset_options(preset), **options}
    assert_zero(all_unused("policy_loss", by, given).but(preset=preset))


@pytest.mark.parametrize("function", ALL)
def test_no_rows_at_all_agree(function: str) -> None:
    options = {"entropy_quantile": 0.5, **MASKING} if function == "policy_loss" else {}
    problem = Problem(
        function, np.zeros((0, VOCABULARY), np.float32), np.zeros(0, np.int64), {}, options
    )
    if function == "policy_loss":
        empty, offsets = np.zeros(0, np.float32), np.zeros(4, np.int64)
        problem = problem.but(
            tensors={
                "advantages": np.ones(3, np.float32),
                "sampler_logp": empty,
                "sequence_offsets": offsets,
            }
        )
    assert_agrees(problem)
