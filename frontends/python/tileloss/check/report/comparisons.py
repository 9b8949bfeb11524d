"""Lines of `./dev compare --output`: time and memory by contestant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tileloss.check.report import fields
from tileloss.check.report.bars import Bar, Group, Look, Panel, Row, bar_chart
from tileloss.check.report.blocks import (
    Block,
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
class Entry:
    """A contestant's median time in seconds, and its peak memory in bytes."""

    group: str
    title: str
    memory_title: str
    name: str
    median: float
    rounds: int
    peak: float
    loss_error: float
    gradient_error: float
    machine: str

    @property
    def is_ours(self) -> bool:
        return "TileLoss" in self.name

    @property
    def family(self) -> str:
        """What its variants have in common: "torch eager" of "torch eager, float32 logits". A compiled model is none of them."""
        is_compiled = self.name.endswith(", torch.compile")
        return self.name if is_compiled else self.name.partition(",")[0]


def read(line: fields.Line) -> Entry:
    """Raises ValueError where a field is missing or of another type."""
    errors = fields.table(line, "errors")
    group = fields.text(line, "group")
    versions = fields.table(line, "versions")
    packages = [f"{name} {found}" for name, found in versions.items() if found]
    threads = f"{line['threads']} threads" if "threads" in line else ""
    words = [fields.text(line, "title", group), fields.text(line, "sizes", "")]
    return Entry(
        group,
        joined((*words, fields.text(line, "dtype", ""))),
        fields.text(line, "memory", "memory"),
        fields.text(line, "name"),
        fields.positive(line, "median_s"),
        len(fields.numbers(line, "times_s")),
        fields.amount(line, "peak_bytes"),
        fields.number(errors, "loss", math.nan),
        fields.number(errors, "gradient", math.nan),
        joined(
            (fields.text(line, "machine", ""), fields.text(line, "isa", ""), threads, *packages)
        ),
    )


def section(entries: Sequence[Entry]) -> Section:
    """Groups in the order of the lines, contestants by time."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda each: each.median):
        groups.setdefault(entry.group, []).append(entry)
    ordered = {entry.group: groups[entry.group] for entry in entries}
    machines = " ".join(dict.fromkeys(entry.machine for entry in entries))
    blocks: list[Block] = [f"{machines}. Medians; a step is a forward and a backward."]
    best = {group: _best_of_families(found) for group, found in ordered.items()}
    blocks.append(_picture("compare", "The fastest variant of each, in each group.", best))
    for group, found in ordered.items():
        if len(found) > len(best[group]):
            blocks.append(_picture(f"compare-{group}", "All variants.", {group: found}))
        blocks.append(_table(found))
    summary = "; ".join(filter(None, map(_gain, best.values()))) or count(
        len(entries), "contestant"
    )
    title = "Beside other implementations"
    return Section("compare", title, len(entries), Mark.NONE, summary, blocks)


def _best_of_families(entries: list[Entry]) -> list[Entry]:
    """By time, as they are given."""
    best: dict[str, Entry] = {}
    for entry in entries:
        best.setdefault(entry.family, entry)
    return list(best.values())


def _gain(entries: list[Entry]) -> str:
    """Ours against the fastest of the others."""
    ours = next((each for each in entries if each.is_ours), None)
    other = next((each for each in entries if not each.is_ours), None)
    if ours is None or other is None:
        return ""
    title = ours.title.partition(",")[0]
    return f"{title}: {_times(other.median / ours.median)} x as fast as {other.name}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def _picture(name: str, caption: str, groups: dict[str, list[Entry]]) -> Picture:
    charts = []
    for found in groups.values():
        rows = tuple(_row(entry) for entry in found)
        panels = Panel("time of a step"), Panel(found[0].memory_title)
        charts.append(Group(found[0].title, panels, rows))
    says = "; ".join(
        f"{each.group}, {each.name}: {seconds(each.median)}, {bytes_of(each.peak)}"
        for found in groups.values()
        for each in found
    )
    return Picture(name, caption, says, bar_chart(charts))


def _row(entry: Entry) -> Row:
    bars = Bar(entry.median, seconds(entry.median)), Bar(entry.peak, bytes_of(entry.peak))
    look = Look.OURS if entry.is_ours else Look.OTHERS
    return Row(entry.name, bars, look, is_strong=entry.is_ours)


def _table(entries: list[Entry]) -> Table:
    heads = (
        "contestant",
        "time",
        "x the fastest",
        "rounds",
        entries[0].memory_title,
        "error of loss",
        "of gradient",
    )
    rows = [
        (
            plain(each.name),
            figure(seconds(each.median)),
            figure(digits(each.median / entries[0].median)),
            figure(str(each.rounds)),
            figure(bytes_of(each.peak)),
            *(figure(digits(error, 1)) for error in (each.loss_error, each.gradient_error)),
        )
        for each in entries
    ]
    return Table(heads, tuple(rows), entries[0].title)
