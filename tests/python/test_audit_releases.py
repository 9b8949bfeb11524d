"""`tileloss audit --versions`: each release in an environment of its own, and in which of them a case failed."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tileloss.tools.audit import releases
from tileloss.tools.audit.releases import Releases, changes, environment_of, parse
from tileloss.tools.command import run

LOSSES = Path(__file__).with_name("audit_losses.py")
ADAPTER = """
import sys
sys.path.insert(0, {losses!r})
import audit_losses
import fakeloss

def loss(case):
    return getattr(audit_losses, fakeloss.KIND)(case)
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three releases of a package that pip finds in a folder, in place of PyPI; the second one is wrong."""
    for version, kind in (("1.0", "right"), ("1.1", "halved"), ("2.0", "right")):
        info = f"fakeloss-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: fakeloss\nVersion: {version}\nRequires-Dist: nothing-that-is-there\n"
        with zipfile.ZipFile(tmp_path / f"fakeloss-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("fakeloss.py", f"KIND = {kind!r}\n")
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "adapter.py").write_text(ADAPTER.format(losses=str(LOSSES.parent)))
    return tmp_path


@pytest.mark.full
def test_a_bug_comes_and_goes(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = index / "results.jsonl"
    flags = ["--versions=fakeloss==1.0,1.1,2.0,3.0", f"--impl={index / 'adapter.py'}:loss"]
    code = run(["audit", *flags, "--case=ce/fp32,ce/sum", f"--output={output}"])
    out = capfd.readouterr().out
    assert code == 1
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(x["implementation"], x["release"], x["status"]) for x in lines[::2]] == [
        ("fakeloss 1.0", "1.0", "pass"),
        ("fakeloss 1.1", "1.1", "failed"),
        ("fakeloss 2.0", "2.0", "pass"),
        ("fakeloss 3.0", "3.0", "not_installed"),
    ]
    assert "No matching distribution" in lines[-1]["message"]
    rows = [line.split() for line in out.splitlines()]
    assert ["ce/fp32", "pass", "FAIL", "pass", "n/i"] in rows
    assert "ce/fp32  fails in 1.1; passes in 1.0, 2.0" in out


@pytest.mark.full
def test_an_environment_is_made_once_and_what_is_half_made_again(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environment_of("fakeloss", "1.0", ())
    calls: list[Any] = []
    monkeypatch.setattr(releases, "_run", calls.append)
    assert environment_of("fakeloss", "1.0", ()) == python and not calls
    (python.parents[1] / "complete").unlink()
    environment_of("fakeloss", "1.0", ())
    assert len(calls) == 2


def test_the_request() -> None:
    assert parse("liger-kernel==0.5.0, 0.8.5,0.5.0") == Releases("liger-kernel", ("0.5.0", "0.8.5"))
    assert parse("trl==1.16.0").implementation == "trl"
    for text in ("liger-kernel", "liger-kernel==", "==1", "a b==1", "trl==1; rm", "trl==-e"):
        with pytest.raises(ValueError, match="^--versions: expected PACKAGE==VERSION,VERSION, got"):
            parse(text)
    with pytest.raises(
        ValueError, match="expected one of torch, trl, liger-kernel, .*got requests"
    ):
        _ = parse("requests==2").implementation


def test_came_and_went() -> None:
    def lines(case: str, *statuses: str) -> list[dict[str, str]]:
        return [
            {"case": case, "release": f"{k}", "status": status} for k, status in enumerate(statuses)
        ]

    found = changes(
        [
            *lines("a", "failed", "crashed", "refused", "pass", "failed"),
            *lines("b", "pass", "refused", "pass"),
            *lines("c", "failed", "failed"),
            *lines("d", "pass", "pass", "failed"),
        ]
    )
    assert found == [
        ("a", "fails in 0 to 1, 4; passes in 3"),
        ("d", "fails in 2; passes in 0 to 1"),
    ]


def test_bad_usage(capfd: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--versions=trl==1", "--impl=torch,trl"], "--versions: expected at most one --impl"),
        (["--versions=trl==1", "--invariance"], "and no --invariance"),
        (["--versions=trl"], "--versions: expected PACKAGE==VERSION,VERSION, got 'trl'"),
        (["--with=numpy==2"], "--with: expected --versions beside it"),
    ):
        assert run(["audit", *flags]) == 2
        assert message in capfd.readouterr().err
