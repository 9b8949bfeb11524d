"""Arguments that several subcommands have, and values of arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from tileloss.tools.printable import shown


def repeatable(parser: argparse.ArgumentParser, flag: str, metavar: str, summary: str) -> None:
    summary += " (repeatable)"
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=summary)


def config(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("--config", required=True, type=Path, help="YAML file")
    repeatable(parser, "--set", "KEY=VALUE", f"override a key: {example}")


def implementation(parser: argparse.ArgumentParser) -> None:
    summary = "of tileloss.jax; default: its own choice"
    parser.add_argument("--implementation", metavar="NAME", help=summary)


def mutants(parser: argparse.ArgumentParser) -> None:
    summary = "plant every applicable mutant in the outputs; each must be caught"
    parser.add_argument("--mutants", action="store_true", help=summary)


def quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def output(parser: argparse.ArgumentParser, summary: str) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help=summary)


def integer(minimum: int, maximum: int) -> Callable[[str], int]:
    """The type of an argument: a decimal number of that range."""

    def read(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,19}", text) or not minimum <= int(text) <= maximum:
            wish = f"expected an integer from {minimum} to {maximum}"
            raise argparse.ArgumentTypeError(f"{wish}, got '{shown(text)}'")
        return int(text)

    return read


count = integer(1, 10**6)  # of calls
