"""The cells of the audit's table: a case's inputs, an implementation's outputs, and the program's verdict on them."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tileloss
from tileloss.tools.audit.bugs import BUGS
from tileloss.tools.audit.bugs.likeness import look
from tileloss.tools.audit.cases import CASES, AuditCase
from tileloss.tools.audit.child import Child
from tileloss.tools.children import without_secrets
from tileloss.tools.implementations import NATIVE
from tileloss.tools.implementations.contract import tileloss_contract
from tileloss.tools.printable import did_you_mean
from tileloss.tools.progress import Progress

EVERY = (*CASES, *(bug.case for bug in BUGS.values()))
_USAGE = 2
Line = dict[str, Any]


def chosen(patterns: tuple[str, ...] | None, argument: str = "--case") -> list[AuditCase]:
    if patterns is None:
        return list(EVERY)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in EVERY):
            near = did_you_mean(pattern, [case.name for case in EVERY])
            raise ValueError(f"{argument}: no case matches {pattern}; --list shows them{near}")
    return [c for c in EVERY if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in patterns)]


def cells(
    program: Path,
    name: str,
    prepared: list[tuple[AuditCase, Path]],
    seconds: float,
    progress: Progress,
    device: str,
    python: Path | None = None,
) -> Iterator[Line]:
    """A line for each case, whose folder has its config and its inputs. ``python``: whose packages the implementation has."""
    with Child(name, seconds, python=python, device=device) as child:
        for case, folder in prepared:
            progress.step(f"{name} {case.name}")
            yield cell(program, child, case, folder)


def cell(program: Path, child: Child, case: AuditCase, folder: Path) -> Line:
    """The line of the child's implementation, or of the program's own kernels, which need no child."""
    begin = time.monotonic()
    if child.name == NATIVE:
        package = f"tileloss {tileloss.__version__}"
        # Guard pages, inputs that cannot be written to and outputs full of NaN, where calls are what is checked.
        strict = ["--strict"] if case.calls else []
        where = strict if child.device == "cpu" else [f"--device={child.device}"]
        verdict = judge(program, "gradcheck", folder, where)
    else:
        verdict = _child_verdict(program, child, case, folder)
        package = child.package
    like = None if child.name == NATIVE else _likeness(case, folder, verdict)
    seconds = round(time.monotonic() - begin, 3)
    contract = tileloss_contract(child.device) if child.name == NATIVE else child.contract
    own = {"contract": contract, "looks_like": like}
    return _line(child.name, package, case, device=child.device, **own, **verdict, seconds=seconds)


def not_installed(name: str, case: AuditCase, message: str) -> Line:
    return _line(name, name, case, status="not_installed", message=message, seconds=0.0)


def _line(name: str, package: str, case: AuditCase, **found: Any) -> Line:
    """With all its keys."""
    usual = {
        "tool": "audit", "version": tileloss.__version__, "implementation": name, "package": package, "case": case.name,
        "device": "cpu", "contract": None, "gate": None, "value": None, "limit": None, "message": None, "looks_like": None,
    }  # fmt: skip
    return usual | found


def _child_verdict(program: Path, child: Child, case: AuditCase, folder: Path) -> Line:
    outputs = folder / "outputs.safetensors"
    outputs.unlink(missing_ok=True)
    answer = child.ask(
        inputs=str(folder / "inputs.safetensors"),
        outputs=str(outputs),
        backwards=case.backwards,
        calls=case.calls,
        judged=case.judged,
    )
    if answer["status"] == "usage":
        raise ValueError(answer["message"])
    if answer["status"] != "done":
        return {key: answer[key] for key in ("status", "gate", "message") if key in answer}
    return judge(program, "judge", folder, ["--outputs", str(outputs)])


def _likeness(case: AuditCase, folder: Path, verdict: Line) -> str | None:
    if verdict["status"] != "failed":
        return None
    inputs, outputs = folder / "inputs.safetensors", folder / "outputs.safetensors"
    return look(case, inputs, outputs, str(verdict.get("gate")))


def judge(program: Path, tool: str, folder: Path, arguments: list[str]) -> Line:
    """The verdict of the program: the first gate that failed, the others in the message."""
    results = folder / "results.jsonl"
    results.unlink(missing_ok=True)
    command = [str(program), tool, "--config", str(folder / "config.yaml"), *arguments]
    done = _run([*command, f"--set=output={results}"])
    if done.returncode == 0:
        return {"status": "pass"}
    if done.returncode == _USAGE and arguments:  # the config was good enough to draw the inputs
        return {"status": "failed", "gate": "outputs", "message": _last_line(done.stderr)}
    if done.returncode != 1:
        raise RuntimeError(
            f"{tool} of the program: exit code {done.returncode}: {_last_line(done.stderr)}"
        )
    gates = json.loads(results.read_text())["gates"]
    first, *others = [gate for gate in gates if not gate["pass"]]
    return {
        "status": "failed",
        "gate": first["name"],
        "value": first["value"],
        "limit": first["limit"],
        "message": ", ".join(gate["name"] for gate in others) or None,
    }


def prepare(program: Path, case: AuditCase, parent: Path) -> Path:
    """A folder with the case's config and inputs."""
    folder = parent / case.name.replace("/", "-")
    folder.mkdir()
    config = case.write_config(folder)
    write = ["judge", "--config", str(config), "--write-inputs", str(folder / "inputs.safetensors")]
    done = _run([str(program), *write])
    if done.returncode:
        raise RuntimeError(f"case {case.name}: {_last_line(done.stderr)}")
    return folder


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env=without_secrets(), check=False
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
