"""Sweep lines: curves over one varied parameter, heat maps over two, the best case of each piece of work."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tileloss.check.report import blocks, fields
from tileloss.check.report.blocks import (
    Block,
    Columns,
    Fold,
    Mark,
    Picture,
    Section,
    Table,
    digits,
    figure,
    joined,
    plain,
    seconds,
)
from tileloss.check.report.grids import Curve, Heat, curve_chart, heat_map

# Of a case, what says how the work is done; the rest says what the work is.
_AXES = (
    "isa",
    "threads",
    "schedule",
    "row_block",
    "vocab_block",
    "cuda_kernel",
    "workspace",
    "head_layout",
)
_SIZES = ("tokens", "vocab", "hidden")
_MOST_CURVES, _MOST_PICTURES = 6, 24


@dataclass(frozen=True)
class Case:
    """`sweep`: its file. `parameters`: written values by name. `median`: milliseconds, NaN unless the status is ok."""

    sweep: str
    parameters: dict[str, str]
    status: str
    median: float
    message: str

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    def at(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.parameters.get(name, "") for name in names)


def read(record: fields.Record) -> Case:
    """Raises ValueError where a field is missing or of another type."""
    line = record.line
    given = fields.value(line, "case", "Line")
    parameters = {name: _written(value) for name, value in given.items()}
    if not parameters:
        raise ValueError("case: expected an object with the parameters, got nothing")
    status = fields.value(line, "status", "str")
    message = fields.value(line, "message", "str", "")
    median = fields.value(line, "median_ms", "Positive") if status == "ok" else math.nan
    return Case(record.file, parameters, status, median, message)


def _written(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={each}" for name, each in value.items())
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def section(cases: Sequence[Case]) -> Section:
    statuses = Counter(case.status for case in cases)
    counts = joined(f"{number} {status}" for status, number in statuses.items())
    sweeps: dict[str, list[Case]] = {}
    for case in cases:
        sweeps.setdefault(case.sweep, []).append(case)
    found: list[Block] = []
    for number, (name, members) in enumerate(sweeps.items(), start=1):
        found += _sweep(number, name, members)
    mark = Mark.NONE if all(case.is_ok for case in cases) else Mark.FAIL
    summary = f"{blocks.count(len(cases), 'case')}: {counts}"
    return Section("sweep", "Sweeps", len(cases), mark, summary, found)


def _sweep(number: int, name: str, cases: Sequence[Case]) -> list[Block]:
    """Of one file. `number` makes the names of its pictures unique."""
    works = _works(cases)
    pictures = [*_curves(works, f"sweep-{number}"), *_heat_maps(works, f"sweep-{number}-map")]
    best = blocks.table(works, _BEST, f"The best of {name}")
    found: list[Block] = [best, *pictures[:_MOST_PICTURES]]
    if len(pictures) > _MOST_PICTURES:
        found.append(f"{len(pictures) - _MOST_PICTURES} more pictures are left out.")
    return [*found, _all_cases(cases)]


@dataclass(frozen=True)
class Work:
    """Cases that differ in `axes` alone."""

    label: str
    axes: tuple[str, ...]
    cases: list[Case]

    @property
    def compares_sizes(self) -> bool:
        """Sizes are no choice: of them none is the best."""
        return any(axis in _SIZES for axis in self.axes)

    @property
    def measured(self) -> list[Case]:
        return [case for case in self.cases if case.is_ok]

    @property
    def best(self) -> Case | None:
        return min(self.measured, key=lambda case: case.median, default=None)

    @property
    def best_axes(self) -> str:
        given = self.best.parameters if self.best and not self.compares_sizes else None
        return joined(f"{a} {_shown(a, given.get(a, ''))}" for a in self.axes) if given else ""

    @property
    def spread(self) -> str:
        if self.compares_sizes or len(self.measured) < 2:
            return ""
        medians = [case.median for case in self.measured]
        return f"{digits(max(medians) / min(medians))} x"


_BEST: Columns[Work] = {
    "work": lambda work: plain(work.label),
    "best case": lambda work: plain(work.best_axes),
    "least time": lambda work: figure(
        seconds(work.best.median / 1000) if work.best else "none was measured"
    ),
    "the slowest takes": lambda work: figure(work.spread),
    "cases": lambda work: figure(str(len(work.cases))),
}


def _varied(cases: Sequence[Case], names: Iterable[str]) -> list[str]:
    return [name for name in names if len({case.parameters.get(name) for case in cases}) > 1]


def _works(cases: Sequence[Case]) -> list[Work]:
    """Where only sizes vary, these are the axes; else each size is work of its own."""
    axes = _varied(cases, _AXES) or _varied(cases, _SIZES)
    names = list(dict.fromkeys(name for case in cases for name in case.parameters))
    others = [name for name in names if name not in axes]
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(case.at(others), []).append(case)
    found = []
    for group in groups.values():
        own_axes = tuple(_varied(group, axes))
        found.append(Work(_label(group[0], set(own_axes)), own_axes, group))
    return found


def _label(case: Case, axes: set[str]) -> str:
    given = case.parameters
    words = [given.get(name, "") for name in ("loss", "preset", "options")]
    sizes = [given[name] for name in ("tokens", "vocab") if given.get(name) and name not in axes]
    words += [f"[{', '.join(sizes)}]" if sizes else ""]
    words += [f"hidden {given['hidden']}" if given.get("hidden") and "hidden" not in axes else ""]
    words += [given.get("dtype", ""), given.get("pass", "")]
    words += ["in place" if given.get("in_place") == "true" else ""]
    return " ".join(word for word in words if word)


def _shown(axis: str, value: str) -> str:
    """0 and auto leave the choice to the planner."""
    return "auto" if axis in _AXES and value in ("0", "") else value


def _places(work: Work, axis: str) -> tuple[str, ...]:
    """The values of an axis, numbers by size, the planner's choice first."""
    values = {case.parameters.get(axis, "") for case in work.cases}

    def order(value: str) -> tuple[bool, float, str]:
        try:
            return False, float(value), value
        except ValueError:
            return True, 0.0, value

    return tuple(sorted(values, key=order))


def _curves(works: list[Work], start: str) -> list[Picture]:
    """Works with the same axis and places share a picture."""
    groups: dict[tuple[str, tuple[str, ...]], list[Work]] = {}
    for work in works:
        if len(work.axes) == 1:
            axis = work.axes[0]
            groups.setdefault((axis, _places(work, axis)), []).append(work)
    pictures: list[Picture] = []
    for (axis, places), members in groups.items():
        for begin in range(0, len(members), _MOST_CURVES):
            part = members[begin : begin + _MOST_CURVES]
            curves = [_curve(work, axis, places) for work in part]
            name = f"{start}-{axis}-{len(pictures) + 1}".replace("_", "-")
            shown = tuple(_shown(axis, place) for place in places)
            says = "; ".join(f"{curve.label}: {_listed(shown, curve.values)}" for curve in curves)
            plot = curve_chart(f"Median ms over {axis}", (axis, shown), curves)
            pictures.append(Picture(name, "", says, plot))
    return pictures


def _curve(work: Work, axis: str, places: tuple[str, ...]) -> Curve:
    found = {case.parameters.get(axis, ""): case.median for case in work.cases}
    return Curve(work.label, tuple(found.get(place, math.nan) for place in places))


def _listed(places: Sequence[str], values: Sequence[float]) -> str:
    return joined(f"{p} {digits(v)} ms" for p, v in zip(places, values, strict=True))


def _heat_maps(works: list[Work], start: str) -> list[Picture]:
    return [
        _heat_map(work, f"{start}-{number}")
        for number, work in enumerate(works, start=1)
        if len(work.axes) > 1 and work.best
    ]


def _heat_map(work: Work, name: str) -> Picture:
    """Over the two axes with most values; a cell has the best over the others."""
    axes = sorted(work.axes, key=lambda axis: -len(_places(work, axis)))[:2]
    rows, columns = (_places(work, axis) for axis in sorted(axes, key=work.axes.index))
    row_axis, column_axis = sorted(axes, key=work.axes.index)
    cells: dict[tuple[str, ...], list[Case]] = {}
    for case in work.cases:
        cells.setdefault(case.at((row_axis, column_axis)), []).append(case)
    found = {at: min(c, key=lambda case: (not case.is_ok, case.median)) for at, c in cells.items()}
    best = work.best
    where = best.at((row_axis, column_axis)) if best and not work.compares_sizes else None
    heat = Heat(
        f"{work.label}, ms",
        (column_axis, tuple(_shown(column_axis, each) for each in columns)),
        (row_axis, tuple(_shown(row_axis, each) for each in rows)),
        tuple(
            tuple(found[r, c].median if (r, c) in found else math.nan for c in columns)
            for r in rows
        ),
        tuple(tuple(_cell(found.get((r, c))) for c in columns) for r in rows),
        (rows.index(where[0]), columns.index(where[1])) if where else None,
    )
    others = [axis for axis in work.axes if axis not in axes]
    caption = "Darker is slower" + ("; a frame marks the best." if where else ".")
    caption += f" Each cell is the best over {', '.join(others)}." if others else ""
    says = "; ".join(f"{joined(at)}: {_cell(case)}" for at, case in found.items())
    return Picture(name, caption, says, heat_map(heat))


def _cell(case: Case | None) -> str:
    if case is None:
        return ""
    return digits(case.median) if case.is_ok else case.status.replace("_", " ")


def _all_cases(cases: Sequence[Case]) -> Fold:
    names = list(dict.fromkeys(name for case in cases for name in case.parameters))
    varied = _varied(cases, names)
    rows = []
    for case in cases:
        values = [plain(_shown(name, case.parameters.get(name, ""))) for name in varied]
        time = figure(seconds(case.median / 1000) if case.is_ok else "")
        rows.append((*values, time, blocks.outcome(case.is_ok, case.status), plain(case.message)))
    return Fold("All cases", Mark.NONE, (Table((*varied, "time", "status", ""), tuple(rows)),))
