"""The console script `tileloss`."""

import io
import os
import signal
import sys
from typing import NoReturn

from tileloss.tools import command


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, command.stop)
    _open_standard_streams()
    sys.exit(command.run(sys.argv[1:]))


class _Stderr(io.TextIOWrapper):
    """What cannot be said there changes no exit code."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            pass


def _open_standard_streams() -> None:
    """A closed one's number would go to the next file that is opened, and text for a terminal into that: a results file, perhaps.
    What is written to a closed standard output is lost, and said as of a full disk."""
    places = ((os.devnull, os.O_RDONLY), ("/dev/full", os.O_WRONLY), (os.devnull, os.O_WRONLY))
    for number, (path, flags) in enumerate(places):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(path, flags), True)  # the lowest number that is free
    sys.stdin = sys.stdin or open(0)
    sys.stdout = sys.stdout or open(1, "w")
    errors = sys.stderr.buffer if sys.stderr else open(2, "wb")
    sys.stderr = _Stderr(errors, errors="backslashreplace", line_buffering=True)
