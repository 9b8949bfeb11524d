"""Audit lines: a table of implementations against cases. Invariance lines: what keeps its bits, and how far the rest moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tileloss.check.report import fields
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

# Words and signs of a cell.
_STATUSES = {
    "pass": (Mark.PASS, "pass"),
    "failed": (Mark.FAIL, "failed"),
    "crashed": (Mark.FAIL, "crashed"),
    "timeout": (Mark.FAIL, "timeout"),
    "refused": (Mark.WARN, "refused"),
    "not_installed": (Mark.NONE, "not installed"),
}
_MOST_RANGES = 24


@dataclass(frozen=True)
class Audited:
    """A case that an implementation was given."""

    implementation: str
    package: str
    case: str
    status: str
    gate: str
    value: float
    limit: float
    message: str
    seconds: float

    @property
    def mark(self) -> Mark:
        return _STATUSES.get(self.status, (Mark.WARN, ""))[0]

    @property
    def word(self) -> str:
        return _STATUSES.get(self.status, (Mark.WARN, self.status))[1]

    @property
    def who(self) -> str:
        return f"{self.implementation} ({self.package})" if self.package else self.implementation


def read_audit(line: fields.Line) -> Audited:
    """Raises ValueError where a field is missing or of another type."""
    return Audited(
        fields.text(line, "implementation"),
        fields.text(line, "package", ""),
        fields.text(line, "case"),
        fields.text(line, "status"),
        fields.text(line, "gate", ""),
        fields.number(line, "value", math.nan),
        fields.number(line, "limit", math.nan),
        fields.text(line, "message", ""),
        fields.number(line, "seconds", math.nan),
    )


def audit_section(audited: Sequence[Audited]) -> Section:
    counts = Counter(each.word for each in audited)
    summary = joined(f"{number} {word}" for word, number in counts.items())
    is_failed = any(each.mark is Mark.FAIL for each in audited)
    mark = Mark.FAIL if is_failed else Mark.PASS if counts["pass"] else Mark.NONE
    blocks: list[Block] = [_matrix(audited), *_details(audited)]
    return Section("audit", "Audit of implementations", len(audited), mark, summary, blocks)


def _matrix(audited: Sequence[Audited]) -> Table:
    """Of the lines for the same cell the last one counts."""
    cells = {(each.who, each.case): each for each in audited}
    implementations = dict.fromkeys(each.who for each in audited)
    rows = []
    for case in dict.fromkeys(each.case for each in audited):
        found = [cells.get((who, case)) for who in implementations]
        rows.append((plain(case), *(_audit_cell(each) for each in found)))
    return Table(("case", *implementations), tuple(rows))


def _audit_cell(each: Audited | None) -> Cell:
    if each is None:
        return plain("")
    word = each.gate if each.status == "failed" and each.gate else each.word
    return Cell(word, each.mark, title=each.message)


def _details(audited: Sequence[Audited]) -> list[Block]:
    failed = [each for each in audited if each.mark is Mark.FAIL]
    others = [each for each in audited if each.mark is Mark.WARN]
    blocks: list[Block] = []
    if failed:
        blocks.append(_detail_table(failed, "All that failed"))
    if others:
        blocks.append(Fold("All that was refused", Mark.NONE, (_detail_table(others, ""),)))
    return blocks


def _detail_table(audited: Sequence[Audited], caption: str) -> Table:
    rows = [
        (
            plain(each.who),
            plain(each.case),
            Cell(each.word, each.mark),
            plain(each.gate),
            figure(_known(each.value)),
            figure(_known(each.limit)),
            plain(each.message),
        )
        for each in audited
    ]
    heads = ("implementation", "case", "result", "gate", "value", "limit", "message")
    return Table(heads, tuple(rows), caption)


def _known(value: float) -> str:
    return digits(value) if math.isfinite(value) else ""


@dataclass(frozen=True)
class Invariance:
    """How a quantity moves when only `varied` changes. `quantiles`: of the ratio to the unchanged one, by their shares."""

    implementation: str
    package: str
    varied: str
    quantity: str
    dtype: str
    same_bits: bool
    quantiles: dict[float, float]
    outside: float

    @property
    def label(self) -> str:
        return f"{self.implementation}, {self.varied.replace('_', ' ')}: {self.quantity}"


def read_invariance(line: fields.Line) -> Invariance:
    """Raises ValueError where a field is missing or of another type."""
    quantiles = fields.table(line, "ratio_quantiles")
    return Invariance(
        fields.text(line, "implementation"),
        fields.text(line, "package", ""),
        fields.text(line, "varied"),
        fields.text(line, "quantity"),
        fields.text(line, "dtype", ""),
        fields.flag(line, "same_bits"),
        {float(share): fields.number(quantiles, share) for share in sorted(quantiles, key=float)},
        fields.number(line, "outside_1e-3", math.nan),
    )


def invariance_section(found: Sequence[Invariance]) -> Section:
    kept = sum(each.same_bits for each in found)
    summary = f"{kept} of {len(found)} keep every bit"
    blocks: list[Block] = [*_ranges(found), _invariance_table(found)]
    title = "Invariance to batch, order, threads and shards"
    return Section("invariance", title, len(found), Mark.NONE, summary, blocks)


def _ranges(found: Sequence[Invariance]) -> list[Picture]:
    moved = [each for each in found if not each.same_bits and _finite(each)]
    moved.sort(key=lambda each: min(_finite(each)) - max(_finite(each)))
    ranges = []
    for each in moved[:_MOST_RANGES]:
        values = _finite(each)
        middle = each.quantiles.get(0.5, values[len(values) // 2])
        ranges.append(Range(each.label, min(values), middle, max(values)))
    if not ranges:
        return []
    left_out = len(moved) - len(ranges)
    caption = "From the lowest to the highest quantile; the dot is the median. Without those that keep every bit."
    caption += f" The {len(ranges)} widest; {left_out} more are in the table." if left_out else ""
    says = "; ".join(f"{r.label}: {digits(r.low, 6)} to {digits(r.high, 6)}" for r in ranges)
    plot = range_chart(
        "How far results move", "ratio to the unchanged result, minus 1", ranges, 1.0
    )
    return [Picture("invariance", caption, says, plot)]


def _finite(each: Invariance) -> list[float]:
    return [value for value in each.quantiles.values() if math.isfinite(value)]


def _invariance_table(found: Sequence[Invariance]) -> Table:
    shares = sorted({share for each in found for share in each.quantiles})
    heads = (
        "implementation",
        "varied",
        "quantity",
        "dtype",
        "bits",
        *(f"q {share:g}" for share in shares),
        "outside 1 ± 0.001",
    )
    rows = []
    for each in found:
        quantiles = [each.quantiles.get(share) for share in shares]
        rows.append(
            (
                plain(each.implementation, title=each.package),
                plain(each.varied.replace("_", " ")),
                plain(each.quantity),
                plain(each.dtype),
                outcome(True, "same") if each.same_bits else Cell("differ", Mark.WARN),
                *(figure("" if value is None else digits(value, 7)) for value in quantiles),
                figure(f"{100 * each.outside:.3g} %" if math.isfinite(each.outside) else ""),
            )
        )
    return Table(heads, tuple(rows))
