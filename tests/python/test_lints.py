"""ruff and mypy, with their settings in pyproject.toml, over the repository's Python."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def findings(*command: str, cwd: Path = ROOT) -> str:
    """What a lint prints when it finds something, else ""."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--output-format=concise"),
        ("ruff", "format", "--check", "--output-format=concise"),
        pytest.param(("mypy",), marks=pytest.mark.full),  # minutes where nothing is cached
    ],
    ids=" ".join,
)
def test_nothing_to_find(command: tuple[str, ...]) -> None:
    if found := findings(*command):
        pytest.fail(found, pytrace=False)


def test_each_lint_finds_what_is_planted(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    package = tmp_path / "frontends" / "python" / "tileloss"
    package.mkdir(parents=True)
    (package / "planted.py").write_text("import os\n\ndef f(x):\n    return x\n")
    schema = tmp_path / "src" / "schema"
    schema.mkdir(parents=True)
    (schema / "clean.py").touch()
    assert "F401" in findings("ruff", "check", cwd=tmp_path)
    assert "planted.py" in findings("ruff", "format", "--check", cwd=tmp_path)
    assert "no-untyped-def" in findings("mypy", cwd=tmp_path)
