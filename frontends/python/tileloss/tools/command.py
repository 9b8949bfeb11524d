"""The subcommands that need Python: their command lines, errors and exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tileloss.testing._judge import JudgeError
from tileloss.tools.printable import did_you_mean, escaped, one_line


class Subcommand(NamedTuple):
    """The module has add_arguments(parser), and run(program, options), which gives the exit code. It is imported when it is
    wanted, so that no subcommand waits for the packages of another."""

    module: str
    summary: str


SUBCOMMANDS = {
    "gradcheck": Subcommand("tileloss.tools.gradcheck", "check what Python computes"),
    "judge": Subcommand(
        "tileloss.tools.judge", "hold outputs of something else against the oracle"
    ),
    "bench": Subcommand("tileloss.tools.bench", "time what Python computes"),
    "sweep": Subcommand("tileloss.tools.sweep", "the program's, with a tracker"),
    "audit": Subcommand(
        "tileloss.tools.audit.command", "check a list of implementations on a list of cases"
    ),
    "report": Subcommand("tileloss.tools.report", "show result lines on a page"),
}
USAGE, ENVIRONMENT = 2, 3
_INTERRUPTED = 130


def run(program: Path, arguments: list[str]) -> int:
    """``program``: the compiled one. The exit codes are its own: 0 pass, 1 a check failed, 2 usage, 3 the environment."""
    name = arguments[0]
    try:
        module = importlib.import_module(SUBCOMMANDS[name].module)
        options = _parse(name, module, arguments[1:])
        code = (
            module.run(options) if name in ("gradcheck", "judge") else module.run(program, options)
        )
        sys.stdout.flush()
        return code if code >= 0 else 128 - code  # a child that a signal ended
    except BrokenPipeError:  # who read standard output has left, as `head` does
        _forget_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ImportError as error:
        extra = "jax" if (error.name or "").startswith("jax") else "check"
        return _report(f"{name}: {error}: pip install 'tileloss[{extra}]'", ENVIRONMENT)
    except JudgeError as error:
        return _report(str(error), error.code)
    except (ValueError, TypeError) as error:
        return _report(str(error), USAGE)
    except OSError as error:
        name = error.filename
        if name is None and error.errno == errno.ENOSPC:  # files are named where they are written
            _forget_output()
            name = "standard output"
        known = name is not None and error.strerror is not None
        return _report(f"{name}: {error.strerror}" if known else str(error), ENVIRONMENT)
    except (MemoryError, RuntimeError) as error:
        return _report(str(error) or "out of memory", ENVIRONMENT)


def _parse(name: str, module: Any, arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"tileloss {name}", description=module.__doc__, allow_abbrev=False
    )
    module.add_arguments(parser)
    _refuse_unknown_flags(parser, arguments)
    return parser.parse_args(arguments)


def _refuse_unknown_flags(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Before argparse, which would say instead what is missing."""
    known = [each for each in parser._option_string_actions if each.startswith("--")]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for word in arguments[:end]:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            parser.error(f"unknown flag {escaped(flag)}{did_you_mean(flag, known)}")


def _forget_output() -> None:
    """Python would try once more to write it, at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # it is no file


def _report(message: str, code: int) -> int:
    print(f"tileloss: {one_line(message)}", file=sys.stderr)
    return code
