"""The audit's policy cases have tokens in every branch of their kind, and a loss that forgets a branch fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tileloss.testing.case import Case
from tileloss.testing.outputs import prepare
from tileloss.tools.audit import cells
from tileloss.tools.audit.cases import CASES, AuditCase

POLICY = [case for case in CASES if case.settings["loss"] == "policy_loss"]
LEAST = 3  # tokens of a branch, or it may as well be chance
Bounds = dict[str, float]

# By name: where the ratio lies between the options' bounds.
SIDES: dict[str, dict[str, Callable[[np.ndarray, Bounds], np.ndarray]]] = {
    "clip": {
        "below 1 - epsilon_low": lambda r, b: r < b["low"],
        "within": lambda r, b: (r > b["low"]) & (r < b["high"]),
        "above 1 + epsilon_high": lambda r, b: r > b["high"],
    },
    "delta": {"above delta": lambda r, b: r > b["delta"]},
    "dual_clip": {"above dual_clip": lambda r, b: r > b["dual_clip"]},
    "cispo": {
        "below the cap": lambda r, b: r < b["cap"],
        "above the cap": lambda r, b: r > b["cap"],
    },
    "cap_low": {"below cap_low": lambda r, b: r < b["cap_low"]},
    "sapo": {"below 1": lambda r, b: r < 1, "above 1": lambda r, b: r > 1},
    "vespo": {"anywhere": lambda r, b: r > 0},
}  # fmt: skip


def ratios(case: Case) -> np.ndarray:
    """[N] of tokens or of their sequences; NaN where a token is not in use."""
    numbers, used = case.with_numbers().tensors, case.in_use
    if "logits" in numbers:
        z = numbers["logits"].astype(np.float64)
    else:
        z = numbers["hidden"].astype(np.float64) @ numbers["head"].astype(np.float64).T
    if (words := case.tensors.get("allowed")) is not None:
        bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
        z = np.where(bits[:, : z.shape[1]] == 1, z, -np.inf)
    z -= z.max(-1, keepdims=True)
    z -= np.log(np.exp(z).sum(-1, keepdims=True))
    logp = z[np.arange(len(z)), np.where(used, numbers["labels"], 0)]
    log_ratio = np.where(used, logp - numbers["old_logp"], np.nan)
    if case.options.get("ratio_level") == "sequence":
        of_sequences = np.nanmean(log_ratio.reshape(case.batch_size, -1), -1)
        log_ratio = np.where(used, np.repeat(of_sequences, case.seq_len), np.nan)
    return np.exp(log_ratio)


def bounds(options: dict[str, Any]) -> Bounds:
    low = options.get("epsilon_low", 0.2)
    high = options.get("epsilon_high", low)
    cap = 1 + high if options.get("cispo_cap") == "one_plus" else high
    return {"low": 1 - low, "high": 1 + high, "cap": cap, **options}


@pytest.mark.parametrize("name", ["ce/sum", "linear/sum", "policy/dr-grpo", "linear-policy/grpo"])
def test_the_upstream_gradient_of_one_loss_of_each_kind_is_negative(name: str) -> None:
    """So that one scaled by its absolute value fails."""
    (chosen,) = (case for case in CASES if case.name == name)
    (upstream,) = chosen.draw().case.upstream("loss")
    assert upstream < -0.1


@pytest.mark.parametrize("chosen", POLICY, ids=lambda case: case.name)
def test_every_branch_has_tokens(chosen: AuditCase) -> None:
    """A table: for either sign of the advantage, how many tokens lie on each side of each bound."""
    case = chosen.draw().case
    ratio, kind = ratios(case), case.options.get("kind", "clip")
    advantage = np.repeat(case.tensors["advantages"], case.seq_len)
    limits = bounds(case.options)
    tables = [kind, *(name for name in ("delta", "dual_clip", "cap_low") if name in case.options)]
    counts = {
        (sign, side): int(np.sum(np.sign(advantage[lies(ratio, limits)]) == sign))
        for table in tables
        for side, lies in SIDES[table].items()
        for sign in (1, -1)
    }
    assert min(counts.values()) >= LEAST, counts
    assert np.sum(~np.isnan(ratio) & (advantage == 0)) >= LEAST


@pytest.mark.parametrize(
    ("name", "forgotten", "to"),
    [
        ("policy/grpo", "epsilon_high", 1e9),
        ("policy/grpo", "epsilon_low", 1e9),
        ("policy/grpo-kl", "epsilon_low", 1e9),
        ("policy/dapo", "epsilon_low", 1e9),
        ("policy/gspo", "epsilon_low", 1e9),
        ("policy/gspo", "epsilon_high", 1e9),
        ("policy/delta", "delta", None),
        ("policy/delta-low", "delta", None),
        ("policy/dual-clip", "dual_clip", None),
        ("policy/cispo", "epsilon_high", 1e9),
        ("policy/cispo-low", "cap_low", None),
        ("policy/sapo", "tau_neg", 1.0),
        ("linear-policy/grpo", "epsilon_low", 1e9),
    ],
)
def test_a_loss_that_forgets_a_bound_fails(name: str, forgotten: str, to: Any) -> None:
    from tileloss.tools.implementations.torch_losses import eager_float32

    (chosen,) = (case for case in POLICY if case.name == name)
    drawn = chosen.draw()
    case = drawn.case
    # It stays where it is without epsilon_low.
    options = {"epsilon_high": case.options.get("epsilon_low", 0.2), **case.options}
    for planted in (False, True):
        changed = options | ({forgotten: to} if planted else {})
        given = {name: value for name, value in changed.items() if value is not None}
        returned = eager_float32(replace(case.with_numbers(), options=given))
        verdict = cells.judged(drawn, prepare(case, returned))
        assert verdict["status"] == ("failed" if planted else "pass"), verdict
