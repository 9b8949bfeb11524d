"""Lines of `tileloss bench --json`: each pass against the longest roof of its run, and its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tileloss.check.report import fields
from tileloss.check.report.bars import Bar, Group, Panel, Row, bar_chart
from tileloss.check.report.blocks import (
    Block,
    Fold,
    Mark,
    Picture,
    Section,
    Table,
    bytes_of,
    count,
    digits,
    figure,
    joined,
    plain,
    seconds,
)


@dataclass(frozen=True)
class Timing:
    """A pass. Milliseconds, bytes; `planned`: NaN where no plan says."""

    case: str
    name: str
    implementation: str
    median: float
    least: float
    roof: float
    rate: str
    scratch: float
    planned: float
    buffers: tuple[tuple[str, float], ...]
    runs_as: str
    is_steady: bool

    @property
    def label(self) -> str:
        words = self.name.replace("_", " ")
        return words if self.implementation == "kernel" else f"{words}, {self.implementation}"


def read(line: fields.Line) -> Timing:
    """Raises ValueError where a field is missing or of another type."""
    hidden = line.get("hidden")
    case = f"{fields.text(line, 'loss')} {fields.text(line, 'preset', '')}".strip()
    case += f" [{fields.number(line, 'tokens'):.0f}, {fields.number(line, 'vocab'):.0f}]"
    case += f" hidden {hidden}" if hidden else ""
    case += f" {fields.text(line, 'dtype')}" + (" in place" if line.get("in_place") else "")
    options = fields.table(line, "options")
    case += "".join(f" {name}={value}" for name, value in options.items())
    tflops, gb = (fields.number(line, name, math.nan) for name in ("tflops", "gb_per_s"))
    buffers = fields.table(line, "buffers")
    threads = f"{line['threads']} threads" if "threads" in line else ""
    return Timing(
        case,
        fields.text(line, "pass"),
        fields.text(line, "impl"),
        fields.positive(line, "median_ms"),
        fields.positive(line, "min_ms"),
        fields.positive(line, "roof_ms"),
        f"{tflops:.3g} TFLOP/s" if math.isfinite(tflops) else f"{gb:.3g} GB/s",
        fields.number(line, "mem_scratch", math.nan),
        fields.number(line, "workspace_bytes", math.nan),
        tuple((name, fields.amount(buffers, name)) for name in buffers),
        joined((fields.text(line, "isa", ""), fields.text(line, "schedule", ""), threads)),
        line.get("roofs_steady") is not False,
    )


def section(timings: Sequence[Timing]) -> Section:
    cases = list(dict.fromkeys(timing.case for timing in timings))
    groups = [_group(case, [t for t in timings if t.case == case]) for case in cases]
    nearest = min(timings, key=lambda timing: timing.median / timing.roof)
    summary = (
        f"{count(len(timings), 'time')}; the nearest to its roof, {nearest.median / nearest.roof:.2f} x: "
        f"{nearest.case}, {nearest.label}"
    )
    caption = (
        "Median times, and with a short line the roof: the longest of what no step can avoid on this machine. Memory is what a "
        "call was measured to take above its inputs and outputs, the short line what its plan asked for."
    )
    details = tuple(f"{t.case}, {t.label}: {_time(t)}" for t in timings)
    blocks: list[Block] = [
        Picture("bench", caption, "; ".join(details), bar_chart(groups)),
        _table(timings),
    ]
    if not all(timing.is_steady for timing in timings):
        blocks.insert(
            0,
            "The roofs at the start and at the end of a run differed by more than 15 %: the machine was not quiet.",
        )
    blocks += _buffers(timings)
    title = "Times against the machine's roofs"
    return Section("bench", title, len(timings), Mark.NONE, summary, blocks, details)


def _time(timing: Timing) -> str:
    return f"{seconds(timing.median / 1000)}, {timing.median / timing.roof:.2f} x roof"


def _memory(value: float) -> str:
    return bytes_of(value) if math.isfinite(value) else ""


def _group(case: str, timings: list[Timing]) -> Group:
    panels = Panel("time"), Panel("memory")
    rows = []
    for timing in timings:
        scratch = timing.scratch if math.isfinite(timing.scratch) else 0.0
        planned = timing.planned if math.isfinite(timing.planned) else None
        time = Bar(timing.median, _time(timing), timing.roof)
        rows.append(Row(timing.label, (time, Bar(scratch, _memory(timing.scratch), planned))))
    return Group(case, panels, tuple(rows))


def _table(timings: Sequence[Timing]) -> Table:
    heads = (
        "case",
        "pass",
        "median",
        "min",
        "roof",
        "ratio",
        "rate",
        "memory",
        "planned",
        "runs as",
        "roofs steady",
    )
    rows = [
        (
            plain(t.case),
            plain(t.label),
            *(figure(seconds(ms / 1000)) for ms in (t.median, t.least, t.roof)),
            figure(digits(t.median / t.roof)),
            figure(t.rate),
            figure(_memory(t.scratch)),
            figure(_memory(t.planned)),
            plain(t.runs_as),
            plain("yes" if t.is_steady else "no"),
        )
        for t in timings
    ]
    return Table(heads, tuple(rows))


def _buffers(timings: Sequence[Timing]) -> list[Fold]:
    """What the plans set aside."""
    rows = [
        (plain(t.case), plain(t.label), plain(name), figure(bytes_of(size)))
        for t in timings
        for name, size in sorted(t.buffers, key=lambda each: -each[1])
    ]
    if not rows:
        return []
    table = Table(("case", "pass", "buffer", "bytes"), tuple(rows))
    return [Fold("What the memory is for", Mark.NONE, (table,))]
