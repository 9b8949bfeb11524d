"""What `tileloss sweep` says of its cases, and at its end."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from typing import Any

from tileloss.tools.printable import print_columns

# Of a case's parameters those that say how the work is done.
_HOW = (
    *("isa", "threads", "schedule", "row_block", "vocab_block", "cuda_kernel"),
    *("head_layout", "workspace"),
)
_CHART_WIDTH = 40
Line = dict[str, Any]


def print_report(lines: list[Line]) -> None:
    """For each loss, shape, dtype and pass a table with a bar chart of the medians, and the best case by name; then, for each
    parameter that was varied, how much it matters."""
    axes = varied_axes([line["case"] for line in lines])
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[_describe_work(line["case"])].append(line)
    for work, group in groups.items():
        _print_group(work, group, axes)
    if effects := [effect for axis in axes if (effect := _effect(lines, axis))]:
        print("\nslowest over fastest median with all else the same (typical, and the largest):")
        print(*effects, sep="\n")


def varied_axes(cases: list[Line]) -> list[str]:
    """Of the parameters that say how the work is done, those that differ."""
    return [axis for axis in _HOW if any(case.get(axis) != cases[0].get(axis) for case in cases)]


def describe_case(case: Line, axes: list[str]) -> str:
    return " ".join(filter(None, (_describe_work(case), _describe_how(case, axes))))


def describe_result(line: Line) -> str:
    """ "12.34 ms", or the status and what is known of it."""
    if line["status"] == "ok":
        return f"{line['median_ms']:.4g} ms"
    return f"{line['status']}: {line.get('message', '')}"


def _describe_work(case: Line) -> str:
    """ "cross_entropy label_smoothing=0.1 [512, 151936] bfloat16 forward": cases with the same text compare with each other."""
    words = [_text(case, "loss")]
    if "preset" in case:
        words.append(f"preset={_text(case, 'preset')}")
    words += [f"{name}={_text(case['options'], name)}" for name in case.get("options", {})]
    words.append(f"[{_text(case, 'tokens')}, {_text(case, 'vocab')}]")
    words += [_text(case, "dtype"), _text(case, "pass")]
    if "hidden" in case:
        words.append(f"hidden {_text(case, 'hidden')}")
    if case.get("in_place"):
        words.append("in place")
    if "device" in case:
        words.append(f"on {_text(case, 'device')}")
    return " ".join(words)


def _describe_how(case: Line, axes: list[str]) -> str:
    return " ".join(f"{axis}={_text(case, axis)}" for axis in axes)


def _text(case: Line, name: str) -> str:
    value = case.get(name, "-")
    return value if isinstance(value, str) else json.dumps(value)


def _print_group(work: str, group: list[Line], axes: list[str]) -> None:
    ok = [line for line in group if line["status"] == "ok"]
    best = min(ok, key=lambda line: line["median_ms"], default=None)
    slowest = max((line["median_ms"] for line in ok), default=0)
    rate, title = ("tflops", "TFLOP/s") if "hidden" in group[0]["case"] else ("gb_per_s", "GB/s")
    rows = []
    for line in group:
        cells = [_text(line["case"], axis) for axis in axes]
        if line["status"] == "ok":
            ways = f"{line['isa']} x{line['threads']} {line['schedule']} {line['row_block']}x{line['vocab_block']}"
            bar = "#" * round(_CHART_WIDTH * line["median_ms"] / slowest)
            numbers = [f"{line['min_ms']:.4g}", f"{line[rate]:.3g}", f"{line['median_ms']:.4g}"]
            cells += [ways, *numbers, bar + " best" * (line is best)]
        else:
            cells += ["-", "-", "-", line["status"], ""]
        rows.append(cells)
    width = max(len(row[-1]) for row in rows)
    rows = [[*row[:-1], row[-1].ljust(width)] for row in rows]  # a table's numbers end together
    scale = f"0 to {slowest:.4g} ms" if best else ""
    print(f"\n{work}")
    head = [*axes, "runs as", "min ms", title, "median ms", scale.ljust(width)]
    print_columns(head, rows, num_texts=len(axes) + 1)
    how = _describe_how(best["case"], axes) if best else ""
    print(
        "best:", "none" if best is None else ": ".join(filter(None, (how, describe_result(best))))
    )


def _effect(lines: list[Line], axis: str) -> str:
    """Of cases that differ in ``axis`` alone: the slowest median over the fastest."""
    alike: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line["status"] == "ok":
            others = {name: value for name, value in line["case"].items() if name != axis}
            alike[json.dumps(others, sort_keys=True)].append(line["median_ms"])
    ratios = [max(medians) / min(medians) for medians in alike.values() if len(medians) > 1]
    if not ratios:
        return ""
    return f"{axis}: {statistics.median(ratios):.3f} x, at most {max(ratios):.3f} x"
