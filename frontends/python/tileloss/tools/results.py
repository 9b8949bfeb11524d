"""Result files, one JSON object a line: the one writer and the one reader of all tools."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from tileloss.tools.files import naming, output_place
from tileloss.tools.printable import shown

Line = dict[str, Any]

_START = b'{"tool":"'  # of every line of ours, and so of a torn one
# A writer that was killed leaves its lock to a child, which then dies: some milliseconds.
_TRIES, _BETWEEN_TRIES_S = 25, 0.02


def read_results(path: Path) -> list[Line]:
    """The lines of a file. A torn last one (its writer was killed) is left out with a warning on stderr.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no JSON object; names file and line.
    """
    return _lines(path, path.read_bytes())[0]


class ResultWriter:
    """Appends lines to a file that no other process writes to meanwhile; without a path, lines have no place. A torn last line
    that is there is dropped. Any number of processes may write to a pipe or a device.

    Raises:
        OSError: the file cannot be opened, another process writes to it, or it is a pipe that nobody reads.
        ValueError: what is there already is no file of results; names ``argument`` where it is a folder or one of ``inputs``.
    """

    def __init__(
        self, path: Path | None, argument: str = "--output", inputs: Iterable[Path] = ()
    ) -> None:
        self._file: int | None = None
        self.earlier: list[Line] = []  # what was there before
        if path is None:
            return
        self._path, self._name = path, shown(str(path))
        output_place(argument, path, inputs, only_files=False)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with naming(path):
            try:
                self._file = os.open(path, flags | os.O_NONBLOCK, 0o666)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                raise OSError(error.errno, "a pipe that no process reads") from None
        os.set_blocking(self._file, True)
        self._is_regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        if self._is_regular:
            try:
                self._lock()
                self._mend()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write(self, line: Line) -> None:
        """Returns once the line is on the disk. One that cannot be written whole is taken back."""
        if self._file is None:
            return
        text = json.dumps(_finite(line), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        before = os.fstat(self._file).st_size
        try:
            with naming(self._path):
                self._append(text.encode(errors="replace") + b"\n")
        except BaseException:
            if self._is_regular:
                os.ftruncate(self._file, before)
            raise

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        while data:
            data = data[os.write(self._file, data) :]
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of pipes and devices
                raise

    def _lock(self) -> None:
        assert self._file is not None
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_BETWEEN_TRIES_S)
        raise OSError(f"results file {self._name}: another process writes to it")

    def _mend(self) -> None:
        """Drops a torn last line, or adds the newline that a whole one lacks."""
        assert self._file is not None
        text = self._path.read_bytes()
        self.earlier, torn = _lines(self._path, text)
        if torn:
            os.ftruncate(self._file, len(text) - torn)
        elif text and not text.endswith(b"\n"):
            self._append(b"\n")


def _lines(path: Path, text: bytes) -> tuple[list[Line], int]:
    """And how many bytes a torn last line has, which is left out."""
    name = shown(str(path))
    *whole, last = text.split(b"\n")
    lines = [_parse(line, f"{name}:{number}") for number, line in enumerate(whole, 1)]
    if not last:
        return lines, 0
    try:
        return [*lines, _parse(last, f"{name}:{len(whole) + 1}")], 0
    except ValueError:
        common = min(len(last), len(_START))
        if last[:common] != _START[:common]:
            raise
    warning = f"left out a torn last line of {len(last)} bytes"
    print(f"tileloss: warning: {name}: {warning}", file=sys.stderr)
    return lines, len(last)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null, as the judge has them."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: bytes, where: str) -> Line:
    try:
        value = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"results file {where}: not a JSON object")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
