"""gradcheck's and judge's lines: gates, errors, mutants, strict findings, and the stages of one row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from tileloss.check.report import blocks, fields
from tileloss.check.report.bars import Bar, Group, Look, Panel, Row, bar_chart
from tileloss.check.report.blocks import (
    Block,
    Cell,
    Columns,
    Fold,
    Mark,
    Picture,
    Section,
    count,
    digits,
    figure,
    joined,
    outcome,
    plain,
)
from tileloss.check.report.fields import Line

# Of single checks, and of checks in one picture, those that fail first; the tables have all.
_MOST_PICTURES, _MOST_ROWS = 12, 40


@dataclass(frozen=True)
class Gate:
    """Of gates whose limit is 0 nothing may be wrong at all: they have no share of it."""

    passed: bool
    name: str
    value: float
    limit: float

    @property
    def share(self) -> float:
        """Of the limit; NaN where the value is none, or the limit 0 and the value is not."""
        if self.value == 0:
            return 0.0
        return self.value / self.limit if self.limit > 0 else math.nan


@dataclass(frozen=True)
class Mutant:
    name: str
    planted: bool
    caught_by: list[str]

    @property
    def is_missed(self) -> bool:
        return self.planted and not self.caught_by


@dataclass(frozen=True)
class Check:
    """A line. `scalars`: everything else that it says."""

    loss: str
    passed: bool
    gates: list[Gate]
    mutants: list[Mutant]
    findings: list[str]
    stages: list[Line]
    scalars: dict[str, Any]
    tool: str
    dtype: str
    trace: Line
    config: str = ""
    producer: str = ""

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

    @property
    def caught(self) -> str:
        """How many of the planted mutants."""
        planted = [mutant for mutant in self.mutants if mutant.planted]
        missed = sum(mutant.is_missed for mutant in planted)
        return f"{len(planted) - missed} of {len(planted)}" if self.mutants else ""


def read(line: Line) -> Check:
    """Raises ValueError where a field is missing or of another type."""
    gates = [
        fields.read(Gate, gate, passed=fields.value(gate, "pass", "bool"))
        for gate in fields.value(line, "gates", "list[Line]")
    ]
    trace = fields.value(line, "trace", "Line")
    if not gates and not trace:
        raise ValueError("gates: expected a list with at least one gate, or a trace")
    known = ("tool", "version", "config", "loss", "preset", "dtype", "producer", "pass")
    scalars = {
        name: value
        for name, value in line.items()
        if name not in known and isinstance(value, str | int | float)
    }
    if options := fields.value(line, "options", "Line"):
        scalars["options"] = json.dumps(options)
    words = fields.value(line, "loss", "str"), fields.value(line, "preset", "str", "")
    return fields.read(
        Check,
        line,
        loss=joined(words).replace(",", ""),
        passed=fields.value(line, "pass", "bool"),
        gates=gates,
        mutants=[fields.read(Mutant, m) for m in fields.value(line, "mutants", "list[Line]")],
        findings=fields.value(fields.value(line, "strict", "Line"), "findings", "list[str]"),
        stages=fields.value(trace, "stages", "list[Line]"),
        scalars=scalars,
    )


_Numbered = tuple[int, Check]
_OVERVIEW: Columns[_Numbered] = {
    "": lambda each: figure(str(each[0])),
    "result": lambda each: outcome(each[1].passed),
    "config": lambda each: plain(each[1].label, title=each[1].config),
    "loss": lambda each: plain(each[1].loss),
    "dtype": lambda each: plain(each[1].dtype),
    "shape": lambda each: plain(each[1].shape),
    "nearest gate": lambda each: plain(each[1].worst.name if each[1].worst else ""),
    "of its limit": lambda each: figure(_share(each[1].worst) if each[1].worst else ""),
    "mutants": lambda each: plain(each[1].caught),
    "made by": lambda each: plain(each[1].producer or str(each[1].scalars.get("kernel/isa", ""))),
    "tool": lambda each: plain(each[1].tool),
}


def section(checks: Sequence[Check]) -> Section:
    failed = [check for check in checks if not check.passed]
    passed = len(checks) - len(failed)
    planted = [m for check in checks for m in check.mutants if m.planted]
    summary = f"{passed} of {count(len(checks), 'check')} pass"
    if planted:
        caught = sum(not mutant.is_missed for mutant in planted)
        summary += f"; {caught} of {count(len(planted), 'planted bug')} caught"
    mark = Mark.FAIL if failed else Mark.PASS
    numbered = list(enumerate(checks, start=1))
    by_need = sorted(numbered, key=lambda each: each[1].passed)
    pictured = {number for number, _ in by_need[:_MOST_PICTURES]}
    found: list[Block] = [blocks.table(numbered, _OVERVIEW), *_worst_gates(numbered)]
    found += [_fold(number, check, number in pictured) for number, check in numbered]
    return Section("checks", "Checks against the oracle", len(checks), mark, summary, found)


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


def _worst_gates(checks: list[_Numbered]) -> list[Picture]:
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
    found: list[Block] = []
    if check.failures:
        found.append(f"Failed: {', '.join(check.failures)}.")
    measured = [gate for gate in check.gates if gate.limit > 0 or not gate.passed]
    if measured and is_pictured:
        rows = [_gate_row(gate.name, gate) for gate in measured]
        exact = len(check.gates) - len(measured)
        caption = f"{count(exact, 'more gate')} without allowance: all 0." if exact else ""
        found.append(_chart(f"gates-{number}", caption, rows))
    if check.gates:
        found.append(blocks.table(check.gates, _GATES, "Gates"))
    if check.mutants:
        found.append(blocks.table(check.mutants, _MUTANTS, "Bugs planted on purpose"))
    if check.findings:
        found.append(blocks.table(check.findings, {"strict": plain}))
    if check.trace:
        caption = f"Row {check.trace.get('row')}, label {check.trace.get('label')}"
        found.append(blocks.table(check.stages, _STAGES, caption))
    if check.scalars:
        found.append(blocks.table(check.scalars.items(), _FIGURES, "Errors, times, sizes"))
    title = joined((f"{number}. {check.label}", check.loss, check.dtype, check.shape))
    mark = Mark.PASS if check.passed else Mark.FAIL
    return Fold(title, mark, tuple(found), is_open=not check.passed)


def _verdict(mutant: Mutant) -> Cell:
    if not mutant.planted:
        return Cell("without effect here", Mark.NONE)
    return outcome(not mutant.is_missed, "not caught" if mutant.is_missed else "caught")


def _written(value: object) -> Cell:
    if value is None:
        return figure("-")
    if isinstance(value, bool):
        return figure(str(value).lower())
    return figure(f"{value:.6g}" if isinstance(value, float) else str(value))


def _stage_part(name: str) -> Callable[[Line], Cell]:
    return lambda stage: _written(stage.get(name))


_GATES: Columns[Gate] = {
    "result": lambda gate: outcome(gate.passed),
    "gate": lambda gate: plain(gate.name),
    "value": lambda gate: figure(digits(gate.value)),
    "limit": lambda gate: figure(digits(gate.limit)),
}
_MUTANTS: Columns[Mutant] = {
    "result": _verdict,
    "mutant": lambda mutant: plain(mutant.name),
    "caught by": lambda mutant: plain(", ".join(mutant.caught_by)),
}
_STAGES: Columns[Line] = {
    "result": lambda stage: outcome(stage.get("pass") is True),
    "stage": lambda stage: plain(stage.get("stage", "")),
    **{name: _stage_part(name) for name in ("column", "kernel", "oracle", "difference", "allowed")},
}
_FIGURES: Columns[tuple[str, Any]] = {
    "figure": lambda each: plain(each[0]),
    "value": lambda each: _written(each[1]),
}
