"""`tileloss bench --frontend jax`: forward, value and gradient, and the same with donated operands, jitted, beside the roofs that
the compiled program measures in a run of its own before."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import tileloss
from tileloss.tools import arguments
from tileloss.tools.children import without_secrets
from tileloss.tools.printable import print_columns
from tileloss.tools.results import ResultWriter

# Of the flags, those that the program is to check and draw the options from.
_SHARED = ("loss", "preset", "tokens", "vocab", "dtype", "hidden", "head_layout", "seed")
_ROOF_KEYS = ("in_place_ms", "copy_ms", "read_ms", "exp_ms", "roofs_difference", "roofs_steady")
Line = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frontend", required=True, choices=["jax"], help="who computes")
    arguments.implementation(parser)
    parser.add_argument("--loss", default="cross_entropy", help="cross_entropy, logprobs, ...")
    parser.add_argument("--preset", help="of a policy loss: grpo, gspo, ...")
    parser.add_argument("--tokens", default="2048", help="rows")
    parser.add_argument("--vocab", default="151936", help="columns")
    parser.add_argument("--dtype", default="bf16", help="of the logits, or of hidden and head")
    parser.add_argument("--hidden", help="hidden size, for the functions linear_*")
    parser.add_argument(
        "--head-layout", choices=["vh", "hv"], help="the head lies as [V,H] or [H,V]"
    )
    parser.add_argument("--seed", default="0", help="of the inputs")
    arguments.repeatable(parser, "--set", "KEY=VALUE", "an option of the loss: label_smoothing=0.1")
    parser.add_argument("--iters", type=arguments.count, default=20, help="timed calls")
    parser.add_argument("--warmup", type=arguments.count, default=3, help="calls before them")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments.output(parser, "append the same lines to this results file")


def run(program: Path, options: argparse.Namespace) -> int:
    with ResultWriter(options.output) as writer:  # before the work
        roofs = _measure_roofs(program, options)
        if isinstance(roofs, int):
            return roofs

        from tileloss.tools.jax_bench import time_passes

        lines = []
        for line in time_passes(roofs["value_and_grad"], options):
            lines.append({"tool": "bench", "version": tileloss.__version__} | line)
            _add_roofs(lines[-1], roofs)
            writer.write(lines[-1])
    if options.json:
        for line in lines:
            print(json.dumps(line))
    else:
        _print_table(lines)
    return 0


def _add_roofs(line: Line, roofs: dict[str, Line]) -> None:
    gradient, name = roofs["value_and_grad"], line["pass"]
    line |= {each: gradient[each] for each in _ROOF_KEYS}
    if name in roofs:
        line["roof_ms"] = roofs[name]["roof_ms"]
    elif gradient["hidden"]:
        line["roof_ms"] = gradient["roof_ms"]
    else:  # donated logits are written over; a teacher's are read
        teachers = line["loss"] == "distillation"
        memory = gradient["in_place_ms"] + teachers * gradient["read_ms"]
        line["roof_ms"] = max(memory, (1 + teachers) * gradient["exp_ms"])
    line["ratio_to_roof"] = line["median_ms"] / line["roof_ms"]


def _measure_roofs(program: Path, options: argparse.Namespace) -> dict[str, Line] | int:
    """What `tileloss bench --json` says, by pass. The program looks at the flags as well: its exit code where it refuses them."""
    command = [str(program), "bench", "--json", "--iters=1", "--warmup=0"]
    for name in _SHARED:
        value = getattr(options, name)
        if value is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    command += [f"--set={each}" for each in options.set]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, env=without_secrets()
    )
    if done.returncode:
        return done.returncode
    forward, gradient = map(json.loads, done.stdout.splitlines())
    return {"forward": forward, "value_and_grad": gradient}


def _cells(line: Line) -> dict[str, str]:
    cells = {
        "pass": line["pass"],
        "impl": line["impl"],
        "first s": f"{line['first_call_s']:.3f}",
        **{f"{name} ms": f"{line[f'{name}_ms']:.2f}" for name in ("median", "min", "mean")},
    }
    if "tflops" in line:
        cells["TFLOP/s"] = f"{line['tflops']:.3f}"
        cells["of roof"] = f"{100 * line['roof_share']:.1f} %"
    else:
        cells["GB/s"] = f"{line['gb_per_s']:.1f}"
    cells["roof ms"] = f"{line['roof_ms']:.2f}"
    cells["ratio"] = f"{line['ratio_to_roof']:.2f}"
    cells["measured MB"] = f"{line['mem_scratch'] / 1e6:.2f}"
    return cells


def _print_table(lines: list[Line]) -> None:
    first = lines[0]
    shape = f"[{first['tokens']}, {first['vocab']}]"
    if first["hidden"]:
        shape += f" of hidden {first['hidden']}"
    preset = f" {first['preset']}" if first["preset"] else ""
    print(
        f"{first['loss']}{preset} {shape} {first['dtype']}, jax {first['jax']} on {first['platform']}, "
        f"{first['iters']} iterations after {first['warmup']}"
    )
    if first["options"]:
        print(f"options {json.dumps(first['options'])}")
    rows = [_cells(line) for line in lines]
    print()
    print_columns(list(rows[0]), [list(row.values()) for row in rows], num_texts=2)
