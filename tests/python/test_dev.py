"""What ./dev refuses, tried on a copy in an empty folder: what a faulty one would build, rewrite or remove is not there."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("build debug", "dev: build takes no arguments, got 'debug'\n"),
        ("build extra args", "dev: build takes no arguments, got 'extra args'\n"),
        ("demo x", "dev: demo takes no arguments, got 'x'\n"),
        ("kit x", "dev: kit takes no arguments, got 'x'\n"),
        ("package x", "dev: package takes no arguments, got 'x'\n"),
        ("format src", "dev: format takes no arguments, got 'src'\n"),
        ("clean x", "dev: clean takes no arguments, got 'x'\n"),
        ("help build", "dev: help takes no arguments, got 'build'\n"),
        ("test all", "or nothing, not 'all'\n"),
        ("test full x", "dev: test full takes no arguments, got 'x'\n"),
        ("test both -R x", "or nothing, not 'both -R x'\n"),
        ("sanitize msan", "dev: sanitize takes asan-ubsan, tsan or both, not 'msan'\n"),
        ("paint", "dev: no command 'paint'\n"),
    ],
)
def test_commands_refuse_arguments_that_they_do_not_take(
    tmp_path: Path, arguments: str, message: str
) -> None:
    dev = shutil.copy(ROOT / "dev", tmp_path)
    run = subprocess.run([dev, *arguments.split()], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert message in run.stderr
