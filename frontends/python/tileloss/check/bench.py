"""`tileloss bench --frontend jax`: forward, value and gradient, and the same with donated operands, jitted, beside the roofs that
the compiled program measures in a run of its own before."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import tileloss
from tileloss.check.program import without_secrets
from tileloss.check.results import ResultWriter

# Of the flags, those that the program is to check and draw the options from.
_SHARED = ("loss", "preset", "tokens", "vocab", "dtype", "hidden", "head_layout", "seed")
_OF_THE_ROOFS = ("in_place_ms", "copy_ms", "read_ms", "exp_ms", "roofs_difference", "roofs_steady")


class Roofs(NamedTuple):
    """What `tileloss bench --json` says of one run, by pass: "forward", "value_and_grad"."""

    options: dict[str, Any]
    lines: dict[str, dict[str, Any]]

    def ms(self, timed: str) -> float:
        """The roof of a pass of jax_bench."""
        if timed == "forward":
            return self.lines["forward"]["roof_ms"]
        gradient = self.lines["value_and_grad"]
        if timed == "value_and_grad" or gradient["hidden"]:
            return gradient["roof_ms"]
        return max(gradient["in_place_ms"], gradient["exp_ms"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frontend", required=True, choices=["jax"], help="who computes")
    parser.add_argument(
        "--implementation", metavar="NAME", help="of tileloss.jax; default: its own choice"
    )
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
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the loss: label_smoothing=0.1 (repeatable)",
    )
    parser.add_argument("--iters", type=_count, default=20, help="timed calls")
    parser.add_argument("--warmup", type=_count, default=3, help="calls before them")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="append the same lines to this results file"
    )


def run(program: Path, options: argparse.Namespace) -> int:
    with ResultWriter(options.output) as writer:  # before the work
        roofs = _measure_roofs(program, options)
        if isinstance(roofs, int):
            return roofs

        from tileloss.check.jax_bench import time_passes

        timings = [
            {"tool": "bench", "version": tileloss.__version__} | line
            for line in time_passes(roofs, options)
        ]
        for line in timings:
            _add_roofs(line, roofs)
            writer.write(line)
    if options.json:
        for line in timings:
            print(json.dumps(line))
    else:
        _print_table(timings, roofs)
    return 0


def _add_roofs(line: dict[str, Any], roofs: Roofs) -> None:
    line |= {name: roofs.lines["forward"][name] for name in _OF_THE_ROOFS}
    line["roof_ms"] = roofs.ms(line["pass"])
    line["ratio_to_roof"] = line["median_ms"] / line["roof_ms"]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _measure_roofs(program: Path, options: argparse.Namespace) -> Roofs | int:
    """The program looks at the flags as well: its exit code where it refuses them."""
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
    return Roofs(forward["options"], {"forward": forward, "value_and_grad": gradient})


def _cells(line: dict[str, Any]) -> dict[str, str]:
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


def _print_table(timings: list[dict[str, Any]], roofs: Roofs) -> None:
    first = timings[0]
    shape = f"[{first['tokens']}, {first['vocab']}]"
    if first["hidden"]:
        shape += f" of hidden {first['hidden']}"
    preset = f" {first['preset']}" if first["preset"] else ""
    print(
        f"{first['loss']}{preset} {shape} {first['dtype']}, jax {first['jax']} on {first['platform']}, "
        f"{first['iters']} iterations after {first['warmup']}"
    )
    if roofs.options:
        print(f"options {json.dumps(roofs.options)}")
    rows = [_cells(line) for line in timings]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    print("\n" + "  ".join(name.ljust(width) for name, width in widths.items()).rstrip())
    print("  ".join("-" * width for width in widths.values()))
    for row in rows:
        texts = {
            name: row[name].ljust(w) if name in ("pass", "impl") else row[name].rjust(w)
            for name, w in widths.items()
        }
        print("  ".join(texts.values()).rstrip())
