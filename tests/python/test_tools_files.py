"""What the tools write and print: results, outputs, tables, progress; odd files and odd names among them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tileloss.tools import progress
from tileloss.tools.case_file import read_tensors, write_tensors
from tileloss.tools.files import output_place, write_whole
from tileloss.tools.printable import did_you_mean, escaped, one_line, print_columns, shown
from tileloss.tools.progress import Progress
from tileloss.tools.results import ResultWriter, read_results


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def on_terminal(code: str, columns: int) -> str:
    """What Python code writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as child:
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 1 << 16):
                text += chunk
        except OSError:  # a terminal's end
            pass
    os.close(ours)
    assert child.returncode == 0, text
    return text.decode()


# ---------------------------------------------------------------------------------------------------------- text and tables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("logits", "logits"),
        ("a\nb\rc\td", r"a\nb\rc\td"),
        ("\0\x1b[2J\x07\x7f", r"\x00\x1b[2J\x07\x7f"),
        ("grüß 漢 😀", "grüß 漢 😀"),
        ("\x9b31m", r"\u009b31m"),  # C1: an escape sequence in one character
        ("\u202e\u2066\u2028", r"\u202e\u2066\u2028"),  # override, isolate, line separator
        (os.fsdecode(b"\xc3 \xff"), r"\xc3 \xff"),  # no UTF-8
    ],
)
def test_what_moves_the_cursor_or_turns_the_writing_is_escaped(text: str, expected: str) -> None:
    assert escaped(text) == escaped(escaped(text)) == shown(text) == expected


def test_long_text_is_shown_by_its_ends() -> None:
    assert shown("0123456789", 10) == "0123456789"
    assert shown("0123456789x", 9) == "012345...[2 characters]...89x"
    assert len(shown("\x1b" * 10**7)) < 2000
    assert one_line("a\n  b\x1b\n") == "a b\\x1b"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sede", "seed"),
        ("seqlen", "seq_len"),
        ("vocabsize", "vocab_size"),
        *((none, None) for none in ("", "steps", "x", "s" * (1 << 20))),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_nearest_known_word_is_suggested(given: str, meant: str | None) -> None:
    known = ["seed", "seq_len", "source", "vocab_size"]
    assert did_you_mean(given, known) == (f"; did you mean {meant}?" if meant else "")


TABLE = (["name", "what it is", "ms"], [["a\x1b", "some words and more", "1.25"], ["b", "", "100"]])


def test_a_table_is_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_columns(*TABLE, num_texts=2)
    assert capsys.readouterr().out.splitlines() == [
        "name   what it is           ms",
        "-----  -------------------  ----",
        "a\\x1b  some words and more  1.25",
        "b                            100",
    ]


@pytest.mark.parametrize("columns", [80, 24, 8])
def test_a_table_of_a_terminal_breaks_no_word(columns: int) -> None:
    code = f"from tileloss.tools.printable import *; print_columns(*{TABLE!r}, num_texts=2)"
    lines = re.sub(r"\x1b\[[0-9]*m", "", on_terminal(code, columns)).splitlines()
    words = " ".join(lines).split()
    for word in ("name", "a\\x1b", "some", "words", "more", "1.25", "100"):
        assert word in words
    assert (max(map(len, lines)) <= columns) is (columns > 8)  # else the terminal breaks the lines


# ----------------------------------------------------------------------------------------------------------------- progress


def test_progress_is_lines_of_json_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_steps(is_quiet: bool) -> list[str]:
        with Progress("audit", 2, quiet=is_quiet) as shown:
            shown.step("first")
            shown.at(2, 3, "oracle")
        return capsys.readouterr().err.splitlines()

    assert two_steps(False) == []  # of short work nothing is said
    monkeypatch.setattr(progress, "_PATIENCE_S", 0)
    assert two_steps(True) == []
    assert list(map(json.loads, two_steps(False))) == [
        {"progress": "audit", "done": 0, "total": 2, "now": "first"},
        {"progress": "audit", "done": 2, "total": 3, "now": "oracle"},
    ]


def test_progress_on_a_terminal_is_a_bar_that_goes_again() -> None:
    code = (
        "from tileloss.tools import progress; progress._PATIENCE_S = progress._BETWEEN_BARS_S = 0\n"
        "with progress.Progress('audit', quiet=False) as shown:\n"
        "  shown.step('[b]x\\x1b'); shown.at(3, 4, 'oracle'); shown.say('[b]said ' + 'x' * 90)\n"
    )
    text = on_terminal(code, 80)
    assert "[b]x\\x1b" in text and "3/4" in text and "oracle" in text
    assert "[b]said " + "x" * 90 in text
    assert text.rstrip().endswith("\x1b[2K")  # the line is empty
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


# ------------------------------------------------------------------------------------------------------------------ results


def test_results_are_appended_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for line in ({"a": 1}, {"b": "two\nlinés"}, {"c": [float("nan"), float("inf")], "d": "\udcff"}):
        with ResultWriter(path) as writer:
            writer.write(line)
    text = '{"a":1}\n{"b":"two\\nlinés"}\n{"c":[null,null],"d":"?"}\n'
    assert path.read_text() == text
    assert read_results(path)[1] == {"b": "two\nlinés"}
    ResultWriter(None).write({"a": 1})


@pytest.mark.parametrize("torn", ["{", '{"to', '{"tool":"', '{"tool":"sweep","case":{"a":1}'])
def test_a_torn_last_line_is_dropped(
    torn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"a":1}\n{"b":2}\n' + torn)
    assert read_results(path) == [{"a": 1}, {"b": 2}]
    capsys.readouterr()
    with ResultWriter(path) as writer:
        assert writer.earlier == [{"a": 1}, {"b": 2}]
        writer.write({"d": 4})
    assert f"torn last line of {len(torn)} bytes" in capsys.readouterr().err
    assert path.read_text() == '{"a":1}\n{"b":2}\n{"d":4}\n'


def test_a_whole_last_line_without_its_newline_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"a":1}\n{"b":2}')
    with ResultWriter(path) as writer:
        writer.write({"d": 4})
    assert capsys.readouterr().err == ""
    assert path.read_text() == '{"a":1}\n{"b":2}\n{"d":4}\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("precious data without newline", 1),
        ('{"a":1}\nnotes', 2),
        ('{"my":"settings"', 1),
        ('{"tools":', 1),
        ("[1]", 1),
        (" ", 1),
        ('{"a":1} {', 1),
        ('{"a":1}\n{}x', 2),
        ('{"a":1}\n{"b":\n{"c":3}\n', 2),
        ('{"a":1}\nnonsense\n', 2),
        ('{"a":NaN}\n', 1),
        ("\n", 1),
        ('{}\n{"a":1} x\n', 2),
        ('{"a":' + "[" * 100_000 + "\n", 1),
    ],
)
def test_a_file_of_something_else_is_left_alone(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"results file .*r.jsonl:{line}: not a JSON object"):
        ResultWriter(path)
    assert path.read_text() == text


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResultWriter(path) as first:
        with pytest.raises(OSError, match="r.jsonl: another process writes to it"):
            ResultWriter(path)
        first.write({"a": 1})
    assert path.read_text() == '{"a":1}\n'


def test_a_lock_that_a_dying_child_holds_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        child = subprocess.Popen(["sleep", "0.1"], pass_fds=[file.fileno()])
    ResultWriter(path).close()
    child.wait()


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResultWriter(path) as writer:
        writer.write({"a": 1})
        with largest_file(20), pytest.raises(OSError, match=f"File too large: '{path}'"):
            writer.write({"long": "x" * 100})
        assert path.read_text() == '{"a":1}\n'
        writer.write({"b": 2})
    assert path.read_text() == '{"a":1}\n{"b":2}\n'


def test_results_that_cannot_be_written_are_environment_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nonexistent/r.jsonl"):
        ResultWriter(Path("/nonexistent/r.jsonl"))
    with ResultWriter(Path("/dev/full")) as writer, pytest.raises(OSError, match="No space left"):
        writer.write({"a": 1})


def test_a_pipe_takes_lines_when_somebody_reads(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="a pipe that no process reads"):
        ResultWriter(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with ResultWriter(path) as writer, ResultWriter(path) as second:
        writer.write({"a": 1})
        second.write({"b": 2})
    assert os.read(reading, 100) == b'{"a":1}\n{"b":2}\n'
    os.close(reading)


# ------------------------------------------------------------------------------------------------------------------ outputs


def test_outputs_that_would_destroy_what_is_there_are_refused(tmp_path: Path) -> None:
    there, link, pipe = (tmp_path / name for name in ("there", "link", "pipe"))
    there.write_text('{"a":1}\n')
    link.symlink_to("there")
    os.mkfifo(pipe)
    for path, message in (
        (there, f"expected a file that is not read, got {there}"),
        (link, f"expected a file that is not read, got {link}"),
        (pipe, f"expected a regular file, got {pipe}, a pipe"),
        (Path("/dev/full"), "expected a regular file, got /dev/full, a device"),
        (tmp_path, f"expected a regular file, got {tmp_path}, a folder"),
        (Path("-"), "expected a file to write, got '-'"),
    ):
        with pytest.raises(ValueError) as caught:
            output_place("--out", path, [there, tmp_path / "none"])
        assert str(caught.value) == f"--out: {message}"
        if path not in (pipe, Path("/dev/full")):
            with pytest.raises(ValueError):
                ResultWriter(path, "--out", [there])
    for path in (pipe, tmp_path):
        with pytest.raises(ValueError, match=f"^{path}: expected a regular file, got a "):
            write_tensors(path, {})
    assert there.read_text() == '{"a":1}\n' and pipe.is_fifo()


def test_a_whole_file_replaces_what_a_link_leads_to(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text("old")
    real.chmod(0o640)
    for name, target in (("link", "real"), ("link_to_link", "link"), ("dangling", "new")):
        (tmp_path / name).symlink_to(target)
    write_whole(tmp_path / "link_to_link", "text")
    write_tensors(tmp_path / "dangling", {"x": np.zeros(2, np.float32)})
    assert (tmp_path / "link").is_symlink()
    assert real.read_text() == "text" and real.stat().st_mode & 0o777 == 0o640
    assert list(read_tensors(tmp_path / "new")) == ["x"]
    (tmp_path / "usual").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert len(list(tmp_path.iterdir())) == 6


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    for write in (
        lambda: write_whole(path, "x" * 100),
        lambda: write_tensors(path, {"x": np.zeros(10_000)}),
    ):
        with largest_file(20), pytest.raises(OSError, match=f"File too large: '{path}'"):
            write()
    with pytest.raises(TypeError):
        write_tensors(path, {"x": np.zeros(2, "U3")})
    with pytest.raises(FileNotFoundError, match="/none/x"):
        write_tensors(tmp_path / "none/x", {})
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
