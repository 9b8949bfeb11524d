"""Files that the commands write: where one may go, and a whole one that replaces what is there only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tileloss.tools.printable import shown


def output_place(
    argument: str, path: Path, inputs: Iterable[Path] = (), *, only_files: bool = True
) -> Path:
    """Where an output is to be written: the path, or what a link there leads to.

    Raises ValueError, naming ``argument``, where it is "-", one of the files that are read, under whatever name, or a folder;
    with ``only_files`` also where it is a pipe or a device.
    """
    if str(path) == "-":
        raise ValueError(f"{argument}: expected a file to write, got '-'")
    name = shown(str(path))
    if path.exists():
        if path.is_dir() or (only_files and not path.is_file()):
            raise ValueError(f"{argument}: expected a regular file, got {name}, {kind_of(path)}")
        for each in inputs:
            if each.exists() and path.samefile(each):
                raise ValueError(f"{argument}: expected a file that is not read, got {name}")
    return Path(os.path.realpath(path))


def write_whole(place: Path, data: str | bytes) -> None:
    """As ``whole_file``, of text or bytes."""
    with whole_file(place) as beside:
        beside.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """An empty file beside, which is renamed at the end. A link at ``path`` stays, and what it leads to is replaced.

    Raises ValueError where something is there that is no regular file, OSError naming it; nothing of the new one stays then.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        raise ValueError(f"{shown(str(path))}: expected a regular file, got {kind_of(place)}")
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    with naming(path):
        beside.touch(exist_ok=False)
    try:
        with naming(path):
            mode = (place if place.exists() else beside).stat().st_mode
            yield beside
            beside.chmod(mode)  # whoever wrote it may have put another in its place
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
        raise OSError(error.errno, error.strerror or os.strerror(error.errno), str(path)) from error


def kind_of(path: Path) -> str:
    """What is no regular file, in words."""
    if path.is_dir():
        return "a folder"
    if path.is_fifo():
        return "a pipe"
    return "a socket" if path.is_socket() else "a device"
