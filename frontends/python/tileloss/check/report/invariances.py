"""Invariance lines: what keeps its bits when only the division of the work changes, and how far the rest moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tileloss.check.report import fields
from tileloss.check.report.audits import STATUSES
from tileloss.check.report.blocks import (
    Block,
    Cell,
    Fold,
    Mark,
    Picture,
    Section,
    Table,
    digits,
    figure,
    joined,
    outcome,
    plain,
)
from tileloss.check.report.grids import Range, range_chart

_MEASURED = "measured"
_MOST_RANGES = 24


@dataclass(frozen=True)
class Invariance:
    """How a quantity moves when only `varied` changes. `quantiles`: of the ratio of probabilities to the unchanged ones, by their
    shares; `difference`: of a gradient, relative in the norm. NaN and {} where the line has none."""

    implementation: str
    package: str
    status: str
    level: str
    varied: str
    quantity: str
    dtype: str
    same_bits: bool
    quantiles: dict[float, float]
    outside: float
    difference: float
    message: str

    @property
    def who(self) -> tuple[str, str, str]:
        return self.implementation, self.level, self.dtype

    @property
    def moved(self) -> float:
        """The largest, as a share; NaN where nothing says it."""
        found = [abs(value - 1) for value in self.quantiles.values() if math.isfinite(value)]
        return max(found) if found else self.difference

    @property
    def is_measured(self) -> bool:
        return self.status == _MEASURED


def read(line: fields.Line) -> Invariance:
    """Raises ValueError where a field is missing or of another type."""
    status = fields.text(line, "status", _MEASURED)
    is_measured = status == _MEASURED
    quantiles = fields.table(line, "ratio_quantiles")
    return Invariance(
        fields.text(line, "implementation"),
        fields.text(line, "package", ""),
        status,
        fields.text(line, "level", ""),
        fields.text(line, "varied", None if is_measured else ""),
        fields.text(line, "quantity", None if is_measured else ""),
        fields.text(line, "dtype", ""),
        fields.flag(line, "same_bits") if is_measured else False,
        {float(share): fields.number(quantiles, share) for share in sorted(quantiles, key=float)},
        fields.number(line, "outside_1e-3", math.nan),
        fields.number(line, "relative_difference", math.nan),
        fields.text(line, "message", ""),
    )


def section(found: Sequence[Invariance]) -> Section:
    measured = [each for each in found if each.is_measured]
    kept = sum(each.same_bits for each in measured)
    summary = f"{kept} of {len(measured)} keep every bit"
    others = len(found) - len(measured)
    summary += f", {others} not measured" if others else ""
    blocks: list[Block] = [_matrix(found), *_ranges(measured)]
    blocks.append(Fold("All figures", Mark.NONE, (_table(found),)))
    title = "Invariance to batch, order, threads and shards"
    return Section("invariance", title, len(found), Mark.NONE, summary, blocks)


def _matrix(found: Sequence[Invariance]) -> Table:
    kinds = list(dict.fromkeys(each.varied for each in found))
    cells: dict[tuple[str, str, str], dict[str, list[Invariance]]] = {}
    for each in found:
        cells.setdefault(each.who, {}).setdefault(each.varied, []).append(each)
    rows = [
        (*map(plain, who), *(_cell(row.get(kind, [])) for kind in kinds))
        for who, row in cells.items()
    ]
    heads = ("implementation", "level", "dtype", *(kind.replace("_", " ") for kind in kinds))
    caption = "Largest change: logp by the ratio of probabilities, gradients relative in the norm"
    return Table(heads, tuple(rows), caption)


def _cell(found: list[Invariance]) -> Cell:
    if not found:
        return plain("")
    other = next((each for each in found if not each.is_measured), None)
    if other is not None:
        mark, word = STATUSES.get(other.status, (Mark.WARN, other.status))
        return Cell(word, mark, title=other.message)
    moved = [f"{each.quantity} {digits(each.moved, 1)}" for each in found if not each.same_bits]
    return Cell(joined(moved), Mark.WARN) if moved else outcome(True, "same")


def _ranges(measured: Sequence[Invariance]) -> list[Picture]:
    moved = [each for each in measured if not each.same_bits and each.quantiles]
    moved = sorted((m for m in moved if math.isfinite(m.moved)), key=lambda each: -each.moved)
    ranges = []
    for each in moved[:_MOST_RANGES]:
        values = [value for value in each.quantiles.values() if math.isfinite(value)]
        middle = each.quantiles.get(0.5, values[len(values) // 2])
        label = f"{joined(each.who)}, {each.varied}: {each.quantity}".replace("_", " ")
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


def _table(found: Sequence[Invariance]) -> Table:
    shares = sorted({share for each in found for share in each.quantiles})
    heads = ("implementation", "level", "dtype", "varied", "quantity", "bits")
    rows = []
    for each in found:
        quantiles = [_written(each.quantiles.get(share, math.nan), 7) for share in shares]
        share = f"{100 * each.outside:.3g} %" if math.isfinite(each.outside) else ""
        rows.append(
            (
                plain(each.implementation, title=each.package),
                plain(each.level),
                plain(each.dtype),
                plain(each.varied.replace("_", " ")),
                plain(each.quantity),
                _bits(each),
                *map(figure, quantiles),
                figure(share),
                figure(_written(each.difference, 2)),
                plain(each.message),
            )
        )
    quantile_heads = (f"q {share:g}" for share in shares)
    last = ("outside 1 ± 0.001", "difference", "message")
    return Table((*heads, *quantile_heads, *last), tuple(rows))


def _bits(each: Invariance) -> Cell:
    if not each.is_measured:
        mark, word = STATUSES.get(each.status, (Mark.WARN, each.status))
        return Cell(word, mark)
    return outcome(True, "same") if each.same_bits else Cell("differ", Mark.WARN)


def _written(value: float, count: int) -> str:
    return digits(value, count) if math.isfinite(value) else ""
