"""The JAX row stage against the C library on -inf, +inf and NaN, p = 1, rows that do not count, and no rows at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_cases import (
    ALL,
    BONUS,
    CISPO,
    MASKING,
    POLICY,
    SAMPLER,
    SAPO,
    VESPO,
    WITH_KL,
    preset_options,
    with_weights,
)
from jax_problems import IGNORED, ROWS, VOCABULARY, Problem, plain_problem, policy_problem, witness
from jax_stage import assert_agrees, run, to_state


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


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}])
def test_cross_entropy_of_ignored_rows_is_zero(reduction: str, options: dict[str, Any]) -> None:
    problem = all_unused("cross_entropy", "ignored", {"reduction": reduction, **options})
    assert_agrees(problem)
    ours = run(problem, to_state(witness(problem).state))
    assert not np.any(ours.loss) and not np.any(ours.dlogits)


@pytest.mark.parametrize("by", ["ignored", "mask"])
@pytest.mark.parametrize("preset", POLICY.presets)
def test_policy_loss_of_unused_rows_is_zero(preset: str, by: str) -> None:
    options = {"entropy_quantile": 0.5, **BONUS, **WITH_KL, **MASKING}
    problem = all_unused("policy_loss", by, {**preset_options(preset), **options}).but(
        preset=preset
    )
    assert_agrees(problem)
    ours = run(problem, to_state(witness(problem).state))
    assert not np.any(ours.loss) and not np.any(ours.dlogits)


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
