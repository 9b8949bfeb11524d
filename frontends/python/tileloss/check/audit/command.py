"""`tileloss audit`: a list of cases against a list of implementations, each in a process of its own, judged by the program."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tileloss.check import arguments
from tileloss.check.audit.cells import EVERY, Line, cells, chosen, prepare
from tileloss.check.audit.table import print_invariance, print_list, print_table
from tileloss.check.implementations import KNOWN, NAMES, NATIVE, check_name
from tileloss.check.progress import Progress
from tileloss.check.results import ResultWriter

GOOD = ("pass", "refused", "not_installed")


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
    cases = chosen(options.case)
    total = len(options.impl) * len(cases)
    with (
        tempfile.TemporaryDirectory(prefix="tileloss-") as folder,
        Progress("audit", total, quiet=options.quiet) as progress,
    ):

        def found() -> Iterator[Line]:
            prepared = [(case, prepare(program, case, Path(folder))) for case in cases]
            for name in options.impl:
                yield from cells(program, name, prepared, options.time_limit, progress)

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
