"""The console script `tileloss`: the compiled program in this process's place, and what needs Python, here."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from tileloss import library_path
from tileloss._core.files import packaged_file

_WITH_FRONTENDS = ("gradcheck", "bench")


def main() -> NoReturn:
    """Becomes the program: same arguments, terminal, signals and exit code; `gradcheck` and `bench` with --frontend stay here."""
    arguments = sys.argv[1:]
    program = _find()
    if program is None:
        print(
            "tileloss: the compiled program is not in this package. `pip install .` in a checkout builds it in; "
            "`./dev build` there makes build/release/tileloss.",
            file=sys.stderr,
        )
        sys.exit(3)
    has_frontend = any(argument.partition("=")[0] == "--frontend" for argument in arguments)
    if has_frontend and arguments[0] in _WITH_FRONTENDS:
        from tileloss.check.command import run

        sys.exit(run(program, arguments))
    os.execv(program, [str(program), *arguments])


def _find() -> Path | None:
    """The package's own; of a checkout's package the one beside the library that TILELOSS_LIBRARY names."""
    beside = library_path().with_name("tileloss")
    return packaged_file("bin/tileloss") or (beside if beside.is_file() else None)
