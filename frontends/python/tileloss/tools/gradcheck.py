"""`tileloss gradcheck` of a model, of an implementation other than the program's kernels, or with a tracker. Gates, mutants and
result lines are the compiled program's."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tileloss.tools import arguments, trackers
from tileloss.tools.config import Config, translate_old_keys
from tileloss.tools.printable import escaped
from tileloss.tools.program import run_program
from tileloss.tools.progress import Progress

_OWN = "tileloss"  # the program's own kernels


class _Job(NamedTuple):
    """A case as the program is to be told of it."""

    program: Path
    case: list[str]  # arguments
    facts: dict[str, Any]
    log: Callable[[dict[str, Any]], None]  # where result lines go
    is_quiet: bool

    def run(self, subcommand: str, *more: str) -> int:
        own = [f"--facts={json.dumps(self.facts)}", *(["--quiet"] if self.is_quiet else [])]
        return run_program(self.program, [subcommand, *self.case, *own, *more], self.log)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frontend", choices=["jax"], help="the same as --impl tileloss-jax")
    parser.add_argument(
        "--impl",
        metavar="NAME",
        help="who computes: a name of `tileloss audit --list`, module:function or FILE.py:function (docs/users/audit.md)",
    )
    arguments.implementation(parser)
    arguments.config(parser, "seq_len=33")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="plant every applicable mutant in the outputs; each must be caught",
    )
    own = parser.add_argument_group("of the program's own kernels")
    own.add_argument("--strict", action="store_true", help="on guard pages as well")
    own.add_argument("--row", metavar="N", help="show one row at every stage")
    own.add_argument("--column", metavar="N", help="with --row: the gradient at this column")
    arguments.quiet(parser)


def run(program: Path, options: argparse.Namespace) -> int:
    """The exit code: the program's; 1 as well where the implementation raises, or leaves out what the case asks for."""
    name = _name(options)
    config = Config(options.config, options.set)
    settings = trackers.read_settings(config)
    overrides = translate_old_keys(config)
    has_model = "model_path" in config
    if has_model:
        from tileloss.tools import model_case

        overrides += model_case.prepare(config)
    # What is wrong with the rest of the config is said before a model is loaded.
    unread = ["source.path=unread"] if has_model else []
    code = run_program(
        program, ["gradcheck", *config.arguments(*overrides, *unread), "--only-read"]
    )
    if code:
        return code

    def work(log: Callable[[dict[str, Any]], None]) -> int:
        with (
            tempfile.TemporaryDirectory(prefix="tileloss-") as folder,
            Progress("gradcheck", quiet=options.quiet) as progress,
        ):
            sets, facts = overrides, {}
            if has_model:
                made = model_case.make(config, Path(folder), progress)
                sets, facts = overrides + made.overrides, made.facts
            progress.step("judging")
            job = _Job(program, config.arguments(*sets), facts, log, options.quiet)
            return _check(job, name, options, Path(folder))

    return trackers.run(settings, work)


def _name(options: argparse.Namespace) -> str:
    if options.frontend and options.impl:
        raise ValueError("expected one of --impl and --frontend")
    name = "tileloss-jax" if options.frontend else str(options.impl or _OWN)
    if options.implementation is not None and name != "tileloss-jax":
        raise ValueError(f"--implementation: expected --impl tileloss-jax, got --impl {name}")
    if name != _OWN and (options.strict or options.row or options.column):
        raise ValueError(
            f"--strict, --row and --column are of the program's own kernels, got --impl {name}"
        )
    from tileloss.tools.implementations import check_name, hide_gpus

    check_name(name)
    if name not in (_OWN, "tileloss-jax"):
        hide_gpus()
    return name


def _check(job: _Job, name: str, options: argparse.Namespace, folder: Path) -> int:
    if name == _OWN:
        flags = [f"--{flag}" for flag in ("mutants", "strict") if getattr(options, flag)]
        flags += [f"--{f}={getattr(options, f)}" for f in ("row", "column") if getattr(options, f)]
        return job.run("gradcheck", *flags)
    inputs, outputs = folder / "inputs.safetensors", folder / "outputs.safetensors"
    write = ["judge", *job.case, f"--write-inputs={inputs}"]
    if written := run_program(job.program, write, is_silent=True):
        return written

    from tileloss.testing.outputs import Missing, prepare
    from tileloss.tools.case_file import read_case, write_tensors

    described = read_case(inputs)
    returned, producer = _compute(described, name, options.implementation)
    if producer is None:
        return 1
    try:
        write_tensors(outputs, prepare(described, returned))
    except (Missing, TypeError) as error:
        print(f"FAIL: {escaped(str(error))}")
        return 1
    mutants = ["--mutants"] if options.mutants or described.mutants else []
    return job.run("judge", f"--outputs={outputs}", f"--producer={producer}", *mutants)


def _compute(case: Any, name: str, variant: str | None) -> tuple[Any, str | None]:
    """What was returned and who made it; None in the latter's place where the implementation raised, which is said."""
    if name == "tileloss-jax":
        from tileloss.tools.implementations import own

        return own.through_jax(case, variant), own.jax_producer(variant)

    from tileloss.testing.case import Refused
    from tileloss.testing.outputs import describe
    from tileloss.tools.implementations import load

    implementation = load(name)
    try:
        return implementation(case), f"{name}, {implementation.package}"
    except Refused as refusal:
        raise ValueError(f"--impl {name}: refused: {refusal}") from refusal
    except Exception as error:
        print(f"FAIL: {escaped(describe(error))}")
        return None, None
