"""`tileloss sweep` with a tracker: each case goes there as soon as it is in the results file."""

from __future__ import annotations

import argparse
from pathlib import Path

from tileloss.check import trackers
from tileloss.check.config import Config
from tileloss.check.program import run_program

_ERROR = 3  # what a tracker is told where no exit code came about


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="YAML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key: threads=[1,2] (repeatable)",
    )


def run(program: Path, options: argparse.Namespace) -> int:
    """The exit code: the program's."""
    config = Config(options.config, options.set)
    settings = trackers.read_settings(config)
    tracker, code = trackers.start(settings), _ERROR
    try:
        code = run_program(program, ["sweep", *config.arguments()], tracker.log)
    finally:
        tracker.finish(code)
    return code
