#!/usr/bin/env python3
"""TileLoss against what PyTorch and JAX users have: transformers, torch eager, torch.compile, torch's linear_cross_entropy, TRL;
optax, plain JAX, tokamax. On a GPU: Liger, Cut Cross-Entropy, QuACK beside torch, and the GPU's roofs.

Everything is bfloat16. Each contestant's answer is checked before it is timed, its peak memory measured in a
process of its own. Prints a Markdown table, and as the last line which bars passed; those of the LM head are stated
for machines with AMX, and only reported on others. Exit codes: 0 no bar failed, 1 one failed or an answer is wrong,
2 usage, 3 the environment.

--device cuda: by the GPU's clock. A contestant that fails, or takes longer than --limit, is a line that says so; results
go to --output as they come. Exit code 1 where TileLoss itself failed, 3 without a CUDA device. `host` is the CPU in the
GPU's place, to try the program.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tileloss.tools.arguments import count, output

if TYPE_CHECKING:
    from comparison.contestants import Contestant


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--tokens", type=count, default=2048, metavar="N")
    parser.add_argument("--vocab", type=count, default=151936, metavar="V")
    parser.add_argument("--hidden", type=count, default=1536, metavar="H")
    parser.add_argument(
        "--rounds", type=count, default=5, help="of each contestant; the slowest have fewer"
    )
    parser.add_argument(
        "--threads", type=count, default=len(os.sched_getaffinity(0)), help="default: all CPUs"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "host"), default="cpu")
    parser.add_argument(
        "--limit",
        type=count,
        default=60,
        metavar="SECONDS",
        help="of a contestant on a GPU, compilation included; default: %(default)s",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="contestants to take, a shell pattern over GROUP/NAME such as 'grpo/*'; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="print the contestants and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    output(parser, "write a line a contestant, for `tileloss report`")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="put the table into this page of docs/measurements, between its markers",
    )
    parser.add_argument("--measure-peak", metavar="ORDER", help=argparse.SUPPRESS)
    parser.add_argument("--work", metavar="ORDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.page and options.only:
        parser.error("--page takes every contestant: leave out --only")
    if options.json and options.device != "cpu":
        parser.error("--json is for --device cpu: take --output")
    return options


def use_threads(count: int) -> None:
    """The same for all, before either library has started its own."""
    os.environ["TILELOSS_NUM_THREADS"] = str(count)
    # A pool of compiler processes would idle beside the measurements.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # XLA has a thread for each CPU that it may use, and no other setting.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    import torch

    torch.set_num_threads(count)


def run_child(order: str) -> int:
    """Measures one contestant's peak memory, prints it."""
    asked = json.loads(order)
    use_threads(asked["threads"])
    from comparison.contestants import by_key, register_for
    from comparison.inputs import Shape
    from comparison.measure import peak_of_step

    register_for("cpu")
    print(peak_of_step(by_key(asked["key"]), Shape(**asked["shape"]), asked["workspace_bytes"]))
    return 0


class UnfitOutput(Exception):
    """A path that no file can be written to."""


def output_places(options: argparse.Namespace) -> dict[str, Path]:
    """By flag, behind links. Raises UnfitOutput."""
    from tileloss.tools.files import output_place

    paths = {name: getattr(options, name) for name in ("json", "output", "page")}
    try:
        places = {name: output_place(f"--{name}", path) for name, path in paths.items() if path}
    except ValueError as error:
        raise UnfitOutput(str(error)) from None
    if options.page:
        from comparison import report

        try:
            report.find_markers(options.page)
        except report.NoMarkers as error:
            raise UnfitOutput(str(error)) from None
    if len(set(places.values())) < len(places):
        raise UnfitOutput("--json, --output and --page: expected different files, got one twice")
    return places


def log(line: str) -> None:
    print(f"compare: {line}", file=sys.stderr, flush=True)


def chosen_ones(options: argparse.Namespace) -> list[Contestant]:
    """By --only."""
    from comparison import measure  # noqa: F401  which knows the groups
    from comparison.contestants import GROUPS, register_for

    register_for(options.device)
    patterns = options.only or ["*"]
    everyone = [entry for group in GROUPS.values() for entry in group.contestants]
    chosen = [each for each in everyone if any(fnmatch.fnmatch(each.key, p) for p in patterns)]
    if not chosen:
        log(f"--only: no contestant matches {patterns}; --list prints them all")
    return chosen


def compare_on_device(options: argparse.Namespace) -> int:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        log("no CUDA device")
        return 3
    from comparison import on_device, report
    from comparison.device import DEVICES
    from comparison.inputs import Shape

    # A share of another's memory is a budget that only the CPU's memory is measured for.
    chosen = [each for each in chosen_ones(options) if each.quarter_of is None]
    if options.list or not chosen:
        print("\n".join(entry.key for entry in chosen))
        return 0 if chosen else 2
    shape = Shape(options.tokens, options.vocab, options.hidden)
    places = output_places(options)
    machine = DEVICES[options.device]().machine()
    settings = report.settings(shape, machine=machine, device=options.device)
    measurements = []
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(places["output"].open("w")) if options.output else None
        for found in on_device.measure_all(
            chosen, shape, options.device, options.rounds, options.limit, log
        ):
            measurements.append(found)
            for line in report.as_lines([found], shape, settings) if lines else []:
                print(json.dumps(line), file=lines, flush=True)
    table = report.table(measurements, shape, settings, options.rounds)
    print(table)
    if options.page:
        report.write_page(places["page"], table)
    return int(any(each.failed and "TileLoss" in each.contestant.name for each in measurements))


def compare(options: argparse.Namespace) -> int:
    use_threads(options.threads)
    from comparison import bars, measure, report
    from comparison.inputs import Shape
    from tileloss._core.calls import chosen_isa

    chosen = chosen_ones(options)
    if options.list or not chosen:
        print("\n".join(entry.key for entry in chosen))
        return 0 if chosen else 2
    shape = Shape(options.tokens, options.vocab, options.hidden)
    places = output_places(options)
    try:
        measurements = measure.measure(chosen, shape, options.threads, options.rounds, log)
    except measure.WrongAnswer as error:
        log(f"wrong answer: {error}")
        return 1
    isa = chosen_isa()
    verdicts = bars.judge({each.contestant.key: each for each in measurements}, isa)
    settings = report.settings(shape, machine=report.processor(), isa=isa, threads=options.threads)
    table = report.table(measurements, shape, settings, options.rounds)
    print(table)
    if options.json:
        report.write_json(places["json"], measurements, verdicts, settings)
    if options.output:
        report.write_lines(places["output"], report.as_lines(measurements, shape, settings))
    if options.page:
        report.write_page(places["page"], table)
    print(bars.last_line(verdicts, shape))
    return 1 if any(verdict.failed for verdict in verdicts) else 0


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.measure_peak:
        return run_child(options.measure_peak)
    if options.work:
        from comparison.on_device import run_worker

        return run_worker(options.work)
    try:
        return compare(options) if options.device == "cpu" else compare_on_device(options)
    except UnfitOutput as error:
        log(str(error))
        return 2
    except ImportError as error:
        log(f"{error}: every contestant's package must be installed, or left out by --only")
    except (OSError, subprocess.CalledProcessError) as error:
        log(str(error))
    return 3


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    # At once: with torch and XLA in one process the teardown of their threads aborts it now and then (jax 0.9, torch 2.15).
    os._exit(exit_code)
