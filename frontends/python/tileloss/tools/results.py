"""Result files, one JSON object a line, as the compiled program writes and reads them."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from tileloss.tools.files import naming, output_place

_START = b'{"tool":'  # of every line of ours, and so of a torn one


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines of a file. A torn last one (its writer was killed) is left out with a warning on stderr.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no JSON object; names file and line.
    """
    text = path.read_bytes()
    *whole, last = text.split(b"\n")
    lines = [_parse(line, f"{path}:{number}") for number, line in enumerate(whole, 1)]
    if not last:
        return lines
    try:
        return [*lines, _parse(last, f"{path}:{len(whole) + 1}")]
    except ValueError:
        common = min(len(last), len(_START))
        if last[:common] != _START[:common]:
            raise
    print(
        f"tileloss: warning: {path}: left out a torn last line of {len(last)} bytes",
        file=sys.stderr,
    )
    return lines


class ResultWriter:
    """Appends lines to a file that no other process writes to meanwhile; without a path, lines have no place.

    Raises:
        OSError: the file cannot be opened, or another process writes to it.
        ValueError: what is there already is no file of results; names ``argument`` where it is no regular file.
    """

    def __init__(self, path: Path | None, argument: str = "--output") -> None:
        self._file = None
        if path is None:
            return
        self._file = output_place(argument, path).open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise OSError(f"results file {path}: another process writes to it") from None
        if path.is_file() and path.stat().st_size:
            self._mend(path)

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Returns once the line is on the disk. One that cannot be written whole is taken back."""
        if self._file is None:
            return
        data = json.dumps(_finite(line), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        try:
            with naming(Path(self._file.name)):
                if self._file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, "")
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(before)
            raise

    def _mend(self, path: Path) -> None:
        """Drops a torn last line, or adds the newline that a whole one lacks."""
        assert self._file is not None
        count = len(read_results(path))
        text = path.read_bytes()
        if text.endswith(b"\n"):
            return
        if count == text.count(b"\n") + 1:
            self._file.write(b"\n")
        else:
            self._file.truncate(text.rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null, as the compiled program writes."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"results file {where}: not a JSON object")
    return value
