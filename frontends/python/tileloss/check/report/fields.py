"""Result lines, field by field: what a section reads is there and of its type, or the line is unknown and says why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from tileloss.check.printable import escaped
from tileloss.check.results import read_results

Line = dict[str, Any]


class Record(NamedTuple):
    """A line of a results file, and where it stands."""

    file: str
    number: int
    line: Line


def read_records(paths: list[Path]) -> list[Record]:
    """Every line of every file, in order.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is no JSON object; the message names file and line. A torn last line is dropped with a warning.
    """
    return [
        Record(str(path), number, line)
        for path in paths
        for number, line in enumerate(read_results(path), start=1)
    ]


def printable(value: Any) -> Any:
    """The same with all its texts escaped: what neither HTML nor SVG can hold, and what would turn the direction of writing."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(name): printable(each) for name, each in value.items()}
    return value


def text(line: Line, key: str, default: str | None = None) -> str:
    """Raises ValueError, as all here do, where the field is missing and has no default or is of another type."""
    value = line.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise _wrong(key, "a text", value)
    return value


def number(line: Line, key: str, default: float | None = None) -> float:
    """null is what JSON has for a NaN."""
    if key not in line and default is not None:
        return default
    value = line[key] if key in line else "nothing"
    if value is None:
        return math.nan
    if not _is_number(value):
        raise _wrong(key, "a number", value)
    return float(value)


def positive(line: Line, key: str) -> float:
    """A time, by which others are divided."""
    value = number(line, key)
    if not 0 < value < math.inf:
        raise _wrong(key, "a positive number", line[key])
    return value


def amount(line: Line, key: str) -> float:
    value = number(line, key)
    if not 0 <= value < math.inf:
        raise _wrong(key, "a number from 0 on", line[key])
    return value


def flag(line: Line, key: str) -> bool:
    value = line.get(key)
    if not isinstance(value, bool):
        raise _wrong(key, "true or false", value)
    return value


def table(line: Line, key: str) -> Line:
    """An object, {} where there is none."""
    value = line.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(key, "an object", value)
    return value


def tables(line: Line, key: str) -> list[Line]:
    """A list of objects, [] where there is none."""
    value = line.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _wrong(key, "a list of objects", value)
    return value


def texts(line: Line, key: str) -> list[str]:
    value = line.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(key, "a list of texts", value)
    return value


def numbers(line: Line, key: str) -> list[float]:
    value = line.get(key, [])
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise _wrong(key, "a list of numbers", value)
    return [float(each) for each in value]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(key: str, expected: str, value: object) -> ValueError:
    given = repr(value)
    return ValueError(f"{key}: expected {expected}, got {given[:60]}{'...' * (len(given) > 60)}")
