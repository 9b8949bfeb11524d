"""Time every combination of a config's lists, each case in a process of its own. A tracker has each as soon as it is in the
results file. docs/users/sweep.md"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import tileloss
from tileloss.testing._judge import Crashed, JudgeError, ask_apart
from tileloss.tools import arguments, trackers
from tileloss.tools.config import Config
from tileloss.tools.printable import escaped
from tileloss.tools.progress import Progress
from tileloss.tools.results import ResultWriter
from tileloss.tools.sweep_cases import AXES, COMMON, OWN, Case, Line, Sweep, key_of, read_sweep
from tileloss.tools.sweep_report import describe_case, describe_result, print_report, varied_axes

_MAX_SAID = 300
_FIRST_VICTIM = "1000"  # the kernel's out-of-memory killer takes the case and not the sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.config(parser, "threads=[1,2]")
    parser.epilog = (
        f"Keys, a value or a list: {', '.join(AXES)}; one value: {', '.join(COMMON + OWN)}. Every combination is a case and "
        "becomes a line of the results file at once: run the same command again after whatever stopped it, and it goes on from "
        "there. Exit code 1: every case has its line, but some are not ok. docs/users/sweep.md says more, configs/ has examples."
    )


def run(options: argparse.Namespace) -> int:
    config = Config(options.config, options.set)
    settings = trackers.read_settings(config)
    sweep = read_sweep(config)
    return trackers.run(settings, lambda log: _run(config.file, sweep, log))


def _run(file: Path, sweep: Sweep, log: Callable[[Line], None]) -> int:
    there: dict[str, Line] = {}

    def num_done() -> int:
        return sum(key in there for key in sweep.cases)

    with ResultWriter(sweep.output, "output", [file]) as writer:
        for number, line in enumerate(writer.earlier, 1):
            _keep(line, f"{sweep.output}:{number}", there)
        total, done = len(sweep.cases), num_done()
        name, output = escaped(str(file)), escaped(str(sweep.output))
        print(f"sweep {name}: {total} cases, results in {output}")
        if done:
            print(f"{done} of them are there already")
        if others := len(there) - done:
            print(f"note: {others} results there belong to other settings: kept and ignored")
        sys.stdout.flush()
        try:
            _run_cases(sweep, there, done, writer, log)
        except SystemExit:
            goes_on = "the same command goes on from here"
            print(f"stopped with {num_done()} of {total} cases done: {goes_on}")
            raise
    lines = [there[key] for key in sweep.cases]
    print_report(lines)
    counts = Counter(line["status"] for line in lines)
    print("", *(f"{escaped(status)}: {counts[status]}" for status in sorted(counts)), sep="\n")
    return 0 if set(counts) == {"ok"} else 1


def _run_cases(
    sweep: Sweep,
    there: dict[str, Line],
    done: int,
    writer: ResultWriter,
    log: Callable[[Line], None],
) -> None:
    """Runs every case that has no line; ``there`` has its line once it is on the disk."""
    axes = varied_axes([case.identity for case in sweep.cases.values()])
    total, has_bar = len(sweep.cases), sys.stderr.isatty()
    with Progress("sweep", total, quiet=not has_bar) as progress:
        for key, case in sweep.cases.items():
            if key in there:
                continue
            description = describe_case(case.identity, axes)
            progress.at(done, total, description)
            line = {"tool": "sweep", "version": tileloss.__version__, "case": case.identity}
            line |= _measure(case, sweep, writer)
            writer.write(line)
            there[key] = line
            log(line)
            done += 1
            if not has_bar or line["status"] != "ok":
                said = f"[{done}/{total}] {description}: {describe_result(line)}"
                progress.say(escaped(said))


# --------------------------------------------------------------------------------------------------------- the results file


def _keep(line: Line, place: str, there: dict[str, Line]) -> None:
    fault = _fault(line)
    if fault:
        raise ValueError(f"results file {place}: not a sweep's result: {fault}")
    key = key_of(line["case"])
    if key in there:
        raise ValueError(f"results file {place}: a second result of the case {escaped(key)}")
    there[key] = line


def _fault(line: Line) -> str:
    """What makes a line no result; empty if nothing does. The report divides by the times."""
    needed: dict[str, Any] = {"case": dict, "status": str}
    if line.get("status") == "ok" and isinstance(line.get("case"), dict):
        needed |= {"isa": str, "schedule": str}
        rate = "tflops" if "hidden" in line["case"] else "gb_per_s"
        for name in ("threads", "row_block", "vocab_block", "median_ms", "min_ms", rate):
            needed[name] = int | float
    for name, kind in needed.items():
        value = line.get(name)
        if name.endswith("_ms") and not (isinstance(value, kind) and value > 0):
            return f"{name}: expected a number above 0, got {json.dumps(value)}"
        if not isinstance(value, kind):
            return f"no {name}"
    return ""


# ------------------------------------------------------------------------------------------------------- a case's process


def _measure(case: Case, sweep: Sweep, writer: ResultWriter) -> Line:
    """The bench's figures and "status" ok, or how else its process ended, with a "message"; and how long it took."""
    begin, kills = time.monotonic(), _oom_kills()
    with os.fdopen(os.memfd_create("said"), "r+b") as said:

        def before() -> None:
            writer.close()  # its lock is not to outlive the sweep
            _limit_case(said, sweep.megabytes)

        def ended(status: str, message: str) -> Line:
            last = _last_line(said)
            more = f"; it said: {escaped(last[:_MAX_SAID])}" if last else ""
            return {"status": status, "message": message + more}

        line: Line
        try:
            request = {"do": "bench", "config": case.config, "roofs": False}
            answer = ask_apart(request, before=before, seconds=sweep.seconds)
            line = {"status": "ok"} | answer.event("result")["line"]
        except JudgeError as error:
            status = "out_of_memory" if error.out_of_memory else "error"
            line = {"status": status, "message": str(error)}
        except TimeoutError as error:
            line = ended("timeout", str(error))
        except Crashed as error:
            if error.signal is None:
                line = ended("error", str(error))
            elif error.signal == signal.SIGKILL and _oom_kills() > kills:
                line = ended("out_of_memory", "killed by the kernel for its memory")
            else:
                line = ended("crashed", str(error)) | {"signal": error.signal}
    return line | {"seconds": time.monotonic() - begin}


def _limit_case(said: IO[bytes], megabytes: int) -> None:
    """In the case's process: signals for this process's group do not reach it, and what it writes goes to ``said``."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(said.fileno(), descriptor)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM)
    if megabytes:
        # Beside what this process has of address space: Python's packages take more than a small case.
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = own + megabytes * 1_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _oom_kills() -> int:
    """On this machine so far."""
    found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _last_line(said: IO[bytes]) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - 4 * _MAX_SAID))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
