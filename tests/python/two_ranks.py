"""What a program prints that torch.distributed.run runs on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def on_two_ranks(program: str, *arguments: str) -> Any:
    """The JSON of its last line; a file of this folder."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [sys.executable, *launch, str(Path(__file__).with_name(program)), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])
