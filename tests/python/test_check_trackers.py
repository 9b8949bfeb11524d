"""Trackers: what reaches them, that their failures change nothing, and that the key goes nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tileloss
from tileloss.tools import trackers
from tileloss.tools.command import run
from tileloss.tools.config import Config
from tileloss.tools.program import SECRETS, run_program

ROOT = Path(__file__).parents[2]
PROGRAM = tileloss.library_path().with_name("tileloss")
CANARY = "0123456789abcdef0123456789abcdefcanary00"
CHECK = "loss: cross_entropy\nseq_len: 6\nbatch_size: 1\nvocab_size: 127\ndtype: bf16\noutput: r.jsonl\n"
SWEEP = (
    "loss: cross_entropy\nshape: 8x100\ndtype: fp32\nthreads: [1, 2]\niters: 1\noutput: r.jsonl\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return tmp_path


def command(name: str, text: str, *sets: str) -> int:
    Path("c.yaml").write_text(text)
    return run(PROGRAM, [name, "--config=c.yaml", *(f"--set={value}" for value in sets)])


def spawn(program: Path, name: str, text: str, *sets: str) -> None:
    """The same in a process of its own: wandb keeps the folder that it was first used in."""
    Path("c.yaml").write_text(text)
    arguments = [name, "--config=c.yaml", *(f"--set={value}" for value in sets)]
    code = (
        "import sys; from pathlib import Path; from tileloss.tools.command import run; "
        f"sys.exit(run(Path({str(program)!r}), {arguments}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def wandb_records(folder: Path) -> list[dict[str, Any]]:
    """As wandb's own reader prints an offline run."""
    pytest.importorskip("wandb")
    (run_file,) = folder.glob("wandb/offline-run-*/*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    done = subprocess.run(
        [wandb, "leet", "inspect", "--json", run_file], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_wandb_offline_has_the_metrics_gates_and_config(folder: Path) -> None:
    sets = ("wandb_project=checks", "wandb_mode=offline", "wandb_name=first")
    spawn(PROGRAM, "gradcheck", CHECK, *sets)
    text = json.dumps(wandb_records(folder))
    line = json.loads((folder / "r.jsonl").read_text())
    for expected in ("checks", "first", "gates/loss/value", "gates/loss/limit", "c.yaml"):
        assert expected in text
    assert repr(line["loss_ref"]) in text


def test_a_sweep_is_history(folder: Path) -> None:
    spawn(PROGRAM, "sweep", SWEEP, "wandb_project=checks", "wandb_mode=offline")
    steps = [r for r in wandb_records(folder) if r["type"] == "history"]
    assert len(steps) == 2
    for step, threads in zip(steps, ("1", "2"), strict=True):
        assert "median_ms" in json.dumps(step)
        assert f'"case/threads": {threads}' in json.dumps(step).replace(
            '"' + threads + '"', threads
        )


def test_tensorboard_has_the_metrics(folder: Path) -> None:
    assert command("gradcheck", CHECK, "tracker=tensorboard", "wandb_project=checks") == 0
    (events,) = folder.glob("runs/checks/check/events.*")
    data = events.read_bytes()
    assert b"gates/loss/value" in data
    assert b"loss_ref" in data


def test_trackio_has_the_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    spawn(PROGRAM, "gradcheck", CHECK, "tracker=trackio", "wandb_project=checks")
    assert b"loss_ref" in b"".join(path.read_bytes() for path in (folder / "trackio").iterdir())


def test_online_without_a_key_fails_before_any_work(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("gradcheck", CHECK, "wandb_project=checks") == 3
    captured = capfd.readouterr()
    assert "wandb_mode: online needs WANDB_API_KEY" in captured.err
    assert captured.out == ""
    assert not (folder / "r.jsonl").exists()


def test_a_tracker_that_fails_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such host")

    calls: list[str] = []
    for name in ("log", "finish"):
        monkeypatch.setattr(
            trackers._TensorBoard, name, lambda *_, name=name: (calls.append(name), fail())
        )
    assert command("sweep", SWEEP, "tracker=tensorboard") == 0
    assert len((folder / "r.jsonl").read_text().splitlines()) == 2
    assert calls == ["log"]  # and left out from there on
    assert (
        "tensorboard failed and is left out: RuntimeError: no such host" in capfd.readouterr().err
    )
    assert (
        command("gradcheck", CHECK, "tracker=tensorboard", "output=g.jsonl", "tolerances.ulp=0")
        == 1
    )
    assert len((folder / "g.jsonl").read_text().splitlines()) == 1


def test_the_key_is_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In no file, in no argument list, and in the environment of neither the compiled program nor wandb's service."""
    pytest.importorskip("wandb")
    program = folder / "program"
    look = "cat /proc/[0-9]*/cmdline > lines; for p in $(pgrep -P $PPID); do cat /proc/$p/environ; done > environments"
    program.write_text(f'#!/bin/sh\n{look} 2> errors\nexec {PROGRAM} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    spawn(program, "gradcheck", CHECK, "wandb_project=checks", "wandb_mode=offline")
    assert b"--results-fd" in (folder / "lines").read_bytes()
    assert (folder / "environments").read_bytes().count(b"HOME=") >= 2
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    for path in folder.rglob("*"):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path


def test_no_secret_reaches_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    program = folder / "program"
    program.write_text("#!/bin/sh\nenv > seen\n")
    program.chmod(0o755)
    assert run_program(program, []) == 0
    assert CANARY not in (folder / "seen").read_text()
    # The console script, which becomes the program.
    code = "import pathlib, tileloss._program as p; p.find = lambda: pathlib.Path('program').absolute(); p.main()"
    subprocess.run([sys.executable, "-c", code, "judge"], check=True)
    assert CANARY not in (folder / "seen").read_text()


def test_a_stop_ends_the_program_too(folder: Path) -> None:
    program = folder / "program"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *--only-read*) exit 0 ;; esac\necho $$ > started\nexec sleep 60\n'
    )
    program.chmod(0o755)
    Path("c.yaml").write_text(CHECK + "tracker: tensorboard\n")
    code = "import pathlib, tileloss._program as p; p.find = lambda: pathlib.Path('program').absolute(); p.main()"
    command = [sys.executable, "-c", code, "gradcheck", "--config=c.yaml"]
    with subprocess.Popen(command) as child:
        started = folder / "started"
        while not (started.exists() and started.read_text().endswith("\n")):
            assert child.poll() is None
            time.sleep(0.01)
        child.terminate()
    assert child.returncode == 143
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):
            os.kill(int(started.read_text()), 0)
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tracker: mlflow\n",
            "c.yaml:7: tracker: expected one of wandb, trackio, tensorboard, none",
        ),
        ("wandb_mode: on\n", "c.yaml:7: wandb_mode: expected one of online, offline, disabled"),
        ("wandb_project: [a]\n", "c.yaml:7: wandb_project: expected text"),
    ],
)
def test_what_is_wrong_is_named(
    folder: Path, text: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("gradcheck", CHECK + text) == 2
    assert message in capfd.readouterr().err


def test_none_is_no_tracker(folder: Path) -> None:
    Path("c.yaml").write_text(CHECK + "wandb_project: checks\ntracker: none\n")
    config = Config(Path("c.yaml"), [])
    assert trackers.read_settings(config).tracker == "none"
    assert config.skipped == ["tracker", "wandb_project"]
