"""Invariance lines: what keeps its bits when only the division of the work changes, and how far the rest moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tileloss.check.report import blocks, fields
from tileloss.check.report.audits import status_cell
from tileloss.check.report.blocks import (
    Block,
    Cell,
    Columns,
    Fold,
    Mark,
    Picture,
    Section,
    Table,
    digits,
    joined,
    known,
    plain,
)
from tileloss.check.report.fields import Line
from tileloss.check.report.grids import Range, range_chart

_MEASURED = "measured"
_MOST_RANGES = 24


@dataclass(frozen=True)
class Invariance:
    """How a quantity moves when only `varied` changes. `quantiles`: of the ratio of probabilities to the unchanged ones, by their
    shares; `relative_difference`: of a gradient, in the norm. NaN and {} where the line has none."""

    quantiles: dict[float, float]
    outside: float
    same_bits: bool
    varied: str
    quantity: str
    implementation: str
    package: str = ""
    status: str = _MEASURED
    level: str = ""
    dtype: str = ""
    relative_difference: float = math.nan
    message: str = ""
    claim: str = ""
    against: str = ""

    @property
    def kind(self) -> str:
        return f"as {self.against}" if self.against else self.varied.replace("_", " ")

    @property
    def who(self) -> tuple[str, str, str]:
        return self.implementation, self.level, self.dtype

    @property
    def moved(self) -> float:
        """The largest, as a share; NaN where nothing says it."""
        found = [abs(value - 1) for value in self.quantiles.values() if math.isfinite(value)]
        return max(found) if found else self.relative_difference

    @property
    def is_measured(self) -> bool:
        return self.status == _MEASURED


def read(line: Line) -> Invariance:
    """Raises ValueError where a field is missing or of another type."""
    is_measured = fields.value(line, "status", "str", _MEASURED) == _MEASURED
    default = () if is_measured else ("",)
    quantiles = fields.value(line, "ratio_quantiles", "Line")
    shares = sorted(quantiles, key=float)
    return fields.read(
        Invariance,
        line,
        quantiles={float(share): fields.value(quantiles, share, "float") for share in shares},
        outside=fields.value(line, "outside_1e-3", "float", math.nan),
        same_bits=is_measured and fields.value(line, "same_bits", "bool"),
        varied=fields.value(line, "varied", "str", *default),
        quantity=fields.value(line, "quantity", "str", *default),
    )


def section(found: Sequence[Invariance]) -> Section:
    measured = [each for each in found if each.is_measured]
    kept = sum(each.same_bits for each in measured)
    summary = f"{kept} of {len(measured)} keep every bit"
    others = len(found) - len(measured)
    summary += f", {others} not measured" if others else ""
    shown: list[Block] = [_matrix(found), *_ranges(measured)]
    shown.append(Fold("All figures", Mark.NONE, (blocks.table(found, _columns(found)),)))
    title = "Invariance to batch, order, threads and shards"
    return Section("invariance", title, len(found), Mark.NONE, summary, shown)


def _matrix(found: Sequence[Invariance]) -> Table:
    kinds = list(dict.fromkeys(each.kind for each in found))
    cells: dict[tuple[str, str, str], dict[str, list[Invariance]]] = {}
    for each in found:
        cells.setdefault(each.who, {}).setdefault(each.kind, []).append(each)
    rows = [
        (*map(plain, who), *(_cell(row.get(kind, [])) for kind in kinds))
        for who, row in cells.items()
    ]
    heads = ("implementation", "level", "dtype", *kinds)
    caption = "Largest change: logp by the ratio of probabilities, gradients relative in the norm"
    return Table(heads, tuple(rows), caption)


def _cell(found: list[Invariance]) -> Cell:
    if not found:
        return plain("")
    other = next((each for each in found if not each.is_measured), None)
    if other is not None:
        return status_cell(other.status, other.message)
    moved = [f"{each.quantity} {digits(each.moved, 1)}" for each in found if not each.same_bits]
    mark = Mark.FAIL if any(each.claim == "broken" for each in found) else Mark.WARN
    return Cell(joined(moved), mark) if moved else blocks.outcome(True, "same")


def _ranges(measured: Sequence[Invariance]) -> list[Picture]:
    moved = [each for each in measured if not each.same_bits and each.quantiles]
    moved = sorted((m for m in moved if math.isfinite(m.moved)), key=lambda each: -each.moved)
    ranges = []
    for each in moved[:_MOST_RANGES]:
        values = [value for value in each.quantiles.values() if math.isfinite(value)]
        middle = each.quantiles.get(0.5, values[len(values) // 2])
        label = f"{joined(each.who)}, {each.kind}: {each.quantity}"
        ranges.append(Range(label, min(values), middle, max(values)))
    if not ranges:
        return []
    left_out = len(moved) - len(ranges)
    caption = "From the lowest quantile to the highest; the dot is the median. Without those that keep every bit."
    caption += f" The {len(ranges)} widest; {left_out} more are in the table." if left_out else ""
    says = "; ".join(f"{r.label}: {digits(r.low, 6)} to {digits(r.high, 6)}" for r in ranges)
    axis = "ratio to the unchanged result, minus 1"
    plot = range_chart("How far probabilities move", axis, ranges, 1.0)
    return [Picture("invariance", caption, says, plot)]


def _columns(found: Sequence[Invariance]) -> Columns[Invariance]:
    shares = sorted({share for each in found for share in each.quantiles})
    return {
        "implementation": lambda each: plain(each.implementation, title=each.package),
        "level": lambda each: plain(each.level),
        "dtype": lambda each: plain(each.dtype),
        "varied": lambda each: plain(each.kind),
        "quantity": lambda each: plain(each.quantity),
        "bits": _bits,
        **{f"q {share:g}": _quantile(share) for share in shares},
        "outside 1 ± 0.001": lambda each: known(each.outside, lambda x: f"{100 * x:.3g} %"),
        "difference": lambda each: known(each.relative_difference, lambda x: digits(x, 2)),
        "message": lambda each: plain(each.message),
    }


def _quantile(share: float) -> Callable[[Invariance], Cell]:
    return lambda each: known(each.quantiles.get(share, math.nan), lambda x: digits(x, 7))


def _bits(each: Invariance) -> Cell:
    if not each.is_measured:
        return status_cell(each.status)
    return blocks.outcome(True, "same") if each.same_bits else Cell("differ", Mark.WARN)
