"""Programs in processes of their own, forked from one that has imported what most of them do."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "transformers", "trl"])


def run(program: str | Path, folder: Path) -> str:
    """What it prints: Python code, or a file of it, in ``folder``."""
    process = _FORKS.Process(target=_execute, args=(program, folder))
    process.start()
    process.join(1200)
    assert process.exitcode == 0, (folder / "stderr").read_text()
    return (folder / "stdout").read_text()


def _execute(program: str | Path, folder: Path) -> None:
    os.chdir(folder)
    with open("stdout", "wb") as out, open("stderr", "wb") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    if isinstance(program, Path):
        sys.argv = [str(program)]
        runpy.run_path(str(program), run_name="__main__")
    else:
        exec(compile(program, "block", "exec"), {"__name__": "__main__"})
