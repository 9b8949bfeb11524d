"""`tileloss judge`: what something else computed, held against the double-precision oracle by gradcheck's gates."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tileloss._core.slots import ARGUMENTS
from tileloss.tools import arguments
from tileloss.tools.case_file import read_tensors, write_tensors
from tileloss.tools.checks import PASS, Job
from tileloss.tools.files import output_place
from tileloss.tools.printable import escaped, print_columns, print_options

_FOOTER = """\
The config is gradcheck's; what concerns the library's own kernels (the section kernel, head_layout, mutants, strict) has
no effect. The tensors of both files have the names of tileloss_args: logits, labels, ... are inputs; outputs, any of
them, are: loss,
{row_outputs},
metrics, and dlogits or dhidden, dhead, dbias. divergence, teacher_entropy and agreement are distillation's.
Gates, exit codes and the results file are gradcheck's. docs/users/gradcheck.md says more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _FOOTER.format(row_outputs=", ".join(ARGUMENTS["distillation"].row_outputs))
    arguments.config(parser, "seq_len=33")
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument(
        "--outputs",
        type=Path,
        metavar="FILE",
        help="safetensors file of what was computed: it is judged",
    )
    files.add_argument(
        "--write-inputs",
        type=Path,
        metavar="FILE",
        help="safetensors file to be written: what it is to be computed on",
    )
    arguments.mutants(parser)
    parser.add_argument(
        "--producer", metavar="TEXT", default="", help="who made the outputs: text for the report"
    )
    arguments.quiet(parser)


def run(options: argparse.Namespace) -> int:
    if options.write_inputs is not None:
        if options.mutants or options.producer:
            raise ValueError("--mutants and --producer: expected --outputs beside them")
        return _write_inputs(Job(options), options.write_inputs)
    path: Path = options.outputs
    job = Job(options, inputs=[path])
    outputs = read_tensors(path)
    return job.run(lambda: job.judge(outputs, options.producer, str(path), mutants=options.mutants))


def _write_inputs(job: Job, path: Path) -> int:
    place = output_place("--write-inputs", path, job.inputs)
    job.load()
    drawn = job.draw()
    case = drawn.event("case")["case"]
    write_tensors(place, drawn.tensors, {"case": json.dumps(case)})
    print(f"judge {escaped(str(job.config.file))}: {case['function']}")
    print_options(case["options"])
    print()
    rows = [[name, str(x.dtype), str(list(x.shape))] for name, x in drawn.tensors.items()]
    print_columns(["tensor", "dtype", "shape"], rows)
    print(f"\ninputs written to {escaped(str(path))}")
    return PASS
