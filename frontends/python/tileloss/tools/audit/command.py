"""`tileloss audit`: a list of cases against a list of implementations, each in a process of its own."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tileloss.tools import arguments
from tileloss.tools.audit.cells import (
    EVERY,
    Line,
    Prepared,
    cells,
    chosen,
    not_installed,
    prepare,
)
from tileloss.tools.audit.releases import changes, environment_of, parse
from tileloss.tools.audit.table import print_invariance, print_list, print_releases, print_table
from tileloss.tools.implementations import KNOWN, NAMES, NATIVE, check_name, needs_gpu
from tileloss.tools.progress import Progress
from tileloss.tools.results import ResultWriter

GOOD = ("pass", "refused", "not_installed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--impl",
        type=_names,
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
    parser.add_argument(
        "--versions",
        metavar="PACKAGE==A,B",
        help="that package release by release, each in an environment of its own, which pip fills: in which a case failed",
    )
    parser.add_argument(
        "--with",
        dest="beside",
        type=_names,
        default=(),
        metavar="A==1,B==2",
        help="with --versions: packages of other versions than the audit's own beside each release",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="cpu, cuda or cuda:N, where PyTorch's tensors and the C++ kernels are; JAX chooses for itself",
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


def run(options: argparse.Namespace) -> int:
    """0: every cell is a pass, a refusal or not installed; 1: one is not."""
    if options.list:
        print_list(
            EVERY, {NATIVE: "the C++ kernels"} | {n: known.summary for n, known in KNOWN.items()}
        )
        return 0
    if options.versions is not None:
        releases = parse(options.versions)
        if options.invariance or len(options.impl or ()) > 1:
            raise ValueError("--versions: expected at most one --impl, and no --invariance")
        options.impl = options.impl or (releases.implementation,)
    elif options.beside:
        raise ValueError("--with: expected --versions beside it")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {options.device}")
    if options.invariance and options.device != "cpu":
        raise ValueError(f"--device: expected cpu with --invariance, got {options.device}")
    options.impl = options.impl or NAMES
    for name in options.impl:
        check_name(name)
    if options.invariance:
        return _invariance(options)
    cases = chosen(options.case)
    columns = len(options.impl) if options.versions is None else len(releases.versions)
    total = columns * (len(cases) + (options.versions is not None))  # and pip
    with (
        tempfile.TemporaryDirectory(prefix="tileloss-") as folder,
        Progress("audit", total, quiet=options.quiet) as progress,
    ):

        def found() -> Iterator[Line]:
            prepared = [prepare(case, Path(folder)) for case in cases]
            if options.versions is not None:
                for version in releases.versions:
                    yield from _release_lines(
                        releases.package, version, prepared, options, progress
                    )
                return
            for name in options.impl:
                yield from cells(name, prepared, options.time_limit, progress, options.device)

        lines = _written(found(), options)
    if not options.json:
        print_table(lines)
        if options.versions is not None:
            print_releases(changes(lines), needs_gpu(options.impl[0], options.device))
    return 0 if all(line["status"] in GOOD for line in lines) else 1


def _release_lines(
    package: str,
    version: str,
    prepared: list[Prepared],
    options: argparse.Namespace,
    progress: Progress,
) -> Iterator[Line]:
    """The lines of a release, which is their implementation; where pip has none, they say so."""
    (name,) = options.impl
    own = {"implementation": f"{package} {version}", "release": version}
    progress.step(f"{package} {version}: pip")
    try:
        python = environment_of(package, version, options.beside)
    except RuntimeError as error:
        for each in prepared:
            yield not_installed(name, each.case, str(error)) | own
        return
    more = (options.time_limit, progress, options.device, python)
    for line in cells(name, prepared, *more):
        yield line | own


def _invariance(options: argparse.Namespace) -> int:
    """0, as what moves is measured and not judged; 1 where an implementation crashed or broke its contract."""
    if options.case is not None:
        raise ValueError("--case: expected none with --invariance, which has inputs of its own")
    from tileloss.tools.audit.invariance import LEVELS, Claims, measure, measure_model

    names = [name for name in options.impl if name != NATIVE]
    with Progress("invariance", LEVELS * len(names) + 1, quiet=options.quiet) as progress:
        claims = Claims()
        found = [measure(name, options.time_limit, progress, claims) for name in names]
        found.append(measure_model(options.time_limit, progress))
        every = itertools.chain.from_iterable(found)
        lines = _written((line for line in every if line["status"] != "refused"), options)
    if not options.json:
        print_invariance(lines)
    bad = ("crashed", "timeout")
    return 1 if any(x["status"] in bad or x["claim"] == "broken" for x in lines) else 0


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
