"""Arguments that several subcommands have, and values of arguments."""

from __future__ import annotations

import argparse
from pathlib import Path


def repeatable(parser: argparse.ArgumentParser, flag: str, metavar: str, summary: str) -> None:
    summary += " (repeatable)"
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=summary)


def config(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("--config", required=True, type=Path, help="YAML file")
    repeatable(parser, "--set", "KEY=VALUE", f"override a key: {example}")


def implementation(parser: argparse.ArgumentParser) -> None:
    summary = "of tileloss.jax; default: its own choice"
    parser.add_argument("--implementation", metavar="NAME", help=summary)


def quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def output(parser: argparse.ArgumentParser, summary: str) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help=summary)


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
