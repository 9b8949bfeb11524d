"""The command from outside: help, usage errors, exit codes, standard streams, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tileloss
from processes import children_of, is_gone, spawn, wait_for
from tileloss.testing._judge import JudgeError
from tileloss.tools import command

COMMAND = [sys.executable, "-m", "tileloss"]
SMALL = "loss: cross_entropy\nbatch_size: 1\nseq_len: 4\nvocab_size: 64\ndtype: fp32\n"


AUDITS = [["audit", "--list"]]
AUDITS += [["audit", "--quiet", "--json", "--impl=tileloss", "--case=ce/fp32"]]


def ran(*arguments: str, redirect: str = "", prefix: str = "") -> Any:
    """As a shell runs it; redirect: as ">/dev/full"."""
    shell = f'{prefix} exec "$@" {redirect}'
    words = ["/bin/sh", "-c", shell, "sh", *COMMAND, *arguments]
    return subprocess.run(words, capture_output=True, text=True, errors="surrogateescape")


def is_one_line(text: str) -> bool:
    return text.startswith("tileloss: ") and text.endswith("\n") and text[:-1].isprintable()


def test_help_lists_the_subcommands_and_exit_codes() -> None:
    asked, bare = ran("--help"), ran()
    assert (asked.returncode, bare.returncode) == (0, 2)
    assert asked.stdout == bare.stdout and asked.stderr == bare.stderr == ""
    for name, summary in command.SUBCOMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", asked.stdout, re.M)
    assert "Exit codes: 0 pass, 1 a check failed, 2 usage" in asked.stdout
    assert "package" not in asked.stdout.lower()


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_every_subcommand_has_help(name: str) -> None:
    done = ran(name, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "usage:" in done.stdout.lower()


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_little(flag: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tileloss", flag], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert flag == "--help" or done.stdout == f"{tileloss.__version__}\n"
    imported = re.findall(r"\| +([\w.]+)$", done.stderr, re.M)
    assert "tileloss.tools.command" in imported
    slow = {"numpy", "yaml", "rich", "torch", "jax", "matplotlib", "safetensors", "ml_dtypes"}
    assert not slow & {name.partition(".")[0] for name in imported}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sing"], "unknown command sing"),
        (["gradchek"], "unknown command gradchek; did you mean gradcheck?"),
        (["--verison"], "unknown flag --verison; did you mean --version?"),
        (["gradcheck", "--confg", "x"], "unknown flag --confg; did you mean --config?"),
        (["audit", "--ouput=3"], "unknown flag --ouput; did you mean --output?"),
        (["audit", "--entirely-else"], "unknown flag --entirely-else"),
        (["gradcheck"], "--config is required"),
        (["audit", "--output"], "--output: expected one argument"),
        (["gradcheck", "--config=x", "--frontend=x"], "--frontend: expected one of jax, got 'x'"),
        (["gradcheck", "--config=x", "word"], "unrecognized arguments: word"),
        (["\x1b" + "x" * 100_000], "unknown command \\x1bxxx"),
        (["audit", "--\x1b" + "x" * 100_000], "unknown flag --\\x1bxxx"),
        (["gradcheck", "--config=x", "\x1b" + "x" * 100_000], "unrecognized arguments: \\x1bxxx"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_usage_is_one_line_with_what_was_expected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and is_one_line(err) and len(err) < 2000
    assert err.startswith(f"tileloss: {message}")


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (ValueError("c.yaml:1: a\n  b"), 2, "tileloss: c.yaml:1: a b\n"),
        (JudgeError("x.safetensors: no", 2), 2, "tileloss: x.safetensors: no\n"),
        (JudgeError("needs 1 GB", 3, True), 3, "tileloss: needs 1 GB\n"),
        (FileNotFoundError(2, "No such file", "a\x1b"), 3, "tileloss: a\\x1b: No such file\n"),
        (OSError("r.jsonl: another process"), 3, "tileloss: r.jsonl: another process\n"),
        (MemoryError(), 3, "tileloss: out of memory\n"),
        (ModuleNotFoundError("No module named 'jaxlib'", name="jaxlib"), 3, "'tileloss[jax]'\n"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), 3, "'tileloss[check]'\n"),
        (KeyError("a bug"), 3, "KeyError: 'a bug'\n"),
        (command.Stopped(signal.SIGINT), 130, "tileloss: stopped by SIGINT\n"),
        (command.Stopped(signal.SIGTERM), 143, "tileloss: stopped by SIGTERM\n"),
        (BrokenPipeError(), 141, ""),
    ],
    ids=repr,
)
def test_exit_codes(
    raised: Any,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(options: Any) -> int:
        if isinstance(raised, BaseException):
            raise raised
        return int(raised)

    module = SimpleNamespace(__doc__="A fake.", add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "tileloss.tools.fake", module)
    monkeypatch.setitem(command.SUBCOMMANDS, "fake", "")
    assert command.run(["fake"]) == code
    err = capsys.readouterr().err
    assert err.endswith(message) and bool(err) == bool(message)


def test_a_stop_that_an_import_makes_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: Any) -> int:
        try:
            command.stop(signal.SIGINT, None)
        except BaseException as error:
            raise ImportError("numpy") from error

    monkeypatch.setattr(command, "_stops", [])
    monkeypatch.setattr(command, "_dispatch", run)
    assert command.run([]) == 130


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(SMALL + "output: r.jsonl\n")
    return tmp_path / "c.yaml"


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-"])
@pytest.mark.parametrize("arguments", [["--help"], ["audit", "--help"], *AUDITS], ids=" ".join)
def test_a_standard_output_that_takes_nothing_exits_with_three(
    arguments: list[str], redirect: str
) -> None:
    done = ran(*arguments, redirect=redirect)
    assert done.returncode == 3
    assert done.stderr == "tileloss: standard output: No space left on device\n"


@pytest.mark.parametrize("redirect", ["2>&-", "2>&- <&-", "<&-", "2>/dev/full"])
def test_a_standard_error_that_takes_nothing_changes_no_exit_code(
    redirect: str, config: Path
) -> None:
    results = config.with_name("r.jsonl")
    results.write_text('{"tool":"torn')  # there is a warning to be said, too
    done = ran("gradcheck", "--config=c.yaml", redirect=redirect)
    assert done.returncode == 0 and done.stdout.endswith("PASS\n")
    # A results file with the number of the closed stream would take what is meant for the terminal.
    (line,) = results.read_text().splitlines()
    assert line.startswith('{"tool":"gradcheck"')
    assert ran("gradcheck", "--config=/nonexistent", redirect=redirect).returncode == 3
    assert ran("gradchek", redirect=redirect).returncode == 2


@pytest.mark.parametrize("arguments", AUDITS, ids=" ".join)
def test_who_reads_the_output_may_leave(arguments: list[str]) -> None:
    child = spawn(*arguments)
    child.stdout.close()
    assert child.stderr.read() == "" and child.wait() == 141


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--config=/nonexistent/\x1b" + "x" * 3000], 3, "/nonexistent/\\x1bxxx"),
        (["--config=c.yaml", '--set="\x1b"=1'], 2, "\\x1b"),
        (["--config=c.yaml", "--set=seed=" + "x" * 100_000], 2, "seed: expected an integer"),
        (["--config=c.yaml", f"--set={'x' * 100_000}=1"], 2, "unknown key"),
        (["--config=c.yaml", "--set=kernel.vocab_block=65"], 2,
         "--set kernel.vocab_block=65: kernel.vocab_block: expected a multiple of 64"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_odd_names_reach_the_terminal_escaped_and_short(
    arguments: list[str], code: int, message: str, config: Path
) -> None:
    done = ran("gradcheck", *arguments)
    assert done.returncode == code
    assert message in done.stderr and is_one_line(done.stderr) and len(done.stderr) < 2000


def test_a_config_with_an_odd_name_is_checked(config: Path) -> None:
    config.rename(config.with_name("c\x1b.yaml"))
    done = ran("gradcheck", "--config=c\x1b.yaml")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert "c\\x1b.yaml: cross_entropy" in done.stdout


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("has_writer", [False, True])
def test_a_signal_ends_the_wait_for_a_config_that_nobody_writes(
    has_writer: bool, by: signal.Signals, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = os.open(pipe, os.O_RDWR) if has_writer else None
    with started("gradcheck", f"--config={pipe}") as child:
        time.sleep(0.5)
        child.send_signal(by)
        _, err = child.communicate()
    assert child.returncode == 128 + by
    assert err == f"tileloss: stopped by {by.name}\n"
    if writing is not None:
        os.close(writing)


def test_a_config_that_is_written_late_and_in_pieces_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with started("gradcheck", f"--config={pipe}") as child:
        writing = os.open(pipe, os.O_WRONLY)
        for piece in ("loss: cross_en", "tropy\nsede: 1\n", "b: ["):
            os.write(writing, piece.encode())
            time.sleep(0.05)
        os.close(writing)
        _, err = child.communicate()
    assert child.returncode == 2 and err.startswith(f"tileloss: {pipe}:3: not YAML: ")


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_earlier_results_and_no_child(by: signal.Signals, config: Path) -> None:
    results = config.with_name("r.jsonl")
    results.write_text('{"earlier":1}\n')
    with started("gradcheck", "--config=c.yaml", "--set=seq_len=20000", "--set=vocab_size=20000") as child:  # fmt: skip
        wait_for(lambda: children_of(child.pid), child)
        time.sleep(0.5)
        children = children_of(child.pid)
        child.send_signal(by)
        child.communicate()
    assert child.returncode == 128 + by
    assert results.read_text() == '{"earlier":1}\n'
    wait_for(lambda: all(map(is_gone, children)))


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Once it handles signals."""
    child = spawn(*arguments)
    try:
        wait_for(lambda: caught(child) >> (signal.SIGTERM - 1) & 1, child)
        yield child
    finally:
        child.kill()
        child.communicate()


def caught(child: subprocess.Popen[str]) -> int:
    status = Path(f"/proc/{child.pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16)
