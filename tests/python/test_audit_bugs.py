"""The known bugs: each case fails on its planted bug, which is named, and passes the definitions and TileLoss."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileloss.testing._drawn import Drawn
from tileloss.testing.case import Case
from tileloss.testing.outputs import Missing, prepare
from tileloss.tools.audit import cells
from tileloss.tools.audit.bugs import BUGS, Bug
from tileloss.tools.audit.bugs.likeness import look
from tileloss.tools.audit.bugs.policy import Policy
from tileloss.tools.audit.bugs.right import Right
from tileloss.tools.audit.bugs.targets import Columns, Distilled, SoftLabels
from tileloss.tools.audit.calls import Misbehaved, call
from tileloss.tools.command import run

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "users" / "audit.md").read_text()
DEFINITIONS = {
    "cross_entropy": Right, "logprobs": Right, "policy_loss": Policy, "soft_cross_entropy": SoftLabels, "distillation": Distilled,
    "sparse_distillation": Columns,
}  # fmt: skip
# A few of each kind for the first tier: a sum, a rounding, a missing gradient, a policy loss, calls.
FEW = ("verl-2656", "liger-kernel-1329", "liger-frozen-input", "trl-5890", "pygpubench-7")


def right(case: Case) -> dict[str, Any]:
    return DEFINITIONS[case.function.removeprefix("linear_")](case).run()


def judged(bug: Bug, compute: Any, drawn: Drawn) -> dict[str, Any]:
    """The verdict on a function of a case, with what it looks like."""
    case = replace(drawn.case, backwards=bug.case.backwards).with_numbers()
    found: dict[str, Any] = {}
    try:
        with np.errstate(all="ignore"):
            found = prepare(case, call(compute, case, bug.case.calls))
    except Missing as error:
        verdict = {"status": "failed", "gate": f"{error.output}/missing"}
    except Misbehaved as error:
        verdict = {"status": "failed", "gate": error.gate}
    else:
        seen = bug.case.judged or found
        found = {name: x for name, x in found.items() if name in seen}
        verdict = cells.judged(drawn, found)
    like = look(bug.case, drawn.case, found, verdict["gate"]) if "gate" in verdict else None
    return verdict | {"looks_like": like}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.full) for name in BUGS]
)
def test_the_planted_bug_fails_and_is_named(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]
    prepared = cells.prepare(bug.case, tmp_path)
    assert judged(bug, right, prepared.drawn)["status"] == "pass"
    planted = judged(bug, bug.plant, prepared.drawn)
    assert planted["status"] == "failed" and planted["looks_like"] == bug.looks_like, planted
    kernels = cells.native(prepared, "cpu", 300)
    assert kernels["status"] == "pass", kernels


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "failures", "with_avx2"),
    [
        ("tileloss-torch", set(), set()),
        ("tileloss-jax", set(), set()),
        # Its mean over no row is NaN, as it documents; a head in bfloat16 gives logits in bfloat16, which is the bug itself.
        # Without AVX-512 its dlogits of two cases are 1.06 and 1.11 of the normwise bound off.
        (
            "torch-float32",
            {"pytorch-116349", "axolotl-1601", "trl-4303", "marin-8217"},
            {"liger-kernel-1329", "ml-cross-entropy-59"},
        ),
    ],
)
def test_no_false_alarm(name: str, failures: set[str], with_avx2: set[str], tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    run(["audit", f"--impl={name}", "--case=bug/*", f"--output={output}", "--quiet"])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == len(BUGS)
    bad = {x["case"].removeprefix("bug/") for x in lines if x["status"] not in ("pass", "refused")}
    assert bad in (failures, failures | with_avx2)
    refused = [x for x in lines if x["status"] == "refused"]
    assert not refused or name == "torch-float32"


def test_the_table_is_large_and_every_entry_says_where_it_was_seen() -> None:
    assert len(BUGS) >= 50
    threads = [bug.where for bug in BUGS.values() if not bug.where.startswith("examples/")]
    assert len(threads) >= 45
    for where in threads:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+(, examples/audit/\w+\.py)?", where), where
    scripts = set(re.findall(r"examples/audit/(\w+\.py)", " ".join(b.where for b in BUGS.values())))
    assert scripts == {p.name for p in (ROOT / "examples/audit").glob("*.py")} - {"my_loss.py"}


def test_the_document_has_every_bug() -> None:
    rows = re.findall(r"^\| `bug/(\S+)` \| (\S.*?) \| (.*?) \|", DOCUMENT, re.M)
    assert {name: (where, shows) for name, where, shows in rows} == {
        bug.name: (bug.where, bug.case.shows) for bug in BUGS.values()
    }


def test_a_planted_bug_is_an_implementation_and_its_failure_has_a_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    name = "tileloss.tools.audit.bugs:liger_kernel_802"
    cases = "--case=bug/liger-kernel-802,ce/num-items,ce/fp32"
    assert run(["audit", f"--impl={name}", cases]) == 1
    out = capfd.readouterr().out
    assert out.count("; looks like linkedin/Liger-Kernel#802: the given number of tokens") == 2
    assert "1 pass" in out


def test_what_is_like_no_bug_has_no_name() -> None:
    bug = BUGS["transformerengine-2476"]

    def off(case: Case) -> dict[str, Any]:
        found = right(case)
        return found | {"dlogits": -found["dlogits"]}

    verdict = judged(bug, off, bug.case.draw())
    assert verdict["status"] == "failed" and verdict["looks_like"] is None


def test_the_list_needs_no_framework_and_no_second() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tileloss", "audit", "--list"]
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "numpy" in imported and not {"torch", "jax", "transformers"} & imported
    assert "bug/liger-kernel-1329" in done.stdout
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < 1
