"""Files that the commands write: where one may go, and a whole one that replaces what is there only when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def output_place(argument: str, path: Path, inputs: Iterable[Path] = ()) -> Path:
    """Where an output is to be written: the path, or what a link there leads to.

    Raises ValueError, naming ``argument``, where it is "-", one of the files that are read, under whatever name, or something
    that is no regular file.
    """
    if str(path) == "-":
        raise ValueError(f"{argument}: expected a file to write, got '-'")
    if path.exists():
        if not path.is_file():
            raise ValueError(f"{argument}: expected a regular file, got {path}, {_kind(path)}")
        for each in inputs:
            if each.exists() and path.samefile(each):
                raise ValueError(f"{argument}: expected a file that is not read, got {path}")
    return Path(os.path.realpath(path))


def write_whole(place: Path, data: str | bytes) -> None:
    """Written beside, then renamed. Raises OSError naming the file, and leaves nothing then."""
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with naming(place):
            beside.write_bytes(data.encode() if isinstance(data, str) else data)
            if place.exists():
                shutil.copymode(place, beside)
            beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a write has no file's name of its own, or that of a file that lay beside."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    if path.is_fifo():
        return "a pipe"
    return "a socket" if path.is_socket() else "a device"
