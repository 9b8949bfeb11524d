"""Result lines, field by field: what a section reads is there and of its type, or the line is unknown and says why."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tileloss.check.printable import escaped
from tileloss.check.results import read_results

Line = dict[str, Any]
Positive = float  # a time, by which others are divided
Amount = float  # from 0 on
_T = TypeVar("_T")


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


def _is_number(value: object) -> bool:
    """Of JSON's integers those that a float can be."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


# By the annotation of a dataclass's field: what the line is to have, in words and as a test, and what stands for nothing there.
_KINDS: dict[str, tuple[str, Callable[[Any], bool], Any]] = {
    "str": ("a text", lambda value: isinstance(value, str), MISSING),
    "bool": ("true or false", lambda value: isinstance(value, bool), MISSING),
    "float": ("a number", _is_number, MISSING),
    "Positive": ("a positive number", lambda v: _is_number(v) and 0 < v < math.inf, MISSING),
    "Amount": ("a number from 0 on", lambda v: _is_number(v) and 0 <= v < math.inf, MISSING),
    "Line": ("an object", lambda value: isinstance(value, dict), {}),
    "list[Line]": ("a list of objects", _list_of(lambda value: isinstance(value, dict)), []),
    "list[str]": ("a list of texts", _list_of(lambda value: isinstance(value, str)), []),
    "list[float]": ("a list of numbers", _list_of(_is_number), []),
}


def value(line: Line, key: str, kind: str, default: Any = MISSING) -> Any:
    """Raises ValueError where the field is missing and nothing stands for it, or is of another kind. null is what JSON has for a
    NaN."""
    expected, fits, usual = _KINDS[kind]
    found: Any = line.get(key)
    if found is None and kind == "float" and key in line:
        return math.nan
    if found is None and (default is not MISSING or usual is not MISSING):
        return usual if default is MISSING else default
    if not fits(found):
        given = repr(found if key in line else "nothing")
        shown = given[:60] + "..." * (len(given) > 60)
        raise ValueError(f"{key}: expected {expected}, got {shown}")
    return float(found) if kind in ("float", "Positive", "Amount") else found


def read(kind: type[_T], line: Line, **given: Any) -> _T:
    """A dataclass of the line's fields of the same names, but for those that are given."""
    found = {
        each.name: value(line, each.name, str(each.type), each.default)
        for each in fields(kind)  # type: ignore[arg-type]
        if each.name not in given
    }
    return kind(**found, **given)


def threads(line: Line) -> str:
    return f"{line['threads']} threads" if "threads" in line else ""
