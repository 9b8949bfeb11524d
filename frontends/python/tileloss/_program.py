"""The console script `tileloss`: the compiled program out of this package, in this process's place."""

import os
import sys
from typing import NoReturn

from tileloss._core.files import packaged_file


def main() -> NoReturn:
    """Becomes the program: same arguments, terminal, signals and exit code."""
    program = packaged_file("bin/tileloss")
    if program is None:
        sys.exit(
            "tileloss: the compiled program is not in this package. `pip install .` in a checkout builds it in; "
            "`./dev build` there makes build/release/tileloss."
        )
    os.execv(program, [str(program), *sys.argv[1:]])
