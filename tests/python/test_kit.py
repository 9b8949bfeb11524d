"""The kit for machines with a GPU and without a network: how its steps are run and told of; and, where `./dev kit` has made it,
all of its steps on this machine, which has no GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "kit"))
import pack  # noqa: E402
import run as kit  # noqa: E402
from steps import STEPS, Command, Step  # noqa: E402

from tileloss._core.library import library_path  # noqa: E402

KIT = ROOT / "build" / "kit"


def python(name: str, code: str, must_print: str = "") -> Command:
    return Command(name, (sys.executable, "-c", code), must_print=must_print)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For results. The kit itself is an empty folder."""
    (tmp_path / "facts").write_text("some commit")
    monkeypatch.setattr(kit, "KIT", tmp_path)
    return tmp_path / "results"


def outcomes(folder: Path) -> dict[str, str]:
    lines = (folder / "results.jsonl").read_text().splitlines()
    return {line["command"]: line["outcome"] for line in map(json.loads, lines)}


def logs(folder: Path) -> dict[str, bytes]:
    with tarfile.open(folder / "logs.tar.gz") as archive:
        return {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]


# A command, what the kit says of it on a machine with a GPU, and on one without.
PLANTED = {
    "passes": ("print('fine')", "ok", "ok"),
    "fails": ("import sys; sys.exit('wrong')", "exit code 1", "exit code 1"),
    "crashes": ("import os; os.abort()", "killed by SIGABRT", "killed by SIGABRT"),
    "skips": ("print('NOT RUN: no NCCL')", "tests were skipped", "tests were skipped"),
    "googletest": ("print('[  SKIPPED ] A.B')", "tests were skipped", "tests were skipped"),
    "silent": ("pass", "did not print PASSED", "did not print PASSED"),
    "device": ("import sys; sys.exit('no device')", "exit code 1", "no device"),
    "broken": ("import sys; sys.exit('ImportError, no device')", "exit code 1", "exit code 1"),
}


@pytest.mark.parametrize("device", ["", "NVIDIA H100"])
def test_what_is_said_of_a_command(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "device_name", lambda: device)
    commands = [
        python(name, code, "PASSED" if name == "silent" else "")
        for name, (code, *_) in PLANTED.items()
    ]
    commands += [Command("missing", ("/nowhere/program",)), Command("tool", ("no-such-tool",))]
    code = kit.run("check", [Step("planted", 60, tuple(commands), 2)], folder)
    assert code == 1
    found = outcomes(folder)
    assert found.pop("missing").startswith("could not be started")
    assert found.pop("tool") == ("there is no no-such-tool here" if device else "no device")
    assert found == {name: words[1 if device else 2] for name, words in PLANTED.items()}
    first, line, last = (folder / "summary").read_text().splitlines()
    assert first.startswith(f"check: some commit; {device or 'no device'}, ")
    assert line.split()[:2] == ["FAILED", "planted"]
    assert last.startswith("check: 0 of 1 steps passed, ")
    assert logs(folder)["logs/planted.fails.log"] == b"wrong\n"
    fine = [Step("fine", 60, (python("passes", "print('fine')"),))]
    assert kit.run("check", fine, folder) == (0 if device else 3)


def test_a_step_costs_its_own_limit(folder: Path) -> None:
    """One hangs, and what it started keeps its output open; one ignores SIGTERM; one prints 100 MB. The next one runs."""
    child = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('started', flush=True)"
    )
    hangs = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(60)"
    prints = "import sys; sys.stdout.write('begin ' + 'x' * 100_000_000 + ' end')"
    steps = [
        Step("hangs", 1.5, (python("hangs", hangs), python("leaves", child)), 2),
        Step("prints", 60, (python("prints", prints),)),
        Step("after", 60, (python("passes", "pass"),)),
    ]
    begin = time.monotonic()
    assert kit.run("check", steps, folder) == 1
    assert time.monotonic() - begin < 30
    assert outcomes(folder) == {
        "hangs": "stopped after 2 s",
        "leaves": "ok",
        "prints": "ok",
        "passes": "ok",
    }
    found = logs(folder)
    assert found["logs/hangs.hangs.log"] == b"begun\n"
    printed = found["logs/prints.prints.log"]
    assert printed.startswith(b"begin x") and printed.endswith(b"x end") and len(printed) < 1 << 20
    assert b"bytes left out]" in printed
    assert len(list(folder.iterdir())) <= 8


def test_no_step_begins_after_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "TOTAL_S", 0.7)
    steps = [
        Step("long", 60, (python("sleeps", "import time; time.sleep(60)"),)),
        Step("next", 60, (python("passes", "pass"),)),
    ]
    assert kit.run("check", steps, folder) == 1
    assert outcomes(folder) == {"sleeps": "stopped after 1 s", "passes": "no time was left"}


def test_no_binary_names_a_path_of_this_machine() -> None:
    for name in pack.BINARIES:
        assert str(ROOT).encode() not in (library_path().parent / name).read_bytes(), name


@pytest.mark.full
@pytest.mark.parametrize("what", list(STEPS))
def test_every_step_starts_without_a_gpu(what: str, tmp_path: Path) -> None:
    """In a copy that cannot be written to, without environment, network, or programs that would fetch something."""
    if not (KIT / "run").exists() or shutil.which("nvidia-smi"):
        pytest.skip("NOT RUN: ./dev kit has made none, or there is a GPU")
    copy, empty = tmp_path / "kit", tmp_path / "empty"
    shutil.copytree(KIT, copy, symlinks=True)
    for path in (*copy.rglob("*"), copy):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    empty.mkdir()
    for name in ("apt-get", "pip", "pip3", "curl", "wget", "git"):
        (empty / name).write_text(f"#!/bin/sh\necho {name} was called >&2\nexit 1\n")
        (empty / name).chmod(0o755)
    alone = [
        "env",
        "-i",
        f"PATH={empty}:/usr/bin:/bin",
        sys.executable,
        copy / "run",
        what,
        "results",
    ]
    if os.geteuid() == 0:  # a root that may write no more than others
        alone = ["unshare", "--net", "setpriv", "--bounding-set=-all", "--inh-caps=-all", *alone]
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stdout + done.stderr
    assert " was called" not in done.stdout + done.stderr
    found = outcomes(tmp_path / "results")
    assert set(found.values()) <= {"ok", "no device"}, done.stdout
    assert not [name for name, log in logs(tmp_path / "results").items() if b" was called" in log]
