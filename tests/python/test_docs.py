"""The Python of the documents runs: the README's example, and every python block of docs/."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, block in enumerate(BLOCK.findall(document.read_text()))
]


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path) -> None:
    run(block, tmp_path)


@pytest.mark.parametrize("example", ["train_pytorch.py", "train_jax.py"])
def test_the_readmes_examples_are_the_files_and_learn(example: str, tmp_path: Path) -> None:
    code = (ROOT / "examples" / example).read_text()
    assert code in BLOCK.findall((ROOT / "README.md").read_text())
    printed = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", run(code, tmp_path))
    assert printed is not None
    first, last = map(float, printed.groups())
    assert 6 < first < 7  # log 500 = 6.2
    assert last < 1


def test_flax_learns_the_same_with_optax_and_with_tileloss(tmp_path: Path) -> None:
    code = (ROOT / "examples" / "jax" / "train_flax.py").read_text()
    curve = r"loss ([\d.]+) -> ([\d.]+)\n"
    printed = re.fullmatch(
        f"optax: {curve}tileloss: {curve}largest difference (.*)\n", run(code, tmp_path)
    )
    assert printed is not None
    first, last, _, our_last, difference = map(float, printed.groups())
    assert 7 < first < 9  # log 3000 = 8.0
    assert last < 0.1 and our_last < 0.1
    assert difference < 1e-3
