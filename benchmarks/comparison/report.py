"""The Markdown table, the JSON file, the lines for `tileloss report`, the page of docs/measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tileloss
from comparison import training
from comparison.bars import Verdict
from comparison.contestants import GROUPS, Group
from comparison.inputs import Shape
from comparison.measure import Measurement
from tileloss.tools.files import write_whole

Settings = dict[str, object]
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
ON_DEVICE = (
    "A step is a forward and a backward; medians by the device's\n"
    "clock, of graph replays where a step can be captured. Caches are emptied before each. Memory: the peak of torch's\n"
    "allocator. Errors: relative to float64; of logits' gradients the label's column and all others apart, the worse; of a\n"
    "model to float32, its head's rows and its body's gradients apart."
)
BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"


PACKAGES = (
    *("torch", "triton", "trl", "transformers", "liger-kernel", "cut-cross-entropy"),
    *("quack-kernels", "jax", "optax", "tokamax"),
)


class NoMarkers(Exception):
    """The file has no place for the table."""


def processor() -> str:
    """Its name."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown processor"


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {package: installed(package) for package in PACKAGES}


def seconds(value: float) -> str:
    """Three digits, in ms below 2 s."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def megabytes(value: int) -> str:
    return f"{value / 1e6:.3g} MB" if value < 1e9 else f"{value / 1e6:.0f} MB"


def rate(measurement: Measurement, shape: Shape) -> str:
    """Of a roof; else nothing."""
    if measurement.contestant.work is None or measurement.failed:
        return ""
    work, unit = measurement.contestant.work(shape)
    return f"{work / measurement.median / UNITS[unit]:.4g} {unit}"


def row(measurement: Measurement, shape: Shape) -> str:
    name, errors = measurement.contestant.name, measurement.errors
    if measurement.failed:
        return f"| {name} | failed: {measurement.failed} |"
    found = rate(measurement, shape)
    cells = [
        f"{name}: {found}" if found else name,
        seconds(measurement.median),
        str(len(measurement.times)),
        megabytes(measurement.peak_bytes),
        f"{errors.loss:.0e}" if errors else "",
        f"{errors.gradient:.0e}" if errors else "",
    ]
    return f"| {' | '.join(cells)} |"


def sizes(group: Group, shape: Shape) -> str:
    """Of the group's inputs, in words."""
    if group.whole_model:
        model = f"Qwen2 of {training.LAYERS} layers, hidden size {training.HIDDEN}"
        return f"{model}, {shape.vocab} classes, {shape.tokens} tokens"
    size = f"[{shape.tokens}, {shape.vocab}]"
    if group.linear:
        size = f"hidden [{shape.tokens}, {shape.hidden}], head [{shape.vocab}, {shape.hidden}]"
    return size if group.beta is None else f"student and teacher each {size}"


def table(
    measurements: Sequence[Measurement], shape: Shape, settings: Settings, rounds: int
) -> str:
    """One table a group, and what the figures mean."""
    parts = []
    for group in GROUPS.values():
        rows = [row(each, shape) for each in measurements if each.contestant.group == group.name]
        if rows:
            head = ("time", "rounds", group.memory, "error of loss", "of gradient")
            heading = f"| {group.title}, {sizes(group, shape)} bfloat16 | {' | '.join(head)} |"
            parts.append("\n".join([heading, "|---" * (len(head) + 1) + "|", *rows]))
    packages = ", ".join(f"{name} {found}" for name, found in versions().items() if found)
    if "threads" not in settings:
        parts.append(f"{settings['machine']}, {packages}. {ON_DEVICE}")
        return "\n\n".join(parts) + "\n"
    threads = f"{settings['threads']} threads"
    parts.append(
        f"{settings['machine']}, {threads}, {packages}. A step is a forward and a backward; medians of {rounds} interleaved\n"
        "rounds in one process, fewer for those that take tens of seconds; from logits a turn is two steps, the second timed.\n"
        "Inputs are reused, every page of them touched before; what a step allocates it allocates anew each time, as in\n"
        "training; TileLoss's fresh gradient takes the memory of the one freed before it. From JAX a step is jitted.\n"
        "Memory: the peak of a step in a process of its own. Errors: relative to float64; of logits' gradients the label's\n"
        "column and all others apart, the worse; of a model to float32, its head's rows and its body's gradients apart."
    )
    return "\n\n".join(parts) + "\n"


def figures_of(measurement: Measurement) -> dict[str, object]:
    contestant = measurement.contestant
    named: dict[str, object] = {"group": contestant.group, "name": contestant.name}
    if measurement.failed:
        return named | {"failed": measurement.failed}
    of_device = ("timed_by", "not_captured", "host_s")
    return named | {
        "median_s": measurement.median,
        "times_s": measurement.times,
        "peak_bytes": measurement.peak_bytes,
        "workspace_bytes": measurement.workspace_bytes,
        "errors": None if measurement.errors is None else asdict(measurement.errors),
        **{name: found for name in of_device if (found := getattr(measurement, name))},
    }


def settings(shape: Shape, **more: object) -> Settings:
    """``more``: the machine, and how it is used."""
    return {"shape": asdict(shape), "dtype": "bfloat16", **more, "versions": versions()}


def as_lines(
    measurements: Sequence[Measurement], shape: Shape, settings: Settings
) -> list[dict[str, object]]:
    """A result line a contestant, each with all that it needs to be understood alone."""
    lines = []
    for each in measurements:
        group = GROUPS[each.contestant.group]
        words = {"title": group.title, "sizes": sizes(group, shape), "memory": group.memory}
        start = {"tool": "compare", "version": tileloss.__version__}
        found = {"rate": rate(each, shape)} if each.contestant.work else {}
        lines.append(start | figures_of(each) | found | words | settings)
    return lines


def write_json(
    path: Path,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    settings: Settings,
) -> None:
    content = settings | {
        "contestants": [figures_of(each) for each in measurements],
        "bars": [verdict.as_json() for verdict in verdicts],
    }
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_lines(path: Path, lines: Sequence[dict[str, object]]) -> None:
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def find_markers(path: Path) -> tuple[int, int]:
    """Where the table's text begins and ends in the file. Raises NoMarkers."""
    text = path.read_text()
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise NoMarkers(f"{path}: expected {BEGIN} and {END}, each on a line of its own")
    return begin + len(BEGIN), end


def write_page(path: Path, new_table: str) -> None:
    """Puts the table between the two markers. Raises NoMarkers."""
    begin, end = find_markers(path)
    text = path.read_text()
    write_whole(path, f"{text[:begin]}\n{new_table}{text[end:]}")
