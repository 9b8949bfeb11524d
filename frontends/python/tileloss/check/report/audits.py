"""Audit lines: a table of implementations against cases, and what failed or was refused."""

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
    Section,
    Table,
    digits,
    figure,
    joined,
    plain,
)

# Words and signs of a cell.
STATUSES = {
    "pass": (Mark.PASS, "pass"),
    "failed": (Mark.FAIL, "failed"),
    "crashed": (Mark.FAIL, "crashed"),
    "timeout": (Mark.FAIL, "timeout"),
    "refused": (Mark.WARN, "refused"),
    "not_installed": (Mark.NONE, "not installed"),
}


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
        return STATUSES.get(self.status, (Mark.WARN, ""))[0]

    @property
    def word(self) -> str:
        return STATUSES.get(self.status, (Mark.WARN, self.status))[1]

    @property
    def who(self) -> str:
        return f"{self.implementation} ({self.package})" if self.package else self.implementation


def read(line: fields.Line) -> Audited:
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


def section(audited: Sequence[Audited]) -> Section:
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
