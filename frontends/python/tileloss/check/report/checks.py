"""gradcheck's and judge's lines: gates, errors, mutants, strict findings, and the stages of one row."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from tileloss.check.report import fields
from tileloss.check.report.bars import Bar, Group, Look, Panel, Row, bar_chart
from tileloss.check.report.blocks import (
    Block,
    Cell,
    Fold,
    Mark,
    Picture,
    Section,
    Table,
    count,
    digits,
    figure,
    joined,
    outcome,
    plain,
)

# Of single checks, and of checks in one picture, those that fail first; the tables have all.
_MOST_PICTURES, _MOST_ROWS = 12, 40


@dataclass(frozen=True)
class Gate:
    """Of gates whose limit is 0 nothing may be wrong at all: they have no share of it."""

    name: str
    value: float
    limit: float
    passed: bool

    @property
    def share(self) -> float:
        """Of the limit; NaN where the value is none, or the limit 0 and the value is not."""
        if self.value == 0:
            return 0.0
        return self.value / self.limit if self.limit > 0 else math.nan


@dataclass(frozen=True)
class Mutant:
    name: str
    is_planted: bool
    caught_by: tuple[str, ...]

    @property
    def is_missed(self) -> bool:
        return self.is_planted and not self.caught_by


@dataclass(frozen=True)
class Check:
    """A line. `scalars`: everything else that it says."""

    tool: str
    config: str
    loss: str
    dtype: str
    producer: str
    passed: bool
    gates: tuple[Gate, ...]
    mutants: tuple[Mutant, ...]
    findings: tuple[str, ...]
    trace: fields.Line
    stages: list[fields.Line]
    scalars: dict[str, Any]

    @property
    def label(self) -> str:
        return PurePath(self.config).stem.removeprefix("gradcheck_") or self.loss

    @property
    def worst(self) -> Gate | None:
        """The first that failed, else the one nearest to its limit."""
        failed = [gate for gate in self.gates if not gate.passed]
        measured = [gate for gate in self.gates if math.isfinite(gate.share)]
        return next(iter(failed), None) or max(measured, key=lambda gate: gate.share, default=None)

    @property
    def shape(self) -> str:
        names = ("shape/batch_size", "shape/seq_len", "shape/hidden_size", "shape/vocab_size")
        found = [str(self.scalars[name]) for name in names if name in self.scalars]
        return f"[{', '.join(found)}]" if found else ""

    @property
    def failures(self) -> list[str]:
        names = [gate.name for gate in self.gates if not gate.passed]
        names += [f"mutant {mutant.name}" for mutant in self.mutants if mutant.is_missed]
        return names + (["strict"] if self.findings else [])


def read(line: fields.Line) -> Check:
    """Raises ValueError where a field is missing or of another type."""
    gates = [
        Gate(
            fields.text(gate, "name"),
            fields.number(gate, "value"),
            fields.number(gate, "limit"),
            fields.flag(gate, "pass"),
        )
        for gate in fields.tables(line, "gates")
    ]
    mutants = [
        Mutant(
            fields.text(mutant, "name"),
            fields.flag(mutant, "planted"),
            tuple(fields.texts(mutant, "caught_by")),
        )
        for mutant in fields.tables(line, "mutants")
    ]
    strict = fields.table(line, "strict")
    trace = fields.table(line, "trace")
    if not gates and not trace:
        raise ValueError("gates: expected a list with at least one gate, or a trace")
    known = ("tool", "version", "config", "loss", "preset", "dtype", "producer", "pass")
    scalars = {
        name: value
        for name, value in line.items()
        if name not in known and isinstance(value, str | int | float)
    }
    options = fields.table(line, "options")
    if options:
        scalars["options"] = json.dumps(options)
    return Check(
        fields.text(line, "tool"),
        fields.text(line, "config", ""),
        joined((fields.text(line, "loss"), fields.text(line, "preset", ""))).replace(",", ""),
        fields.text(line, "dtype"),
        fields.text(line, "producer", ""),
        fields.flag(line, "pass"),
        tuple(gates),
        tuple(mutants),
        tuple(fields.texts(strict, "findings")),
        trace,
        fields.tables(trace, "stages"),
        scalars,
    )


def section(checks: Sequence[Check]) -> Section:
    failed = [check for check in checks if not check.passed]
    passed = len(checks) - len(failed)
    planted = [m for check in checks for m in check.mutants if m.is_planted]
    summary = f"{passed} of {count(len(checks), 'check')} pass"
    if planted:
        caught = sum(not mutant.is_missed for mutant in planted)
        summary += f"; {caught} of {count(len(planted), 'planted bug')} caught"
    mark = Mark.FAIL if failed else Mark.PASS
    numbered = list(enumerate(checks, start=1))
    blocks: list[Block] = [_overview(numbered), *_worst_gates(numbered)]
    by_need = sorted(numbered, key=lambda each: each[1].passed)
    pictured = {number for number, _ in by_need[:_MOST_PICTURES]}
    blocks += [_fold(number, check, number in pictured) for number, check in numbered]
    return Section("checks", "Checks against the oracle", len(checks), mark, summary, blocks)


def _overview(checks: list[tuple[int, Check]]) -> Table:
    heads = (
        "",
        "result",
        "config",
        "loss",
        "dtype",
        "shape",
        "nearest gate",
        "of its limit",
        "mutants",
        "made by",
        "tool",
    )
    rows = []
    for number, check in checks:
        worst = check.worst
        caught = sum(bool(mutant.caught_by) for mutant in check.mutants)
        planted = sum(mutant.is_planted for mutant in check.mutants)
        made_by = check.producer or str(check.scalars.get("kernel/isa", ""))
        rows.append(
            (
                figure(str(number)),
                outcome(check.passed),
                plain(check.label, title=check.config),
                plain(check.loss),
                plain(check.dtype),
                plain(check.shape),
                plain(worst.name if worst else ""),
                figure(_share(worst) if worst else ""),
                plain(f"{caught} of {planted}" if check.mutants else ""),
                plain(made_by),
                plain(check.tool),
            )
        )
    return Table(heads, tuple(rows))


def _share(gate: Gate) -> str:
    if gate.limit == 0:
        return "0 allowed" if gate.passed else f"{digits(gate.value)}, 0 allowed"
    return digits(gate.share)


def _gate_row(label: str, gate: Gate) -> Row:
    look = Look.OURS if gate.passed else Look.FAIL
    return Row(label, (Bar(gate.share, _share(gate)),), look)


def _chart(name: str, caption: str, rows: list[Row]) -> Picture:
    panel = Panel("share of the limit, which is the line at 1", is_log=True, limit=1.0)
    says = "; ".join(f"{row.label}: {row.bars[0].text}" for row in rows)
    return Picture(name, caption, says, bar_chart([Group("", (panel,), tuple(rows))]))


def _worst_gates(checks: list[tuple[int, Check]]) -> list[Picture]:
    worst = [(number, check, check.worst) for number, check in checks]
    found = [(number, check, gate) for number, check, gate in worst if gate is not None]
    if len(found) < 2:
        return []
    caption = "How near each check comes to a limit, in the gate that is nearest."
    if len(found) > _MOST_ROWS:
        found.sort(key=lambda each: (each[2].passed, -_finite(each[2].share)))
        found = found[:_MOST_ROWS]
        caption += f" The {_MOST_ROWS} that come nearest."
    rows = [_gate_row(f"{number}. {check.label}", gate) for number, check, gate in found]
    return [_chart("gates", caption, rows)]


def _finite(share: float) -> float:
    return share if math.isfinite(share) else math.inf


def _fold(number: int, check: Check, is_pictured: bool) -> Fold:
    blocks: list[Block] = []
    if check.failures:
        blocks.append(f"Failed: {', '.join(check.failures)}.")
    measured = [gate for gate in check.gates if gate.limit > 0 or not gate.passed]
    if measured and is_pictured:
        rows = [_gate_row(gate.name, gate) for gate in measured]
        exact = len(check.gates) - len(measured)
        caption = f"{count(exact, 'more gate')} without allowance: all 0." if exact else ""
        blocks.append(_chart(f"gates-{number}", caption, rows))
    if check.gates:
        blocks.append(_gate_table(check.gates))
    if check.mutants:
        blocks.append(_mutant_table(check.mutants))
    if check.findings:
        blocks.append(Table(("strict",), tuple((plain(each),) for each in check.findings)))
    if check.trace:
        blocks.append(_trace_table(check))
    figures = [(plain(name), figure(_written(value))) for name, value in check.scalars.items()]
    if figures:
        blocks.append(Table(("figure", "value"), tuple(figures), "Errors, times, sizes"))
    title = joined((f"{number}. {check.label}", check.loss, check.dtype, check.shape))
    mark = Mark.PASS if check.passed else Mark.FAIL
    return Fold(title, mark, tuple(blocks), is_open=not check.passed)


def _gate_table(gates: Sequence[Gate]) -> Table:
    rows = [
        (outcome(g.passed), plain(g.name), figure(digits(g.value)), figure(digits(g.limit)))
        for g in gates
    ]
    return Table(("result", "gate", "value", "limit"), tuple(rows), "Gates")


def _mutant_table(mutants: Sequence[Mutant]) -> Table:
    def verdict(mutant: Mutant) -> Cell:
        if not mutant.is_planted:
            return Cell("without effect here", Mark.NONE)
        return outcome(not mutant.is_missed, "not caught" if mutant.is_missed else "caught")

    rows = [(verdict(m), plain(m.name), plain(", ".join(m.caught_by))) for m in mutants]
    return Table(("result", "mutant", "caught by"), tuple(rows), "Bugs planted on purpose")


def _trace_table(check: Check) -> Table:
    heads = ("column", "kernel", "oracle", "difference", "allowed")
    rows = []
    for stage in check.stages:
        cells = [figure(_written(stage.get(name))) for name in heads]
        passed = stage.get("pass") is True
        rows.append((outcome(passed), plain(stage.get("stage", "")), *cells))
    caption = f"Row {check.trace.get('row')}, label {check.trace.get('label')}"
    return Table(("result", "stage", *heads), tuple(rows), caption)


def _written(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
