"""The console script `tileloss`: the compiled program in this process's place, and what needs Python, here."""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from tileloss import library_path
from tileloss._core.files import packaged_file
from tileloss.tools.config import needs_package
from tileloss.tools.program import without_secrets

# Of subcommands that the compiled program has, the flags that it lacks; and the subcommands that it lacks.
_FLAGS = {"bench": {"--frontend"}}
_PYTHON = {"audit", "gradcheck", "judge", "report"}
_WITH_CONFIG = {"sweep"}  # it may have keys that the compiled program lacks

_TERMINATED = 143


def main() -> NoReturn:
    """Becomes the program: same arguments, terminal, signals and exit code. What it lacks stays here."""
    arguments = sys.argv[1:]
    program = find()
    if program is None:
        print(
            "tileloss: the compiled program is not in this package. `pip install .` in a checkout builds it in; "
            "`./dev build` there makes build/release/tileloss.",
            file=sys.stderr,
        )
        sys.exit(3)
    if _needs_python(arguments):
        from tileloss.tools.command import run

        # As Ctrl-C does, so that children end and temporary files go.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
        sys.exit(run(program, arguments))
    os.execve(program, [str(program), *arguments], without_secrets())


def _needs_python(arguments: list[str]) -> bool:
    if not arguments:
        return False
    if arguments[0] in _PYTHON:
        return True
    flags = _FLAGS.get(arguments[0], set())
    if any(argument.partition("=")[0] in flags for argument in arguments):
        return True
    return arguments[0] in _WITH_CONFIG and needs_package(arguments)


def find() -> Path | None:
    """The package's own; of a checkout's package the one beside the library that TILELOSS_LIBRARY names."""
    beside = library_path().with_name("tileloss")
    return packaged_file("bin/tileloss") or (beside if beside.is_file() else None)
