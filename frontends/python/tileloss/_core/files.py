"""Where the compiled files of the installed package are."""

from pathlib import Path

import tileloss


def packaged_file(name: str) -> Path | None:
    """The path of "lib/libtileloss.so" or "bin/tileloss"; None where no build put it (a checkout on PYTHONPATH).

    An editable installation has two folders: the sources' and the one of the compiled files.
    """
    for folder in tileloss.__path__:
        path = Path(folder) / name
        if path.is_file():
            return path
    return None
