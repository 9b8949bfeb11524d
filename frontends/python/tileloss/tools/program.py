"""The compiled program as a child: its result lines as they come, and an environment without secrets."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

Line = dict[str, Any]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """In a child: a signal that reaches its parent before it knows of the child ends both."""
    _libc.prctl(_PR_SET_PDEATHSIG, by)


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For children, none of which needs one."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def run_program(
    program: Path,
    arguments: list[str],
    on_line: Callable[[Line], None] | None = None,
    *,
    is_silent: bool = False,
) -> int:
    """Its exit code; the negative number of the signal that ended it.

    ``on_line`` gets each result line as soon as it is on the disk: of gradcheck, judge and sweep. ``is_silent`` keeps standard
    output back.
    """
    output = subprocess.DEVNULL if is_silent else None
    if on_line is None:
        command = [str(program), *arguments]
        return subprocess.run(command, env=without_secrets(), stdout=output, check=False).returncode
    reading, writing = os.pipe()
    try:
        command = [str(program), *arguments, f"--results-fd={writing}"]
        child = subprocess.Popen(
            command,
            env=without_secrets(),
            stdout=output,
            pass_fds=(writing,),
            preexec_fn=end_with_parent,
        )
    finally:
        os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as lines, child:
        try:
            for line in lines:
                on_line(json.loads(line))
        except BaseException:
            child.terminate()
            raise
    return child.returncode
