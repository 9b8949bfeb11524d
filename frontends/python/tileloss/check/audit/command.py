"""`tileloss audit`: a list of cases against a list of implementations, each in a process of its own, judged by the program."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tileloss
from tileloss.check import arguments
from tileloss.check.audit.bugs import BUGS
from tileloss.check.audit.bugs.likeness import look
from tileloss.check.audit.cases import CASES, AuditCase
from tileloss.check.audit.child import Child
from tileloss.check.audit.table import print_invariance, print_list, print_table
from tileloss.check.implementations import KNOWN, NAMES, NATIVE, check_name
from tileloss.check.printable import did_you_mean
from tileloss.check.program import without_secrets
from tileloss.check.progress import Progress
from tileloss.check.results import ResultWriter

GOOD = ("pass", "refused", "not_installed")
EVERY = (*CASES, *(bug.case for bug in BUGS.values()))
_USAGE = 2
Line = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--impl",
        type=_names,
        default=NAMES,
        metavar="A,B",
        help="implementations, module:function or FILE.py:function among them; default: all that are known",
    )
    parser.add_argument(
        "--case", type=_names, metavar="A,B", help="cases, patterns such as 'ce/*' among them"
    )
    parser.add_argument(
        "--invariance",
        action="store_true",
        help="measure in place of judging: which results keep their bits when only the work is divided differently",
    )
    parser.add_argument("--list", action="store_true", help="print cases and implementations, stop")
    arguments.output(parser, "append a line of JSON a cell")
    parser.add_argument("--json", action="store_true", help="print these lines in place of tables")
    arguments.quiet(parser)
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="of a case, and of an implementation's import; default 120",
    )


def run(program: Path, options: argparse.Namespace) -> int:
    """0: every cell is a pass, a refusal or not installed; 1: one is not."""
    if options.list:
        print_list(
            EVERY, {NATIVE: "the C++ kernels"} | {n: known.summary for n, known in KNOWN.items()}
        )
        return 0
    for name in options.impl:
        check_name(name)
    if options.invariance:
        return _invariance(options)
    cases = _chosen(options.case)
    total = len(options.impl) * len(cases)
    with (
        tempfile.TemporaryDirectory(prefix="tileloss-") as folder,
        Progress("audit", total, quiet=options.quiet) as progress,
    ):

        def found() -> Iterator[Line]:
            prepared = [(case, _prepare(program, case, Path(folder))) for case in cases]
            for name in options.impl:
                yield from audit(program, name, prepared, options.time_limit, progress)

        lines = _written(found(), options)
    if not options.json:
        print_table(lines)
    return 0 if all(line["status"] in GOOD for line in lines) else 1


def _invariance(options: argparse.Namespace) -> int:
    """0, as what moves is measured and not judged; 1 where an implementation crashed."""
    if options.case is not None:
        raise ValueError("--case: expected none with --invariance, which has inputs of its own")
    from tileloss.check.audit.invariance import LEVELS, measure, measure_model

    names = [name for name in options.impl if name != NATIVE]
    with Progress("invariance", LEVELS * len(names) + 1, quiet=options.quiet) as progress:
        found = [measure(name, options.time_limit, progress) for name in names]
        found.append(measure_model(options.time_limit, progress))
        every = itertools.chain.from_iterable(found)
        lines = _written((line for line in every if line["status"] != "refused"), options)
    if not options.json:
        print_invariance(lines)
    return 1 if any(line["status"] in ("crashed", "timeout") for line in lines) else 0


def _written(found: Iterable[Line], options: argparse.Namespace) -> list[Line]:
    """Each line as soon as it is there."""
    lines = []
    with ResultWriter(options.output) as writer:  # before the work
        for line in found:
            lines.append(line)
            writer.write(line)
            if options.json:
                print(json.dumps(line), flush=True)
    return lines


def audit(
    program: Path,
    name: str,
    prepared: list[tuple[AuditCase, Path]],
    seconds: float,
    progress: Progress,
) -> Iterator[Line]:
    """A line for each case, whose folder has its config and its inputs."""
    with Child(name, seconds) as child:
        for case, folder in prepared:
            progress.step(f"{name} {case.name}")
            begin = time.monotonic()
            if name == NATIVE:
                package = f"tileloss {tileloss.__version__}"
                # Guard pages, inputs that cannot be written to and outputs full of NaN, where calls are what is checked.
                strict = ["--strict"] if case.calls else []
                verdict = _judge(program, "gradcheck", folder, strict)
            else:
                verdict = _of_child(program, child, case, folder)
                package = child.package
            yield {
                "tool": "audit",
                "version": tileloss.__version__,
                "implementation": name,
                "package": package,
                "case": case.name,
                "gate": None,
                "value": None,
                "limit": None,
                "message": None,
                "looks_like": _likeness(case, folder, verdict),
                **verdict,
                "seconds": round(time.monotonic() - begin, 3),
            }


def _of_child(program: Path, child: Child, case: AuditCase, folder: Path) -> Line:
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
    return _judge(program, "judge", folder, ["--outputs", str(outputs)])


def _likeness(case: AuditCase, folder: Path, verdict: Line) -> str | None:
    if verdict["status"] != "failed":
        return None
    inputs, outputs = folder / "inputs.safetensors", folder / "outputs.safetensors"
    return look(case, inputs, outputs, str(verdict.get("gate")))


def _judge(program: Path, tool: str, folder: Path, arguments: list[str]) -> Line:
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


def _prepare(program: Path, case: AuditCase, parent: Path) -> Path:
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


def _chosen(patterns: tuple[str, ...] | None) -> list[AuditCase]:
    if patterns is None:
        return list(EVERY)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in EVERY):
            near = did_you_mean(pattern, [case.name for case in EVERY])
            raise ValueError(f"--case: no case matches {pattern}; --list shows them{near}")
    return [c for c in EVERY if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in patterns)]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for name in text.split(",") if name))
    if not names:
        raise argparse.ArgumentTypeError(f"expected at least one name, got {text!r}")
    return names


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return value
