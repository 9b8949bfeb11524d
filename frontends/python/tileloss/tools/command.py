"""The subcommands: their command lines, errors and exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from tileloss.tools.printable import did_you_mean, one_line, shown

# What each is for. Its module, of this package, has add_arguments(parser), and run(options), which gives the exit code. It is
# imported when it is wanted, so that no subcommand waits for the packages of another.
SUBCOMMANDS = {
    "gradcheck": "check a loss and its gradient against the oracle",
    "judge": "hold what something else computed against it",
    "bench": "time a loss, and the machine's roofs beside it",
    "sweep": "time every combination of options and shapes",
    "info": "what was built, what this machine is and can do",
    "audit": "check a list of implementations on a list of cases",
    "report": "show result lines on a page",
}
_MODULES = {"audit": "audit.command"}  # whose name is not the subcommand's
USAGE, ENVIRONMENT = 2, 3
_LONGEST_MESSAGE = 1500
_HELP = """\
TileLoss: tiled cross-entropy, log-probabilities and policy losses over large vocabularies, checked and measured.

Usage: tileloss COMMAND ...
       tileloss --help, --version

Commands:
{commands}

tileloss COMMAND --help says more.
Exit codes: 0 pass, 1 a check failed, 2 usage or config error, 3 memory, device or file system.
"""


class Stopped(SystemExit):
    """By SIGINT or SIGTERM: it ends children and removes temporary files on its way. No KeyboardInterrupt, since after one in an
    exec of text, which imports are full of, Python ends itself by SIGINT, whoever caught it."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(128 + by)
        self.by = by


_stops: list[Stopped] = []


def run(arguments: list[str]) -> int:
    """The exit code: 0 pass, 1 a check failed, 2 usage, config or input file, 3 memory, device or file system; 128 and the
    signal that stopped it."""
    try:
        code = _dispatch_until_stopped(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who read standard output has left, as `head` does
        _forget_output()
        return 128 + signal.SIGPIPE
    except Stopped as stop:
        return _report(f"stopped by {stop.by.name}", 128 + stop.by)
    except ImportError as error:
        extra = "jax" if (error.name or "").startswith("jax") else "check"
        message = f"{arguments[0]}: {error}: pip install 'tileloss[{extra}]'"
        return _report(message, ENVIRONMENT)
    except (ValueError, TypeError) as error:
        return _report(str(error), USAGE)
    except OSError as error:
        name = error.filename
        if name is None and error.errno == errno.ENOSPC:  # files are named where they are written
            _forget_output()
            name = "standard output"
        known = name is not None and error.strerror is not None
        return _report(
            f"{shown(str(name))}: {error.strerror}" if known else str(error), ENVIRONMENT
        )
    except (MemoryError, RuntimeError) as error:
        return _report(str(error) or "out of memory", ENVIRONMENT)
    except Exception as error:
        from tileloss.testing._judge import JudgeError

        if isinstance(error, JudgeError):
            return _report(str(error), error.code)
        traceback.print_exc()  # ours: no check has failed
        return ENVIRONMENT


def stop(number: int, _: object) -> NoReturn:
    """For SIGINT and SIGTERM."""
    _stops.append(Stopped(signal.Signals(number)))
    raise _stops[-1]


def _dispatch_until_stopped(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except Exception:  # an extension's import makes an ImportError of a stop in its midst
        if _stops:
            raise _stops[-1] from None
        raise


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        names = [f"  {name:<10} {summary}" for name, summary in SUBCOMMANDS.items()]
        print(_HELP.format(commands="\n".join(names)), end="")
        return 0 if arguments else USAGE
    name = arguments[0]
    if name == "--version":
        from tileloss import __version__

        print(__version__)
        return 0
    if name.startswith("-"):
        flag = name.partition("=")[0]
        meant = did_you_mean(flag, ["--help", "--version"])
        raise ValueError(f"unknown flag {shown(flag)}{meant}")
    if name not in SUBCOMMANDS:
        raise ValueError(f"unknown command {shown(name)}{did_you_mean(name, SUBCOMMANDS)}")
    module: Any = importlib.import_module(f"tileloss.tools.{_MODULES.get(name, name)}")
    parser = _Parser(prog=f"tileloss {name}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    try:
        options = parser.parse_args(arguments[1:])
    except Stopped:
        raise
    except SystemExit:  # it has printed its help
        return 0
    return int(module.run(options))


class _Parser(argparse.ArgumentParser):
    """Errors are one line that says what was expected and what was given."""

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        """An unknown flag first: argparse would say instead what is missing."""
        known = [each for each in self._option_string_actions if each.startswith("--")]
        end = arguments.index("--") if "--" in arguments else len(arguments)
        for word in arguments[:end]:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                self.error(f"unknown flag {shown(flag)}{did_you_mean(flag, known)}")
        return super().parse_args(arguments, namespace)

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            message = f"{missing} is required"
        raise ValueError(message.removeprefix("argument "))

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse would keep to itself that nobody can read its help."""
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            wish = f"expected one of {', '.join(map(str, action.choices))}"
            raise argparse.ArgumentError(action, f"{wish}, got '{shown(str(value))}'")


def _forget_output() -> None:
    """Python would try once more to write it, at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # it is no file


def _report(message: str, code: int) -> int:
    print(f"tileloss: {shown(one_line(message), _LONGEST_MESSAGE)}", file=sys.stderr)
    return code
