"""`tileloss audit --invariance`: what moves shows, what does not keeps its bits, and what cannot be measured is said."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileloss.testing.case import Case
from tileloss.tools import implementations
from tileloss.tools.audit import invariance
from tileloss.tools.audit.invariance import Claims, claim, compare, describe
from tileloss.tools.case_file import read_case, write_case
from tileloss.tools.command import run
from tileloss.tools.progress import Progress

LOSSES = Path(__file__).with_name("audit_losses.py")
DOCUMENT = Path(__file__).parents[2] / "docs" / "users" / "audit.md"
MOVES = {"batch_split": ["dhead"], "row_order": ["dhead"], "chunk_size": ["dhidden"]}
Key = tuple[str, str, str, str]


def measure(name: str) -> dict[Key, dict[str, Any]]:
    lines = list(invariance.measure(name, 60, Progress("test", quiet=True), Claims()))
    return {(x["level"], x["dtype"], x["varied"], x["quantity"]): x for x in lines}


def test_the_documents_command_finds_what_the_kernels_promise(tmp_path: Path) -> None:
    commands = re.findall(r"^\./dev (audit --invariance.*)$", DOCUMENT.read_text(), re.M)
    assert commands == ["audit --invariance --impl tileloss-torch"]
    output = tmp_path / "results.jsonl"
    assert run([*commands[0].split(), f"--output={output}"]) == 0
    *lines, body, torch_head, our_head = map(json.loads, output.read_text().splitlines())
    for line in lines:
        if line["status"] == "not_run":
            assert line["varied"] == "threads" and len(os.sched_getaffinity(0)) == 1
        elif line["quantity"] in MOVES.get(line["varied"], ()):
            limit = 1e-5 if line["dtype"] == "float32" else 5e-3
            assert line["same_bits"] or line["relative_difference"] < limit, line
        else:
            assert line["same_bits"], line
    assert {line["varied"] for line in lines} == {
        "batch_split",
        "row_order",
        "chunk_size",
        "threads",
    }
    assert [line["varied"] for line in (body, torch_head, our_head)] == ["body", "head", "head"]
    assert {line["claim"] for line in lines} == {"kept", None}
    assert our_head["implementation"] == "transformers, tileloss head" and our_head["same_bits"]
    assert body["status"] == torch_head["status"] == "measured"


def test_the_documents_tables_are_whole() -> None:
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines()]
    measured = {row[0] for row in rows if len(row) > 3 and row[1] in ("logits", "linear")}
    assert measured == set(implementations.KNOWN) - {"tokamax"}  # which refuses these cases
    of_the_model = [row[0] for row in rows if len(row) == 4 and row[1] in ("yes", "no")]
    assert of_the_model == ["body, exact head", "torch head", "tileloss head"]


def test_the_shards_of_a_vocabulary_keep_the_bits_of_logp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "DTYPES", {"float32": np.float32})
    monkeypatch.setitem(implementations.KNOBS, "tileloss-jax", {"shards": (1, 8)})
    lines = measure("tileloss-jax")
    for level, quantity in (("logits", "logp"), ("logits", "dlogits"), ("linear", "logp")):
        assert lines[level, "float32", "shards", quantity]["same_bits"]


def test_what_depends_on_its_batch_shows() -> None:
    lines = measure(f"{LOSSES}:batch_dependent")
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


def test_a_contract_is_kept_or_broken() -> None:
    moved = {"quantity": "dhead", "varied": "threads", "same_bits": False}
    assert claim({"dhead": ["order"]}, moved) == "broken"
    assert claim({"dhead": ["order"]}, moved | {"same_bits": True}) == "kept"
    assert claim({"dhead": ["threads"]}, moved) is None
    assert claim({"logp": []}, moved) is None and claim(None, moved) is None
    assert claim({"logp": []}, {"status": "crashed"}) is None


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
    arguments = ["audit", "--invariance", f"--output={output}", f"--impl={LOSSES}:batch_dependent"]
    assert run(arguments) == 0
    out = capfd.readouterr().out
    assert (
        "logits  float32   logp " in out
        and "beyond 1e-3)" in out
        and "torch is not installed" in out
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {line["tool"] for line in lines} == {"invariance"} and next(iter(lines[0])) == "tool"
    assert run([*arguments[:2], f"--impl={LOSSES}:aborting"]) == 1
    capfd.readouterr()
    assert run([*arguments[:2], f"--impl={LOSSES}:claiming"]) == 1
    assert "beyond 1e-3) AGAINST ITS CONTRACT" in capfd.readouterr().out
    assert run(["audit", "--invariance", "--case=ce/fp32"]) == 2


def test_who_claims_the_same_bits_is_held_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not those of another name or list, and not the unknown."""
    monkeypatch.setattr(invariance, "measure_model", lambda *_: iter([]))
    monkeypatch.setattr(invariance, "DTYPES", {"float32": np.float32})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # no second process each
    names = ("mine", "mine_again", "not_mine", "without_exp", "others")
    impl = [f"{LOSSES}:{name}" for name in names]
    command = ["audit", "--invariance", "--impl"]
    output = tmp_path / "results.jsonl"
    assert run([*command, ",".join(impl), f"--output={output}"]) == 1
    lines = [x for x in map(json.loads, output.read_text().splitlines()) if x["against"]]
    assert {x["against"] for x in lines} == {f"{LOSSES}:mine"}
    assert [(x["implementation"].split(":")[1], x["quantity"], x["claim"]) for x in lines] == [
        ("mine_again", "logp", "kept"),
        ("mine_again", "dlogits", "kept"),
        ("not_mine", "logp", "broken"),
        ("not_mine", "dlogits", "kept"),
        ("without_exp", "dlogits", "kept"),
    ]
    out = capfd.readouterr().out
    assert f"{LOSSES}:mine_again   logits  float32  equal bits as claimed: logp, dlogits\n" in out
    assert re.search(r"claim broken: logp \de-01 .*; equal bits as claimed: dlogits\n", out)
    assert run([*command, ",".join(impl[:2])]) == 0


def test_a_row_stage_of_jax_is_no_row_stage_of_the_library() -> None:
    torch, jax = (implementations.load(f"tileloss-{name}").contract for name in ("torch", "jax"))
    assert torch is not None and jax is not None
    assert jax["kernels"].startswith(f"{torch['kernels']}, row stage of jax ")


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
