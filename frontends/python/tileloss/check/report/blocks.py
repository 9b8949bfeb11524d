"""What a report is made of: sections of tables, pictures and notes; and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from tileloss.check.report.sheet import Sheet
from tileloss.check.report.style import Palette

# Draws for a width in pixels, in the colours of a palette.
Plot = Callable[[float, Palette], Sheet]
_T = TypeVar("_T")


class Mark(Enum):
    """How something went. The sign and the word say it, the colour repeats it."""

    PASS = ("pass", "✓")
    FAIL = ("fail", "✗")
    WARN = ("warn", "!")
    NONE = ("none", "-")

    @property
    def style(self) -> str:
        return self.value[0]

    @property
    def sign(self) -> str:
        return self.value[1]


@dataclass(frozen=True)
class Cell:
    """Of a table. `is_number`: aligned to the right; `title`: what a pointer over it shows."""

    text: str
    mark: Mark | None = None
    is_number: bool = False
    title: str = ""


@dataclass(frozen=True)
class Table:
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


Columns = Mapping[str, Callable[[_T], Cell]]


def table(items: Iterable[_T], columns: Columns[_T], caption: str = "") -> Table:
    """A row for each item, of what the columns make of it."""
    rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
    return Table(tuple(columns), rows, caption)


@dataclass(frozen=True)
class Picture:
    """`name`: of its file, unique in a report. `says`: the same in words, for those who do not see it."""

    name: str
    caption: str
    says: str
    plot: Plot


@dataclass(frozen=True)
class Fold:
    """Blocks behind a line that opens them."""

    title: str
    mark: Mark
    blocks: tuple[Block, ...]
    is_open: bool = False


Block = Table | Picture | Fold | str


@dataclass(frozen=True)
class Section:
    """`outcome` counts for the verdict if it is PASS or FAIL; `summary` is the line of the first table, printed too, and
    `details` are printed below it."""

    name: str
    title: str
    lines: int
    outcome: Mark
    summary: str
    blocks: list[Block] = field(default_factory=list)
    details: tuple[str, ...] = ()


def plain(value: object, title: str = "") -> Cell:
    return Cell(str(value), title=title)


def figure(value: str) -> Cell:
    """A number, already written."""
    return Cell(value, is_number=True)


def outcome(passed: bool, word: str = "") -> Cell:
    mark = Mark.PASS if passed else Mark.FAIL
    return Cell(word or mark.style, mark)


def digits(value: float, count: int = 3) -> str:
    return f"{value:.{count}g}" if math.isfinite(value) else "not finite"


def known(value: float, write: Callable[[float], str] = digits) -> Cell:
    """A number; nothing where it is NaN or infinite, as no line says it."""
    return figure(write(value) if math.isfinite(value) else "")


def seconds(value: float) -> str:
    """Three digits, in milliseconds below one second."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def bytes_of(value: float) -> str:
    """Three digits, decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def joined(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)
