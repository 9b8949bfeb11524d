"""`tileloss gradcheck --frontend jax`: the gates, mutants and result lines are those of `tileloss judge`."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frontend", required=True, choices=["jax"], help="who computes")
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
    """The exit code: the program's."""
    if not options.config.is_file():
        raise ValueError(
            f"--config: expected a regular file, as it is read twice, got {options.config}"
        )
    case = ["--config", str(options.config), *(f"--set={each}" for each in options.set)]
    with tempfile.TemporaryDirectory(prefix="tileloss-") as name:
        inputs, outputs = Path(name) / "inputs.safetensors", Path(name) / "outputs.safetensors"
        write = [str(program), "judge", *case, "--write-inputs", str(inputs)]
        written = subprocess.run(write, stdout=subprocess.DEVNULL, check=False)
        if written.returncode:
            return written.returncode

        from tileloss.check import jax_case
        from tileloss.check.case_file import read_case, write_outputs

        described = read_case(inputs)
        write_outputs(outputs, jax_case.compute(described, options.implementation))
        mutants = ["--mutants"] if options.mutants or described.mutants else []
        by = ["--producer", jax_case.producer(options.implementation)]
        judge = [str(program), "judge", *case, "--outputs", str(outputs), *mutants, *by]
        return subprocess.run(judge, check=False).returncode
