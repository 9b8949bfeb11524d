"""Lines of `tileloss bench --json`: each pass against the longest roof of its run, and its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tileloss.check.report import blocks, fields
from tileloss.check.report.bars import Bar, Group, Panel, Row, bar_chart
from tileloss.check.report.blocks import (
    Block,
    Columns,
    Fold,
    Mark,
    Picture,
    Section,
    Table,
    bytes_of,
    figure,
    known,
    plain,
    seconds,
)
from tileloss.check.report.fields import Line, Positive


@dataclass(frozen=True)
class Timing:
    """A pass. Milliseconds, bytes; `workspace_bytes`: as planned, NaN where no plan says."""

    case: str
    name: str
    rate: str
    runs_as: str
    buffers: dict[str, float]
    is_steady: bool
    impl: str
    median_ms: Positive
    min_ms: Positive
    roof_ms: Positive
    mem_scratch: float = math.nan
    workspace_bytes: float = math.nan

    @property
    def label(self) -> str:
        words = self.name.replace("_", " ")
        return words if self.impl == "kernel" else f"{words}, {self.impl}"

    @property
    def ratio(self) -> float:
        return self.median_ms / self.roof_ms


def read(line: Line) -> Timing:
    """Raises ValueError where a field is missing or of another type."""
    hidden = line.get("hidden")
    case = f"{fields.value(line, 'loss', 'str')} {fields.value(line, 'preset', 'str', '')}".strip()
    tokens, vocab = (fields.value(line, name, "float") for name in ("tokens", "vocab"))
    case += f" [{tokens:.0f}, {vocab:.0f}]" + (f" hidden {hidden}" if hidden else "")
    in_place = " in place" if line.get("in_place") else ""
    case += f" {fields.value(line, 'dtype', 'str')}{in_place}"
    options = fields.value(line, "options", "Line")
    case += "".join(f" {name}={value}" for name, value in options.items())
    tflops, gb = (fields.value(line, name, "float", math.nan) for name in ("tflops", "gb_per_s"))
    buffers = fields.value(line, "buffers", "Line")
    runs_as = [fields.value(line, name, "str", "") for name in ("isa", "schedule", "cuda_kernel")]
    return fields.read(
        Timing,
        line,
        case=case,
        name=fields.value(line, "pass", "str"),
        rate=f"{tflops:.3g} TFLOP/s" if math.isfinite(tflops) else f"{gb:.3g} GB/s",
        buffers={name: fields.value(buffers, name, "Amount") for name in buffers},
        runs_as=blocks.joined([*runs_as, fields.threads(line)]),
        is_steady=line.get("roofs_steady") is not False,
    )


_COLUMNS: Columns[Timing] = {
    "case": lambda t: plain(t.case),
    "pass": lambda t: plain(t.label),
    "median": lambda t: figure(seconds(t.median_ms / 1000)),
    "min": lambda t: figure(seconds(t.min_ms / 1000)),
    "roof": lambda t: figure(seconds(t.roof_ms / 1000)),
    "ratio": lambda t: figure(blocks.digits(t.ratio)),
    "rate": lambda t: figure(t.rate),
    "memory": lambda t: known(t.mem_scratch, bytes_of),
    "planned": lambda t: known(t.workspace_bytes, bytes_of),
    "runs as": lambda t: plain(t.runs_as),
    "roofs steady": lambda t: plain("yes" if t.is_steady else "no"),
}


def section(timings: Sequence[Timing]) -> Section:
    cases = list(dict.fromkeys(timing.case for timing in timings))
    groups = [_group(case, [t for t in timings if t.case == case]) for case in cases]
    nearest = min(timings, key=lambda timing: timing.ratio)
    summary = (
        f"{blocks.count(len(timings), 'time')}; the nearest to its roof, {nearest.ratio:.2f} x: "
        f"{nearest.case}, {nearest.label}"
    )
    caption = (
        "Median times, and with a short line the roof: the longest of what no step can avoid on this machine. Memory is what a "
        "call was measured to take above its inputs and outputs, the short line what its plan asked for."
    )
    details = tuple(f"{t.case}, {t.label}: {_time(t)}" for t in timings)
    found: list[Block] = []
    if not all(timing.is_steady for timing in timings):
        found.append(
            "The roofs at the start and at the end of a run differed by more than 15 %: the machine was not quiet."
        )
    found.append(Picture("bench", caption, "; ".join(details), bar_chart(groups)))
    found += [blocks.table(timings, _COLUMNS), *_buffers(timings)]
    title = "Times against the machine's roofs"
    return Section("bench", title, len(timings), Mark.NONE, summary, found, details)


def _time(timing: Timing) -> str:
    return f"{seconds(timing.median_ms / 1000)}, {timing.ratio:.2f} x roof"


def _group(case: str, timings: list[Timing]) -> Group:
    rows = []
    for timing in timings:
        scratch = timing.mem_scratch if math.isfinite(timing.mem_scratch) else 0.0
        planned = timing.workspace_bytes if math.isfinite(timing.workspace_bytes) else None
        memory = Bar(scratch, known(timing.mem_scratch, bytes_of).text, planned)
        rows.append(
            Row(timing.label, (Bar(timing.median_ms, _time(timing), timing.roof_ms), memory))
        )
    return Group(case, (Panel("time"), Panel("memory")), tuple(rows))


def _buffers(timings: Sequence[Timing]) -> list[Fold]:
    """What the plans set aside."""
    rows = [
        (plain(t.case), plain(t.label), plain(name), figure(bytes_of(size)))
        for t in timings
        for name, size in sorted(t.buffers.items(), key=lambda each: -each[1])
    ]
    table = Table(("case", "pass", "buffer", "bytes"), tuple(rows))
    return [Fold("What the memory is for", Mark.NONE, (table,))] if rows else []
