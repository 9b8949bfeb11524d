"""The kinds of result lines: what is read of a line, what all lines of a kind come to, and the pictures of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any, NamedTuple

from tileloss.tools.report import lines
from tileloss.tools.report.lines import (
    Cell,
    Line,
    count,
    get,
    grouped,
    joined,
    number,
    outcome,
    texts,
)
from tileloss.tools.report.plots import Picture, Row

_MOST_CHECKS, _MOST_PICTURES = 12, 24  # that have pictures, of a sweep
_MARKS = {"pass": "pass", "failed": "fail", "crashed": "fail", "timeout": "fail", "not_installed": "none"}  # fmt: skip
# Of a check's line, what the page says elsewhere, and where a temporary file was.
_SAID = "tool version config loss preset dtype producer pass outputs path file number".split()
# Of a sweep's case, what says how the work is done, and how much there is of it; the rest says which it is.
_AXES = "isa threads schedule row_block vocab_block cuda_kernel workspace head_layout".split()
_SIZES = ("tokens", "vocab", "hidden")


class Shown(NamedTuple):
    """Of all lines of a kind. `mark`: pass or fail where they are judged, else another; `more`: for the template."""

    summary: str
    mark: str
    pictures: list[Picture]
    more: Any = None


def _named(who: str, package: str) -> str:
    """ "torch 2.15.0" of torch, "mine (torch 2.15.0)" of what uses it."""
    return package if package.startswith(who) else f"{who} ({package})" if package else who


def _implementation(line: Line) -> str:
    return _named(get(line, "implementation", str), get(line, "package", str, ""))


def _status(line: Line) -> Cell:
    message, status = get(line, "message", str, ""), get(line, "status", str)
    return Cell(status.replace("_", " "), _MARKS.get(status, "warn"), message)


def _gate(gate: Line) -> Row:
    """A limit of 0 has no shares: nothing may be wrong at all."""
    (value,), limit = lines.numbers(gate, "value"), get(gate, "limit", float)
    share = value / limit if limit > 0 else math.nan if value else 0.0
    text = number(share) if limit else f"{number(value)}, 0 allowed"
    look = "ours" if get(gate, "pass", bool) else "fail"
    return Row(get(gate, "name", str), [share], [text], look)


def _need(row: Row) -> tuple[bool, float]:
    """What failed, then what comes nearest to a limit."""
    return row.look == "fail", row.values[0] if math.isfinite(row.values[0]) else math.inf


def _bug(bug: Line, is_failed: bool) -> Line:
    """Planted on purpose. Gates that fail already cannot catch it."""
    name, caught = get(bug, "name", str), joined(get(bug, "caught_by", list, []))
    result = outcome(bool(caught), "caught" if caught else "not caught")
    if not get(bug, "planted", bool):
        result = Cell("without effect here", "none")
    elif is_failed and not caught:
        result = Cell("not judged: the check fails already", "none")
    return {"bug": name, "caught_by": caught, "result": result}


def _check(line: Line) -> Line:
    gates, trace = get(line, "gates", list, []), get(line, "trace", dict, {})
    if not gates and not trace:
        raise ValueError("gates: expected a list with at least one gate, or a trace")
    rows = [_gate(gate) for gate in gates]
    failed = [row.label for row in rows if row.look == "fail"]
    bugs = [_bug(each, bool(failed)) for each in get(line, "mutants", list, [])]
    marks = Counter(bug["result"].mark for bug in bugs)
    failed += [f"bug {bug['bug']}" for bug in bugs if bug["result"].mark == "fail"]
    strict = get(get(line, "strict", dict, {}), "findings", list, [])
    loss, dtype, passed = get(line, "loss", str), get(line, "dtype", str), get(line, "pass", bool)
    config, preset, producer = texts(line, "config preset producer")
    who, _, package = producer.partition(", ")
    name = PurePath(config).stem.removeprefix("gradcheck_") or loss
    judged, caught = marks["pass"] + marks["fail"], marks["pass"]
    near = max(rows, key=_need, default=Row("", [math.nan], [""]))
    stages = [stage for stage in get(trace, "stages", list, []) if get(stage, "stage", str)]
    item = {"result": outcome(passed), "name": name, "title": joined((name, loss, preset, dtype))}
    item |= {"gate": near.label, "share": near.texts[0], "stages": stages, "strict": strict}
    item |= {"producer": _named(who, package), "bugs": bugs, "counts": (passed, judged, caught)}
    item |= {"failed": joined([*failed, strict and "strict"])}
    item |= {"caught": f"{caught} of {judged}" if judged else ""}
    rest = [(n, v) for n, v in line.items() if n not in _SAID and not isinstance(v, list | dict)]
    item["rest"] = [{"figure": name, "value": value} for name, value in rest]
    item["gates"] = [g | {"share": r.texts[0]} for g, r in zip(gates, rows, strict=True)]
    item["rows"] = [r for r, g in zip(rows, gates, strict=True) if g["limit"] or r.look == "fail"]
    return item


def _checks(items: list[Line]) -> Shown:
    """Pictures are of the first that fail, then of the first others; the tables have all."""
    by_need = sorted(enumerate(items, 1), key=lambda each: each[1]["counts"][0])
    for place, item in [each for each in by_need if each[1]["rows"]][:_MOST_CHECKS]:
        caption = "Gates that allow nothing at all, and found nothing, are in the table alone."
        across = ["share of the limit, which is the line"]
        item["pictures"] = [Picture(f"gates-{place}", caption, {"": item["rows"]}, across, 1.0)]
    passed, judged, caught = map(sum, zip(*(item["counts"] for item in items), strict=True))
    summary = f"{passed} of {count(len(items), 'check')} pass"
    summary += f"; {caught} of {count(judged, 'planted bug')} caught" if judged else ""
    return Shown(summary, "pass" if passed == len(items) else "fail", [])


def _audit(line: Line) -> Line:
    get(line, "case", str)
    return {"implementation": _implementation(line), "result": _status(line)}


def _audits(items: list[Line]) -> Shown:
    counts = Counter(item["result"].text for item in items)
    marks = {item["result"].mark for item in items}
    mark = "fail" if "fail" in marks else "pass" if "pass" in marks else "none"
    summary = joined(f"{number} {word}" for word, number in counts.items())
    return Shown(summary, mark, [])


def _invariance(line: Line) -> Line:
    is_measured = get(line, "status", str, "measured") == "measured"
    missing = ... if is_measured else ""
    varied, quantity = (get(line, name, str, missing) for name in ("varied", "quantity"))
    (against, claim), shares = texts(line, "against claim"), get(line, "ratio_quantiles", dict, {})
    ratios = {float(share): get(shares, share, float, math.nan) for share in shares}
    reach = [abs(ratio - 1) for ratio in ratios.values() if math.isfinite(ratio)]
    moved = max(reach, default=lines.numbers(line, "relative_difference")[0])
    change = Cell(f"{quantity} {moved:.1g}", "fail" if claim == "broken" else "warn")
    if not is_measured or get(line, "same_bits", bool):
        change = outcome(True, "same") if is_measured else _status(line)
    varied = f"as {against}" if against else varied.replace("_", " ")
    item = {"implementation": _implementation(line), "varied": varied, "change": change}
    item["is_measured"] = is_measured
    return item | {f"q_{share:g}": ratios[share] for share in sorted(ratios)}


def _invariances(items: list[Line]) -> Shown:
    measured = [item for item in items if item["is_measured"]]
    kept = sum(item["change"].mark == "pass" for item in measured)
    others = len(items) - len(measured)
    summary = f"{kept} of {len(measured)} keep every bit{f', {others} not measured' * bool(others)}"
    shares = sorted({name for item in items for name in item if name.startswith("q_")})
    return Shown(summary, "none", [], joined(shares, " | "))


def _entry(line: Line) -> Line:
    """`time`: infinite of a contestant that failed. `family`: what variants share; a compiled model is none of them."""
    group, name, (failed,) = get(line, "group", str), get(line, "name", str), texts(line, "failed")
    title, sizes, dtype, machine, isa = texts(line, "title sizes dtype machine isa")
    memory, rate = texts(line, "memory rate")
    packages = [f"{n} {v}" for n, v in get(line, "versions", dict, {}).items() if v]
    errors, short = get(line, "errors", dict, {}), title or group
    time = math.inf if failed else lines.positive(line, "median_s")
    peak = math.nan if failed else get(line, "peak_bytes", float)
    family = name if name.endswith(", torch.compile") else name.partition(",")[0]
    look = "ours" if "TileLoss" in name else "others"
    row = Row(name, [time, peak], [number(time, "s"), number(peak, "bytes")], look)
    item = {"short": short, "title": joined((short, sizes, dtype)), "family": family, "row": row}
    item |= {"time": time, "rate": rate, "failed": failed}
    item |= {"rounds": len(get(line, "times_s", list, [])), "memory": memory or "memory"}
    threads = f"{line['threads']} threads" if line.get("threads") else ""
    item["machine"] = joined((machine, isa, threads, *packages))
    return item | {f"error_{n}": get(errors, n, float, math.nan) for n in ("loss", "gradient")}


def _entries(items: list[Line]) -> Shown:
    """By time; of the variants of one the fastest is pictured."""
    pictured, gains = {}, []
    groups = grouped(items, "title").values()
    items[:] = [i for found in groups for i in sorted(found, key=lambda item: item["time"])]
    measured = [item for item in items if not item["failed"]]
    for (title, short), found in grouped(measured, "title", "short").items():
        best = [entries[0]["row"] for entries in grouped(found, "family").values()]
        for item in found:
            item["ratio"] = item["time"] / found[0]["time"]
        if not found[0]["rate"]:
            pictured[title] = best
        first = {row.look: row for row in reversed(best)}
        if len(first) == 2:
            times = first["others"].values[0] / first["ours"].values[0]
            written = f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
            gains.append(f"{short}: {written} x as fast as {first['others'].label}")
    failed = len(items) - len(measured)
    told = joined(gains, "; ") or count(len(measured), "contestant")
    summary = told + f"; {failed} not measured" * bool(failed)
    caption = "The fastest variant of each. What the memory is above, the tables say."
    memories = {i["memory"] for i in measured if i["title"] in pictured}
    panels = ["time of a step", *(memories if len(memories) == 1 else ["memory"])]
    picture = Picture("compare", caption, pictured, panels)
    return Shown(summary, "none", [picture] * bool(pictured))


def _timing(line: Line) -> Line:
    loss, dtype, impl, name = (get(line, n, str) for n in ("loss", "dtype", "impl", "pass"))
    preset, *runs_as = texts(line, "preset isa schedule cuda_kernel")
    scratch, plan, tflops, rate = lines.numbers(line, "mem_scratch workspace_bytes tflops gb_per_s")
    times = [lines.positive(line, f"{name}_ms") / 1000 for name in ("median", "min", "roof")]
    median, least, roof = times
    buffers, options = get(line, "buffers", dict, {}), lines.written(get(line, "options", dict, {}))
    sizes = f"[{get(line, 'tokens', float):.0f}, {get(line, 'vocab', float):.0f}]"
    hidden = f"hidden {line['hidden']}" if line.get("hidden") else ""
    place = "in place" if line.get("in_place") else ""
    case = joined((loss, preset, sizes, hidden, dtype, place, options), " ")
    label = joined((name.replace("_", " "), impl if impl != "kernel" else ""))
    says = [f"{number(median, 's')}, {median / roof:.2f} x roof", number(scratch, "bytes")]
    item: Line = {"case": case, "label": label, "median": median, "min": least, "roof": roof}
    item |= {"ratio": median / roof, "runs_as": joined(runs_as)}
    item |= {"row": Row(label, [median, scratch], says, "ours", [roof, plan])}
    item["rate"] = f"{rate:.3g} GB/s" if math.isnan(tflops) else f"{tflops:.3g} TFLOP/s"
    sized = [(name, get(buffers, name, float)) for name in buffers]
    item["buffers"] = [{"case": case, "pass": label, "buffer": n, "bytes": b} for n, b in sized]
    return item | {"detail": f"{case}, {label}: {says[0]}"}


def _timings(items: list[Line]) -> Shown:
    near = min(items, key=lambda item: item["ratio"])
    where = f"the nearest to its roof, {near['ratio']:.2f} x: {near['case']}, {near['label']}"
    groups = {case: [i["row"] for i in found] for (case,), found in grouped(items, "case").items()}
    caption = "Medians, with a short line at the roof; memory, with one at what was planned."
    picture = Picture("bench", caption, groups, ["time", "memory"])
    return Shown(f"{count(len(items), 'time')}; {where}", "none", [picture])


def _case(line: Line) -> Line:
    """The parameters as `at/NAME`. 0 leaves the choice of how to the planner, as nothing does."""
    at = {f"at/{name}": lines.written(value) for name, value in get(line, "case", dict).items()}
    if not at:
        raise ValueError("case: expected an object with the parameters, got nothing")
    at |= {name: "auto" for name in at if name[3:] in _AXES and at[name] in ("0", "")}
    status = get(line, "status", str)
    time = lines.positive(line, "median_ms") / 1000 if status == "ok" else math.nan
    return at | {"names": [*at], "time": time, "result": outcome(status == "ok", status)}


def _cases(items: list[Line]) -> Shown:
    """Each file is a sweep. Its axes are how the work is done; or sizes, of which none is the best, where nothing else varies."""
    pictures: list[Picture] = []
    sweeps: list[Line] = []
    for cases in grouped(items, "path").values():
        names = list(dict.fromkeys(name for case in cases for name in case["names"]))
        # Numbers by their size, as they get longer, after the planner's choice.
        found = {name: {case.get(name, "") for case in cases} for name in names}
        places = {n: sorted(v, key=lambda x: (x.isdecimal(), len(x), x)) for n, v in found.items()}
        varied = sorted((n for n in names if len(places[n]) > 1), key=lambda n: -len(places[n]))
        how = [name for name in varied if name[3:] in _AXES]
        axes = how or [name for name in varied if name[3:] in _SIZES]
        others = [name for name in names if name not in axes]
        works: list[Line] = []
        for work in grouped(cases, *others).values():
            said = [name for name in others if places[name] != ["auto"]]
            works.append({"work": _words(work[0], said), "cases": len(work)})
            times = sorted(case["time"] for case in work if case["time"] > 0)
            if how and times:
                best = _words(next(c for c in work if c["time"] == times[0]), how)
                works[-1] |= {"best": best, "time": times[0], "slowest": times[-1] / times[0]}
            if axes and times:
                name, across = f"sweep-{len(sweeps) + 1}-{len(works)}", places[axes[0]]
                rows = [_curve(part, axes, across) for part in grouped(work, *axes[1:]).values()]
                title = f"{works[-1]['work']}: median ms"
                pictures.append(Picture(name, "", {title: rows}, across, axis=axes[0][3:]))
        columns = joined((f"{name[3:]}: {name}" for name in varied), " | ")
        sweeps.append({"cases": cases, "columns": columns, "works": works})
    counts = Counter(item["result"].text for item in items)
    says = joined(f"{times} {status}" for status, times in counts.items())
    mark = "none" if [*counts] == ["ok"] else "fail"
    return Shown(f"{count(len(items), 'case')}: {says}", mark, pictures[:_MOST_PICTURES], sweeps)


def _curve(cases: list[Line], axes: list[str], places: list[str]) -> Row:
    at = {case.get(axes[0], ""): 1000 * case["time"] for case in cases}
    values = [at.get(place, math.nan) for place in places]
    says = [f"{place} {number(value)}" for place, value in zip(places, values, strict=True)]
    return Row(_words(cases[0], axes[1:]) or "median", values, says)


def _words(case: Line, names: Iterable[str]) -> str:
    """Texts as they are, but numbers and how the work is done with their names."""
    said = [(name[3:], case.get(name, "")) for name in names]
    return joined(v if v[:1].isalpha() and n not in _AXES else v and f"{n} {v}" for n, v in said)


# In the order of the page: what is read of a line, what all lines come to.
Kind = tuple[Callable[[Line], Line], Callable[[list[Line]], Shown]]
KINDS: dict[str, Kind] = {
    "checks": (_check, _checks), "audit": (_audit, _audits), "invariance": (_invariance, _invariances),
    "compare": (_entry, _entries), "bench": (_timing, _timings), "sweep": (_case, _cases),
}  # fmt: skip
