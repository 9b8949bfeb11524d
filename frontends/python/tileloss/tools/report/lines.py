"""Result lines: their fields, which have to be of their type, and what a table shows of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from tileloss.tools.printable import escaped

Line = dict[str, Any]
_WORDS = {
    str: "a text",
    bool: "true or false",
    float: "a number",
    dict: "an object",
    list: "a list",
}
_UNITS = {"s": {"s": 1.0, "ms": 1e-3}, "bytes": {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}}


class Cell(NamedTuple):
    """`mark`: how something went, pass, fail, warn or none; `title`: what a pointer over it shows."""

    text: str
    mark: str = ""
    title: str = ""
    is_number: bool = False


def printable(value: Any) -> Any:
    """The same with all its texts escaped: what neither HTML nor SVG can hold, and what would turn the direction of writing.
    An integer that no float can be becomes a text."""
    if isinstance(value, dict):
        return {printable(name): printable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [printable(each) for each in value]
    if isinstance(value, int) and abs(value) > 1e300:
        return str(value)
    return escaped(value) if isinstance(value, str) else value


def get(line: Any, name: str, kind: Any, default: Any = ...) -> Any:
    """A field. Raises ValueError where it is of another type, or missing or null without a default."""
    found: Any = line.get(name) if isinstance(line, dict) else None
    if found is None and default is not ...:
        return default
    if type(found) is not kind and not (kind is float and type(found) is int):
        given = "nothing" if found is None else repr(found)[:60]
        raise ValueError(f"{name}: expected {_WORDS[kind]}, got {given}")
    return float(found) if kind is float else found


def texts(line: Line, names: str) -> list[str]:
    return [get(line, name, str, "") for name in names.split()]


def numbers(line: Line, names: str) -> list[float]:
    return [get(line, name, float, math.nan) for name in names.split()]


def positive(line: Line, name: str) -> float:
    """Of times, by which others are divided."""
    if not 0 < (found := get(line, name, float)) < 1e300:
        raise ValueError(f"{name}: expected a positive number, got {found}")
    return found


def table(lines: Iterable[Line], columns: str) -> tuple[list[str], list[list[Cell]]]:
    """Heads and rows. Columns are "head: field writer | field | ..."; those that are empty are left out."""
    split = [column.rpartition(": ")[::2] for column in columns.split(" | ")]
    fields = [(head, *field.partition(" ")[::2]) for head, field in split]
    rows = [[cell(line.get(field), writer) for _, field, writer in fields] for line in lines]
    kept = [place for place in range(len(fields)) if any(row[place].text for row in rows)]
    heads = [fields[place][0] or fields[place][1].replace("_", " ") for place in kept]
    return heads, [[row[place] for place in kept] for row in rows]


def cell(value: Any, writer: str = "") -> Cell:
    """Nothing of a number that is not finite."""
    if isinstance(value, Cell):
        return value
    if writer == "ok":
        return outcome(value is True)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell(written(value))
    text = str(value) if isinstance(value, int) and not writer else number(value, writer or "4")
    return Cell(text if math.isfinite(value) else "", is_number=True)


def number(value: float, writer: str = "3") -> str:
    """In a number of digits, or in a unit."""
    if not math.isfinite(value):
        return "not finite"
    if writer not in _UNITS:
        return f"{value:.{writer}g}"
    units = _UNITS[writer]
    unit = next((unit for unit, size in units.items() if value >= 0.9995 * size), [*units][-1])
    return f"{value / units[unit]:.3g} {unit}"


def written(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={each}" for name, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def outcome(passed: bool, word: str = "") -> Cell:
    mark = "pass" if passed else "fail"
    return Cell(word or mark, mark)


def grouped(lines: Iterable[Line], *names: str) -> dict[Any, list[Line]]:
    """By fields, in the order of the first of each group."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(written(line.get(name)) for name in names), []).append(line)
    return found


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def joined(parts: Iterable[Any], mark: str = ", ") -> str:
    return mark.join(str(part) for part in parts if part)
