"""`tileloss audit --invariance`: what moves shows, what does not keeps its bits, and what cannot be measured is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileloss
from tileloss.check import implementations, invariance
from tileloss.check.case import Case
from tileloss.check.case_file import read_case, write_case
from tileloss.check.command import run
from tileloss.check.invariance import compare, describe
from tileloss.check.progress import Progress

PROGRAM = tileloss.library_path().with_name("tileloss")
LOSSES = Path(__file__).with_name("audit_losses.py")
Key = tuple[str, str, str, str]


def measure(name: str) -> dict[Key, dict[str, Any]]:
    lines = list(invariance.measure(name, 60, Progress("test", quiet=True)))
    return {(x["level"], x["dtype"], x["varied"], x["quantity"]): x for x in lines}


def test_the_kernels_keep_the_bits_that_they_promise() -> None:
    lines = measure("tileloss-torch")
    several = len(os.sched_getaffinity(0)) > 1
    assert several or all(
        x["status"] == "not_run" for x in lines.values() if x["varied"] == "threads"
    )
    for (_, dtype, varied, quantity), line in lines.items():
        if line["status"] == "not_run":
            continue
        moves = quantity in {
            "batch_split": ["dhead"],
            "row_order": ["dhead"],
            "chunk_size": ["dhidden"],
        }.get(varied, [])
        assert line["same_bits"] or moves, line
        if moves:
            assert line["relative_difference"] < (1e-5 if dtype == "float32" else 5e-3), line
    kinds = {varied for *_, varied, _ in lines}
    assert kinds == {"batch_split", "row_order", "chunk_size", "threads"}


def test_the_shards_of_a_vocabulary_keep_the_bits_of_logp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "DTYPES", {"float32": np.float32})
    monkeypatch.setitem(implementations.KNOBS, "tileloss-jax", {"shards": (1, 8)})
    lines = measure("tileloss-jax")
    for level, quantity in (("logits", "logp"), ("logits", "dlogits"), ("linear", "logp")):
        assert lines[level, "float32", "shards", quantity]["same_bits"]


def test_what_depends_on_its_batch_shows() -> None:
    lines = measure(f"{LOSSES}:of_its_batch")
    split = lines["logits", "float32", "batch_split", "logp"]
    assert not split["same_bits"] and split["outside_1e-3"] > 0.5
    assert split["ratio_quantiles"]["0.5"] < 0.99
    assert lines["logits", "float32", "row_order", "logp"]["same_bits"]
    assert lines["linear", "float32", None, None]["status"] == "refused"  # type: ignore[index]


def test_the_comparison() -> None:
    a = np.log(np.array([0.5, 0.25, 0.125, 0.5], np.float32))
    b = a - np.log(np.array([1, 1, 1, 1.01], np.float32))
    line = compare("logp", [(a, b)])
    assert not line["same_bits"] and line["outside_1e-3"] == 0.25
    assert line["ratio_quantiles"]["0.5"] == 1
    assert line["ratio_quantiles"]["1"] == pytest.approx(1.01, rel=1e-6)
    same = compare("logp", [(a, a)])
    assert same["same_bits"] and same["outside_1e-3"] == 0
    assert compare("dhead", [(a, a), (a, 3 * a)])["relative_difference"] == 2
    zeros = compare("dlogits", [(np.zeros(1), -np.zeros(1))])
    assert not zeros["same_bits"] and zeros["relative_difference"] == 0


def test_one_cpu_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    lines = measure(f"{LOSSES}:right")
    line = lines["logits", "float32", "threads", None]  # type: ignore[index]
    assert (line["status"], line["message"]) == ("not_run", "NOT RUN: there is one CPU")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without the model, which is a test of its own."""
    model = [describe("transformers", "", status="not_installed", message="torch is not installed")]
    monkeypatch.setattr(invariance, "measure_model", lambda *_: iter(model))
    output = tmp_path / "results.jsonl"
    arguments = ["audit", "--invariance", f"--output={output}", f"--impl={LOSSES}:of_its_batch"]
    assert run(PROGRAM, arguments) == 0
    out = capfd.readouterr().out
    assert (
        "logits  float32   logp " in out
        and "beyond 1e-3)" in out
        and "torch is not installed" in out
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {line["tool"] for line in lines} == {"invariance"} and next(iter(lines[0])) == "tool"
    assert run(PROGRAM, [*arguments[:2], f"--impl={LOSSES}:aborting"]) == 1
    assert run(PROGRAM, ["audit", "--invariance", "--case=ce/fp32"]) == 2


def test_head_against_body() -> None:
    body, torch_head, our_head = invariance.measure_model(300, Progress("test", quiet=True))
    assert (body["varied"], torch_head["varied"], our_head["varied"]) == ("body", "head", "head")
    assert our_head["implementation"] == "transformers, tileloss head" and our_head["same_bits"]
    assert all(
        line["status"] == "measured" and line["dtype"] == "bfloat16" for line in (body, torch_head)
    )


def test_cases_go_round(tmp_path: Path) -> None:
    case = Case(
        {"logits": np.ones((2, 3), np.float32), "labels": np.array([0, 1])},
        "logprobs",
        {"temperature": 0.5},
        1,
        2,
        ["logp"],
        False,
        False,
    )
    write_case(tmp_path / "case", case)
    again = read_case(tmp_path / "case")
    assert again.tensors["logits"].tolist() == case.tensors["logits"].tolist()
    assert (again.function, again.options, again.seq_len) == ("logprobs", {"temperature": 0.5}, 2)
    assert list(again.gradients) == ["dlogits"]
