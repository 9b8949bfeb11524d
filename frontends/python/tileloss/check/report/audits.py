"""Audit lines: a table of implementations against cases, and what failed or was refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tileloss.check.report import blocks
from tileloss.check.report.blocks import (
    Block,
    Cell,
    Columns,
    Fold,
    Mark,
    Section,
    Table,
    known,
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


def status_cell(status: str, title: str = "", word: str = "") -> Cell:
    mark, usual = STATUSES.get(status, (Mark.WARN, status))
    return Cell(word or usual, mark, title=title)


@dataclass(frozen=True)
class Audited:
    """A line: a case that an implementation was given."""

    implementation: str
    case: str
    status: str
    package: str = ""
    gate: str = ""
    value: float = math.nan
    limit: float = math.nan
    message: str = ""
    looks_like: str = ""

    @property
    def cell(self) -> Cell:
        return status_cell(self.status)

    @property
    def who(self) -> str:
        return f"{self.implementation} ({self.package})" if self.package else self.implementation


_DETAILS: Columns[Audited] = {
    "implementation": lambda each: plain(each.who),
    "case": lambda each: plain(each.case),
    "result": lambda each: each.cell,
    "gate": lambda each: plain(each.gate),
    "value": lambda each: known(each.value),
    "limit": lambda each: known(each.limit),
    "message": lambda each: plain(each.message),
    "looks like": lambda each: plain(each.looks_like),
}


def section(audited: Sequence[Audited]) -> Section:
    counts = Counter(each.cell.text for each in audited)
    summary = blocks.joined(f"{number} {word}" for word, number in counts.items())
    failed = [each for each in audited if each.cell.mark is Mark.FAIL]
    others = [each for each in audited if each.cell.mark is Mark.WARN]
    mark = Mark.FAIL if failed else Mark.PASS if counts["pass"] else Mark.NONE
    found: list[Block] = [_matrix(audited)]
    if failed:
        found.append(blocks.table(failed, _DETAILS, "All that failed"))
    if others:
        found.append(Fold("All that was refused", Mark.NONE, (blocks.table(others, _DETAILS),)))
    return Section("audit", "Audit of implementations", len(audited), mark, summary, found)


def _matrix(audited: Sequence[Audited]) -> Table:
    """Of the lines for the same cell the last one counts."""
    cells = {(each.who, each.case): each for each in audited}
    implementations = dict.fromkeys(each.who for each in audited)
    rows = []
    for case in dict.fromkeys(each.case for each in audited):
        found = [cells.get((who, case)) for who in implementations]
        rows.append((plain(case), *(plain("") if each is None else _cell(each) for each in found)))
    return Table(("case", *implementations), tuple(rows))


def _cell(each: Audited) -> Cell:
    return status_cell(each.status, each.message, each.gate if each.status == "failed" else "")
