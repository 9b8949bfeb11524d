"""Lines of `./dev compare --output`: time and memory by contestant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tileloss.check.report import blocks, fields
from tileloss.check.report.bars import Bar, Group, Look, Panel, Row, bar_chart
from tileloss.check.report.blocks import (
    Block,
    Columns,
    Mark,
    Picture,
    Section,
    bytes_of,
    digits,
    figure,
    joined,
    known,
    plain,
    seconds,
)
from tileloss.check.report.fields import Amount, Line, Positive


@dataclass(frozen=True)
class Entry:
    """A contestant's median time in seconds, and its peak memory in bytes; `memory`: above what. On a GPU what was timed, and
    the host's seconds to enqueue a step. `rate`: of what shows how fast the machine is at best."""

    title: str
    loss_error: float
    gradient_error: float
    machine: str
    group: str
    name: str
    median_s: Positive
    peak_bytes: Amount
    times_s: list[float]
    memory: str = "memory"
    host_s: float = math.nan
    timed_by: str = ""
    rate: str = ""

    @property
    def is_ours(self) -> bool:
        return "TileLoss" in self.name

    @property
    def family(self) -> str:
        """What its variants have in common: "torch eager" of "torch eager, float32 logits". A compiled model is none of them."""
        is_compiled = self.name.endswith(", torch.compile")
        return self.name if is_compiled else self.name.partition(",")[0]


@dataclass(frozen=True)
class Failure:
    """A contestant without figures."""

    machine: str
    title: str
    name: str
    failed: str


def read(line: Line) -> Entry | Failure:
    """Raises ValueError where a field is missing or of another type."""
    errors = fields.value(line, "errors", "Line")
    versions = fields.value(line, "versions", "Line")
    packages = [f"{name} {found}" for name, found in versions.items() if found]
    title = fields.value(line, "title", "str", fields.value(line, "group", "str"))
    sizes, dtype, machine, isa = (
        fields.value(line, name, "str", "") for name in ("sizes", "dtype", "machine", "isa")
    )
    place = joined((machine, isa, fields.threads(line), *packages))
    title = joined((title, sizes, dtype))
    if "failed" in line:
        return fields.read(Failure, line, title=title, machine=place)
    return fields.read(
        Entry,
        line,
        title=title,
        loss_error=fields.value(errors, "loss", "float", math.nan),
        gradient_error=fields.value(errors, "gradient", "float", math.nan),
        machine=place,
    )


def section(found: Sequence[Entry | Failure]) -> Section:
    """Groups in the order of the lines, contestants by time."""
    entries = [each for each in found if isinstance(each, Entry)]
    failures = [each for each in found if isinstance(each, Failure)]
    groups: dict[str, list[Entry]] = {entry.group: [] for entry in entries}
    for entry in sorted(entries, key=lambda each: each.median_s):
        groups[entry.group].append(entry)
    machines = " ".join(dict.fromkeys(each.machine for each in found))
    shown: list[Block] = [f"{machines}. Medians; a step is a forward and a backward."]
    best = {group: _best_of_families(members) for group, members in groups.items()}
    losses = {group: members for group, members in best.items() if not members[0].rate}
    if losses:
        shown.append(_picture("compare", "The fastest variant of each, in each group.", losses))
    for group, members in groups.items():
        if len(members) > len(best[group]):
            shown.append(_picture(f"compare-{group}", "All variants.", {group: members}))
        shown.append(blocks.table(members, _columns(members), members[0].title))
    if failures:
        shown.append(blocks.table(failures, FAILURES, "Not measured"))
    gains = "; ".join(filter(None, map(_gain, best.values())))
    summary = gains or blocks.count(len(entries), "contestant")
    summary += f"; {len(failures)} not measured" if failures else ""
    title = "Beside other implementations"
    return Section("compare", title, len(found), Mark.NONE, summary, shown)


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
    ratio = other.median_s / ours.median_s
    times = f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"
    return f"{ours.title.partition(',')[0]}: {times} x as fast as {other.name}"


def _picture(name: str, caption: str, groups: dict[str, list[Entry]]) -> Picture:
    charts = []
    for found in groups.values():
        panels = Panel("time of a step"), Panel(found[0].memory)
        charts.append(Group(found[0].title, panels, tuple(map(_row, found))))
    says = "; ".join(
        f"{each.group}, {each.name}: {seconds(each.median_s)}, {bytes_of(each.peak_bytes)}"
        for found in groups.values()
        for each in found
    )
    return Picture(name, caption, says, bar_chart(charts))


def _row(entry: Entry) -> Row:
    time = Bar(entry.median_s, seconds(entry.median_s))
    memory = Bar(entry.peak_bytes, bytes_of(entry.peak_bytes))
    look = Look.OURS if entry.is_ours else Look.OTHERS
    return Row(entry.name, (time, memory), look, is_strong=entry.is_ours)


FAILURES: Columns[Failure] = {
    "group": lambda each: plain(each.title),
    "contestant": lambda each: plain(each.name),
    "why": lambda each: plain(each.failed),
}


def _columns(entries: list[Entry]) -> Columns[Entry]:
    """Without those that no entry has anything in."""
    fastest = entries[0]
    columns: Columns[Entry] = {
        "contestant": lambda each: plain(each.name),
        "time": lambda each: figure(seconds(each.median_s)),
        "x the fastest": lambda each: figure(digits(each.median_s / fastest.median_s)),
        "rounds": lambda each: figure(str(len(each.times_s))),
        fastest.memory: lambda each: figure(bytes_of(each.peak_bytes)),
        "error of loss": lambda each: known(each.loss_error, lambda value: digits(value, 1)),
        "of gradient": lambda each: known(each.gradient_error, lambda value: digits(value, 1)),
        "rate": lambda each: figure(each.rate),
        "host": lambda each: known(each.host_s, seconds),
        "timed": lambda each: plain(each.timed_by),
    }
    return {
        name: cell for name, cell in columns.items() if any(cell(each).text for each in entries)
    }
