"""`tileloss gradcheck --impl NAME`: the gates, mutants and result lines are those of `tileloss judge`."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import traceback
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frontend", choices=["jax"], help="the same as --impl tileloss-jax")
    parser.add_argument(
        "--impl",
        metavar="NAME",
        help="who computes: a name of `tileloss audit --list`, module:function or FILE.py:function (docs/users/audit.md)",
    )
    parser.add_argument(
        "--implementation", metavar="NAME", help="of tileloss.jax; default: its own choice"
    )
    parser.add_argument("--config", required=True, type=Path, help="YAML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key: seq_len=33 (repeatable)",
    )
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="plant every applicable mutant in the outputs; each must be caught",
    )


def run(program: Path, options: argparse.Namespace) -> int:
    """The exit code: the program's; 1 as well where the implementation raises, or leaves out what the case asks for."""
    name = _name(options)
    case = ["--config", str(options.config), *(f"--set={each}" for each in options.set)]
    if name == "tileloss":
        mutants = ["--mutants"] if options.mutants else []
        return subprocess.run([str(program), "gradcheck", *case, *mutants], check=False).returncode
    if not options.config.is_file():
        raise ValueError(
            f"--config: expected a regular file, as it is read twice, got {options.config}"
        )
    with tempfile.TemporaryDirectory(prefix="tileloss-") as folder:
        return _judge(program, case, name, options, Path(folder))


def _name(options: argparse.Namespace) -> str:
    if (options.frontend is None) == (options.impl is None):
        raise ValueError("expected one of --impl and --frontend")
    name = options.impl or "tileloss-jax"
    if options.implementation is not None and name != "tileloss-jax":
        raise ValueError(f"--implementation: expected --impl tileloss-jax, got --impl {name}")
    from tileloss.check.implementations import check_name

    check_name(name)
    return str(name)


def _judge(
    program: Path, case: list[str], name: str, options: argparse.Namespace, folder: Path
) -> int:
    inputs, outputs = folder / "inputs.safetensors", folder / "outputs.safetensors"
    write = [str(program), "judge", *case, "--write-inputs", str(inputs)]
    written = subprocess.run(write, stdout=subprocess.DEVNULL, check=False)
    if written.returncode:
        return written.returncode

    from tileloss.check.case_file import read_case, write_tensors
    from tileloss.check.outputs import Missing, prepare

    described = read_case(inputs)
    returned, producer = _compute(described, name, options.implementation)
    if producer is None:
        return 1
    try:
        write_tensors(outputs, prepare(described, returned))
    except (Missing, TypeError) as error:
        print(f"FAIL: {error}")
        return 1
    mutants = ["--mutants"] if options.mutants or described.mutants else []
    judge = [str(program), "judge", *case, "--outputs", str(outputs), *mutants]
    return subprocess.run([*judge, "--producer", producer], check=False).returncode


def _compute(case: Any, name: str, variant: str | None) -> tuple[Any, str | None]:
    """What was returned and who made it; None in the latter's place where the implementation raised, which is said."""
    if name == "tileloss-jax":
        from tileloss.check import jax_case

        return jax_case.compute(case, variant), jax_case.producer(variant)

    from tileloss.check.case import Refused
    from tileloss.check.implementations import load

    implementation = load(name)
    try:
        return implementation(case), f"{name}, {implementation.package}"
    except Refused as refusal:
        raise ValueError(f"--impl {name}: refused: {refusal}") from refusal
    except Exception as error:
        print(f"FAIL: {describe(error)}")
        return None, None


def describe(error: BaseException) -> str:
    """One line: what was raised, and the last line of code that is not ours, as FILE:LINE."""
    ours = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)] or frames
    first = " ".join(str(error).split())[:300]
    if not theirs:
        return f"{type(error).__name__}: {first}"
    file = theirs[-1].filename.rpartition("site-packages/")[2]
    return f"{type(error).__name__}: {first}, at {file}:{theirs[-1].lineno}"
