"""The compiled program as a child: its result lines as they come."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tileloss.tools.children import end_with_parent, without_secrets

Line = dict[str, Any]


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
