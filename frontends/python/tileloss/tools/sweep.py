"""`tileloss sweep` with a tracker: each case goes there as soon as it is in the results file."""

from __future__ import annotations

import argparse
from pathlib import Path

from tileloss.tools import arguments, trackers
from tileloss.tools.config import Config
from tileloss.tools.program import run_program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.config(parser, "threads=[1,2]")


def run(program: Path, options: argparse.Namespace) -> int:
    """The exit code: the program's."""
    config = Config(options.config, options.set)
    settings = trackers.read_settings(config)
    return trackers.run(
        settings, lambda log: run_program(program, ["sweep", *config.arguments()], log)
    )
