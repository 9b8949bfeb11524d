"""The command lines of `tileloss gradcheck` and `tileloss bench` with --frontend, their errors and exit codes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tileloss.check import bench, gradcheck

_SUBCOMMANDS = {"gradcheck": gradcheck, "bench": bench}
_USAGE, _ENVIRONMENT, _INTERRUPTED = 2, 3, 130


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tileloss", allow_abbrev=False)
    subcommands = parser.add_subparsers(dest="command", required=True)
    for name, module in _SUBCOMMANDS.items():
        one = subcommands.add_parser(name, description=module.__doc__, allow_abbrev=False)
        one.add_argument("--frontend", required=True, choices=["jax"], help="who computes")
        one.add_argument(
            "--implementation", metavar="NAME", help="of tileloss.jax; default: its own choice"
        )
        module.add_arguments(one)
    return parser.parse_args(arguments)


def run(program: Path, arguments: list[str]) -> int:
    """``program``: the compiled one. The exit codes are its own: 0 pass, 1 a check failed, 2 usage, 3 the environment."""
    options = parse(arguments)
    try:
        code = _SUBCOMMANDS[options.command].run(program, options)
        return code if code >= 0 else 128 - code  # a child that a signal ended
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ImportError as error:
        return _report(f"--frontend jax: {error}", _ENVIRONMENT)
    except (ValueError, TypeError) as error:
        return _report(str(error), _USAGE)
    except (MemoryError, OSError, RuntimeError) as error:
        return _report(str(error) or "out of memory", _ENVIRONMENT)


def _report(message: str, code: int) -> int:
    print(f"tileloss: {message}", file=sys.stderr)
    return code
