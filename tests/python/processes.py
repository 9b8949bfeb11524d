"""Programs of the tools in processes of their own: what they have started, and that it is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def spawn(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tileloss", *arguments]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | environment, **both)


def children_of(process: int) -> list[int]:
    """Those that its first thread has started; none where it is gone."""
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(each) for each in found.split()]


def is_gone(process: int) -> bool:
    """A zombie that nobody has reaped is."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(happens: Callable[[], Any], during: subprocess.Popen[str] | None = None) -> Any:
    """What it gives once that is something; ``during``: a process that must not end before."""
    end = time.monotonic() + 300
    while not (found := happens()):
        assert during is None or during.poll() is None
        assert time.monotonic() < end, "it did not happen within five minutes"
        time.sleep(0.01)
    return found
