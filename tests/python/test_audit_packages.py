"""What the audit says of the packages that are pinned: docs/measurements/audit.md publishes it."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tileloss.tools import implementations
from tileloss.tools.audit.cases import CASES
from tileloss.tools.command import run

DOCUMENT = Path(__file__).parents[2] / "docs" / "measurements" / "audit.md"
NAMES = {case.name for case in CASES}
WORDS = {"pass": "pass", "failed": "**FAIL**", "refused": "-"}
OFF = "failed loss"
UNREDUCED = "failed loss/nonfinite"  # a mean over no row is NaN

# By implementation: what becomes of a case. torch.compile's compiler takes seconds a case: it is off, which leaves what is ours.
EXPECTED = {
    "torch": {
        "ce/fp32": "pass", "ce/bf16": OFF, "ce/all-ignored": UNREDUCED, "linear/bf16": OFF, "policy/vespo": "refused",
    },
    "torch-float32": {
        "ce/bf16": "pass", "ce/fp16": "pass", "ce/none": "pass", "ce/confident": OFF, "ce/token-weights": "pass",
        "ce/class-weights": "pass", "ce/z-loss": "pass", "ce/num-items": "pass", "ce/softcap": "pass",
        "ce/temperature": "pass", "ce/padding": "pass", "ce/minus-inf": "pass", "ce/second-backward": "pass",
        "logprobs/bf16": "pass", "logprobs/entropy": "pass", "policy/grpo-bf16": "pass", "policy/gspo": "pass",
        "policy/luspo": "pass", "policy/dapo": "pass", "policy/cispo": "pass", "policy/sapo": "pass", "policy/delta": "pass",
        "policy/delta-low": "pass", "policy/dual-clip": "pass", "policy/cispo-low": "pass",
        "linear/bias": "pass", "linear-policy/luspo-kl": "pass",
    },
    "torch-compile": {
        "ce/class-weights": "pass", "policy/grpo-kl": "pass", "ce/second-backward": "refused",
    },
    "torch-linear": {
        "linear/fp32": "pass", "linear/none": "pass", "linear/bias": "pass", "linear/class-weights": "pass",
        "linear/second-backward": "pass", "linear/all-ignored": UNREDUCED, "linear/softcap": "refused",
        "linear/only-dhead": "pass",
    },
    "trl": {
        "logprobs/temperature": "pass", "logprobs/bf16": "failed logp", "policy/grpo-kl": "pass", "policy/dapo": "pass",
        "policy/gspo": "pass", "policy/luspo": "pass", "policy/dr-grpo": "pass", "policy/sapo": "pass",
        "policy/delta": "pass", "policy/dual-clip": "refused",
        "linear/fp32": "pass", "linear/softcap": "pass", "linear/bias": "pass",
        "linear/only-dhead": "pass", "linear/sum": "refused", "linear-policy/luspo-kl": "pass", "linear-policy/vespo": "pass",
        "linear/logprobs": "pass", "ce/fp32": "refused",
    },
    "liger": {
        "ce/fp32": "pass", "ce/ragged": "pass", "ce/none": "pass", "ce/z-loss": "pass", "ce/smoothing": "pass",
        "ce/second-backward": "failed dlogits/ulp_target", "linear/fp32": "pass", "linear/bias": "pass",
        "ce/softcap": "refused", "linear/only-dhidden": "pass", "linear/only-dhead": "failed dhead/missing",
        "linear-policy/only-dhead": "pass", "linear/second-backward": "failed dhidden/frobenius",
        "linear-policy/grpo": "pass", "linear-policy/dapo-kl": "pass", "linear-policy/gspo-kl": "pass",
        "linear-policy/luspo": "pass", "linear-policy/luspo-kl": OFF, "linear-policy/vespo": "pass",
        "linear/low-rank": "refused",
    },
    "cce": {
        "linear/fp32": "pass", "linear/none": "pass", "linear/softcap": "pass", "linear/bias": "refused",
    },
    "jax": {
        "ce/bf16": "pass", "ce/none": "pass", "ce/softcap": "pass", "ce/padding": "pass", "ce/all-ignored": "pass",
        "logprobs/entropy": "pass", "linear/bias": "pass", "linear/low-rank": "pass", "linear/logprobs": "pass",
        "policy/grpo": "refused",
    },
    "optax": {
        "ce/fp32": "pass", "ce/none": "pass", "ce/bf16": OFF, "linear/bias": "pass", "ce/smoothing": "refused",
    },
    "tokamax": {
        "linear/all-used": "pass", "linear/sum": "pass", "linear/fp32": "refused", "linear/none": "refused",
    },
    "tileloss-torch": dict.fromkeys(("ce/*", "logprobs/*", "policy/*", "linear/*", "linear-policy/*"), "pass"),
    "tileloss-jax": {
        "ce/none": "pass", "logprobs/entropy": "pass", "policy/gspo": "pass", "linear/bias": "pass",
        "linear-policy/luspo-kl": "pass",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_the_audit_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = implementations.KNOWN[name]
    missing = [p for p in known.packages if find_spec(p.replace("-", "_")) is None]
    if missing:
        pytest.skip(f"NOT RUN: {', '.join(missing)} could not be installed")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    expected = EXPECTED[name]
    output = tmp_path / "results.jsonl"
    code = run(["audit", f"--impl={name}", f"--case={','.join(expected)}", f"--output={output}"])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {x["case"]: x["status"] + (f" {x['gate']}" if x["gate"] else "") for x in lines}
    if "ce/*" in expected:
        assert len(found) > 50 and set(found.values()) == {"pass"}, lines
    else:
        assert found == expected
    assert all(line["package"].startswith((f"{known.packages[0]} ", "tileloss ")) for line in lines)
    assert code == any(status.startswith("failed") for status in found.values())


def test_every_implementation_is_audited() -> None:
    assert set(EXPECTED) == set(implementations.KNOWN)


def test_the_published_table_says_the_same() -> None:
    text = DOCUMENT.read_text()
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", text, re.M)]
    (head,) = [row for row in rows if row[:2] == ["case", "TileLoss, all three"]]
    table = {
        row[0]: dict(zip(head[1:], row[1:], strict=True))
        for row in rows
        if row[0] in NAMES and len(row) == len(head)
    }
    assert table.keys() == NAMES and {row["TileLoss, all three"] for row in table.values()} == {
        "pass"
    }
    for name, expected in EXPECTED.items():
        if name.startswith("tileloss-"):
            continue
        published = {case: WORDS[status.split()[0]] for case, status in expected.items()}
        assert {case: table[case][name] for case in expected} == published
        versions = [
            f"{p.replace('-', ' ')} {version(p)}"
            for p in implementations.KNOWN[name].packages
            if find_spec_of(p)
        ]
        assert all(each.lower() in text.lower() for each in versions), versions


def find_spec_of(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
