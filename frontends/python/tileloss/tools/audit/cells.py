"""The cells of the audit's table: a case, an implementation's outputs, and the verdict on them."""

from __future__ import annotations

import fnmatch
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tileloss
from tileloss.testing._drawn import Drawn, Report
from tileloss.testing._judge import Crashed, JudgeError, Tensors
from tileloss.tools.audit.bugs import BUGS
from tileloss.tools.audit.bugs.likeness import look
from tileloss.tools.audit.cases import CASES, AuditCase
from tileloss.tools.audit.child import Child
from tileloss.tools.case_file import read_tensors, write_case
from tileloss.tools.implementations import NATIVE
from tileloss.tools.implementations.contract import tileloss_contract
from tileloss.tools.printable import did_you_mean
from tileloss.tools.progress import Progress

EVERY = (*CASES, *(bug.case for bug in BUGS.values()))
_USAGE = 2
Line = dict[str, Any]


class Prepared(NamedTuple):
    case: AuditCase
    drawn: Drawn
    inputs: Path  # the drawn case as a child reads it


def chosen(patterns: tuple[str, ...] | None) -> list[AuditCase]:
    if patterns is None:
        return list(EVERY)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in EVERY):
            near = did_you_mean(pattern, [case.name for case in EVERY])
            raise ValueError(f"--case: no case matches {pattern}; --list shows them{near}")
    return [c for c in EVERY if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in patterns)]


def cells(
    name: str,
    prepared: list[Prepared],
    seconds: float,
    progress: Progress,
    device: str,
    python: Path | None = None,
) -> Iterator[Line]:
    """A line for each case. ``python``: whose packages the implementation has."""
    with Child(name, seconds, python=python, device=device) as child:
        for each in prepared:
            progress.step(f"{name} {each.case.name}")
            yield cell(child, each)


def cell(child: Child, prepared: Prepared) -> Line:
    """The line of the child's implementation, or of the library's own kernels, which need no child."""
    begin, package = time.monotonic(), f"tileloss {tileloss.__version__}"
    if child.name == NATIVE:
        found = native(prepared, child.device, child.seconds)
        found["contract"] = tileloss_contract(child.device)
    else:
        found = _of_child(child, prepared)
        package, found["contract"] = child.package, child.contract
    seconds = round(time.monotonic() - begin, 3)
    return _line(child.name, package, prepared.case, device=child.device, **found, seconds=seconds)


def not_installed(name: str, case: AuditCase, message: str) -> Line:
    return _line(name, name, case, status="not_installed", message=message, seconds=0.0)


def _line(name: str, package: str, case: AuditCase, **found: Any) -> Line:
    """With all its keys."""
    usual = {
        "tool": "audit", "version": tileloss.__version__, "implementation": name, "package": package, "case": case.name,
        "device": "cpu", "contract": None, "gate": None, "value": None, "limit": None, "message": None, "looks_like": None,
    }  # fmt: skip
    return usual | found


def prepare(case: AuditCase, folder: Path) -> Prepared:
    drawn = case.draw()
    inputs = folder / f"{case.name.replace('/', '-')}.safetensors"
    write_case(inputs, drawn.case)
    return Prepared(case, drawn, inputs)


def native(prepared: Prepared, device: str, seconds: float) -> Line:
    """The verdict on the library's own kernels. Where calls are what is checked they run on guard pages too, with inputs that
    cannot be written to and outputs full of NaN."""
    strict = bool(prepared.case.calls) and device == "cpu"
    try:
        return _verdict(prepared.drawn.checked(strict, device, seconds))
    except Crashed as error:
        how = str(error) if error.signal is None else f"signal {signal.Signals(error.signal).name}"
        return {"status": "crashed", "message": how}
    except TimeoutError:
        return {"status": "timeout", "message": f"no answer in {seconds:g} s"}


def judged(drawn: Drawn, outputs: Tensors) -> Line:
    """The verdict on outputs: the first gate that failed, the others in the message."""
    try:
        return _verdict(drawn.judged(outputs))
    except JudgeError as error:
        if error.code != _USAGE:  # the settings were good enough to draw the case
            raise
        return {"status": "failed", "gate": "outputs", "message": str(error)}


def _of_child(child: Child, prepared: Prepared) -> Line:
    case, outputs = prepared.case, prepared.inputs.with_suffix(".outputs")
    outputs.unlink(missing_ok=True)
    answer = child.ask(
        inputs=str(prepared.inputs),
        outputs=str(outputs),
        backwards=case.backwards,
        calls=case.calls,
        judged=case.judged,
    )
    if answer["status"] == "usage":
        raise ValueError(answer["message"])
    found: Tensors = {}
    if answer["status"] == "done":
        found = read_tensors(outputs)
        verdict = judged(prepared.drawn, found)
    else:
        verdict = {key: answer[key] for key in ("status", "gate", "message") if key in answer}
    if verdict["status"] == "failed":
        verdict["looks_like"] = look(case, prepared.drawn.case, found, verdict["gate"])
    return verdict


def _verdict(report: Report) -> Line:
    if report.passed:
        return {"status": "pass"}
    first, *others = report.failures
    gates = {gate["name"]: gate for gate in report.line["gates"]}
    gate = gates.get(first, {"value": None, "limit": None})  # guard pages are none
    return {
        "status": "failed",
        "gate": first,
        "value": gate["value"],
        "limit": gate["limit"],
        "message": ", ".join(others) or None,
    }
