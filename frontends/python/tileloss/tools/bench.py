"""Time a loss and its gradient between two measurements of the machine's roofs; with --frontend jax what tileloss.jax computes:
forward, value and gradient, and the same with donated operands, jitted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import tileloss
from tileloss._core.library import lib
from tileloss.testing._judge import Event, JudgeError, ask
from tileloss.tools import arguments
from tileloss.tools.config import overrides_tree
from tileloss.tools.printable import compact, print_columns, print_options
from tileloss.tools.requests import run_request
from tileloss.tools.results import ResultWriter

# The keys of the request (src/roofs/bench_request.cpp), which has their defaults, types and ranges.
_VALUES = {
    "loss": "cross_entropy (default), logprobs, ...",
    "preset": "of a policy loss: grpo, gspo, ...",
    "tokens": "rows; default 2048",
    "vocab": "columns; default 151936",
    "dtype": "of the logits, or of hidden and head: bf16 (default), fp16, fp32",
    "hidden": "hidden size, for the functions linear_*",
    "allowed": "the share of columns that a row's softmax runs over, in runs; 1: all, given as sets; default 0: none are given",
    "labels_per_row": "of logprobs: so many labels a row; default 1",
    "rank": "of the functions linear_*: R of a low-rank part of the head, with its gradients; default 0: none",
    "head_layout": "the head lies as [V,H] (vh, default) or as [H,V] (hv)",
    "dhead_dtype": "of the head's gradient: fp32 (default), or the head's dtype",
    "workspace": "a cap on scratch memory: 64MiB; default 0: the planner's choice",
    "pass": "forward, backward (from a saved row state) or value_and_grad alone; of what is no loss the latter is its backward",
    "impl": "kernel (default), a plain unfused baseline (reference), or both",
    "device": "cpu (default), cuda or cuda:N; there by the device's own clock",
    "iters": "timed calls; default 20",
    "warmup": "calls before them; default 3",
    "seed": "of the inputs; default 0",
    "isa": "instruction set, of those that `tileloss info` lists; default auto",
    "schedule": "of value_and_grad: auto (default), stash, recompute, ...",
    "threads": "default 0: as many as the library takes",
    "row_block": "rows a thread takes at a time; default 0: the planner's choice",
    "vocab_block": "columns of a tile, a multiple of 64; default 0: the planner's choice",
    "cuda_kernel": "with --device cuda, from logits; default auto",
}
_SWITCHES = {
    "frozen_head": "no gradient of the head",
    "in_place": "dlogits over the logits themselves",
    "entropy": "ask for each row's entropy as well",
}
# Of these, those that tileloss.jax has a use for.
_JAX = (
    *("loss", "preset", "tokens", "vocab", "dtype", "hidden", "head_layout", "seed"),
    *("iters", "warmup"),
)
_ROOF_KEYS = ("in_place_ms", "copy_ms", "read_ms", "exp_ms", "roofs_difference", "roofs_steady")
_NOTES = """\
Roofs are measured on the same buffers with the same number of threads before and after the passes, each the median of the
fastest of several loops; the faster of both counts. Buffers are reused, touched and on huge pages; logits are random (64
rows, repeated down the matrix). Policy losses get sequences of 256 tokens, advantages of both signs and old_logp near the
kernel's logp; max_length, where one is needed and none given, is the longest sequence's. With --allowed all rows have the
same columns, in runs of up to 1024, and words of their own; the labels are among them. An in-place pass overwrites the
logits: they are put back before each call, outside the timing. The copy roof of an in-place run copies one half of the matrix
over the other and counts it twice. The reference materialises float32 logits and softmax (8 bytes an element) and runs at
most 5 iterations. --pass backward is what PyTorch runs by default, the gradient from the row state that a forward has saved:
it reads and writes as much as value_and_grad, and has the same roof. The forward is not timed. A distillation's teacher is
drawn apart from the student; it saves no row state, and its backward is a value_and_grad without the loss.
linear_distillation's two heads have the same width. With the LM head (linear_*): the hidden states are normal numbers, the
head normal / sqrt(H). TFLOP/s count useful work, 2 N H V for a side's logits and as much again for each of dhidden and dhead,
whatever the schedule computes twice; the roof is the kernels' inner loop over random panels in L1. "measured" is the peak
above inputs, outputs and code. With --device cuda a time is the mean of many calls that are queued at once, and roofs are the
device's own copies; caches do not hold the tensors of the call before. "host us a call": until the host has queued one."""
Line = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _NOTES
    for name, summary in _VALUES.items():
        parser.add_argument(_flag(name), help=summary)
    for name, summary in _SWITCHES.items():
        parser.add_argument(_flag(name), action="store_true", help=summary)
    arguments.repeatable(parser, "--set", "KEY=VALUE", "an option of the loss: label_smoothing=0.1")
    parser.add_argument("--frontend", choices=["jax"], help="who computes, in place of the kernels")
    arguments.implementation(parser)
    json_summary = "one JSON object a line, the gradient last"
    parser.add_argument("--json", action="store_true", help=json_summary)
    arguments.output(parser, "append the same lines to this results file")


def run(options: argparse.Namespace) -> int:
    if options.frontend:
        return _run_jax(options)
    if options.implementation is not None:
        raise ValueError("--implementation: expected --frontend jax, got none")
    case: Line = {}
    results: dict[tuple[str, str], Event] = {}

    def told(event: Event) -> None:
        if event["event"] == "case":
            case.update(event["case"])
        if event["event"] == "result":  # the last word on a pass counts
            results[event["line"]["impl"], event["line"]["pass"]] = event

    with ResultWriter(options.output) as writer:  # before the work
        try:
            _request(options, told=told)
        except SystemExit:  # what was measured so far, against the first roofs
            if results:
                _tell(case, list(results.values()), options, writer)
            raise
        _tell(case, list(results.values()), options, writer)
    return 0


def _tell(
    case: Line, results: list[Event], options: argparse.Namespace, writer: ResultWriter
) -> None:
    lines = [result["line"] for result in results]
    for line in lines:
        writer.write(line)
    if options.json:
        _print_json(lines)
    else:
        _print_run(case, lines, results[0]["roofs"], options)
    sys.stdout.flush()
    if lines[0]["roofs_steady"] is False:
        percent = 100 * lines[0]["roofs_difference"]
        message = f"the roofs at the start and at the end differ by {percent:.0f} %: the machine was not quiet"
        print(f"tileloss: warning: {message}", file=sys.stderr)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _request(options: argparse.Namespace, *, told: Any = None, **instead: str) -> None:
    """Asks for the bench of the command line, with the values of ``instead`` in place of its own.

    Raises JudgeError, Crashed.
    """
    request = {"do": "bench", "config": _tree(options, instead)}
    try:
        run_request(request, told=told, is_quiet=True)
    except JudgeError as error:
        raise _of_flag(error) from None


def _tree(options: argparse.Namespace, instead: dict[str, str]) -> Line:
    """As a config has it. Values have no place: what is wrong is told with their key alone."""
    given = {name: getattr(options, name) for name in (*_VALUES, *_SWITCHES)} | instead
    leaf = {"origin": "", "directory": str(Path.cwd()), "kind": "scalar", "quoted": False}
    children = [
        leaf | {"key": name, "text": "true" if value is True else value}
        for name, value in given.items()
        if value not in (None, False)
    ]
    section = overrides_tree(options.set) | {"key": "options"}
    return {"key": "", "kind": "map", "children": [*children, section]}


def _of_flag(error: JudgeError) -> JudgeError:
    """The error with a flag's name where it names a key."""
    key, _, problem = str(error).partition(": ")
    message = f"{_flag(key)}: {problem}" if key in (*_VALUES, *_SWITCHES) else str(error)
    return JudgeError(message, error.code, error.out_of_memory)


# --------------------------------------------------------------------------------------------------------------- tileloss.jax


def _run_jax(options: argparse.Namespace) -> int:
    for name in (*_VALUES, *_SWITCHES):
        if name not in _JAX and getattr(options, name) not in (None, False):
            raise ValueError(f"{_flag(name)}: expected none with --frontend jax")
    with ResultWriter(options.output) as writer:  # before the work
        gradient, forward_roof = _measure_roofs(options)

        from tileloss.tools.jax_bench import time_passes

        lines = []
        for line in time_passes(gradient, options.implementation):
            lines.append({"tool": "bench", "version": tileloss.__version__} | line)
            _add_roofs(lines[-1], gradient, forward_roof)
            writer.write(lines[-1])
    if options.json:
        _print_json(lines)
    else:
        first = lines[0]
        _print_case(first, _shape(first), f"jax {first['jax']} on {first['platform']}")
        print()
        _print_passes(lines)
    return 0


def _measure_roofs(options: argparse.Namespace) -> tuple[Line, float]:
    """The kernels' own line of the gradient, with the calls that are wanted, and the forward's roof."""
    try:
        asked = ask({"do": "bench", "config": _tree(options, {}), "only_read": True})
    except JudgeError as error:
        raise _of_flag(error) from None
    lines: list[Line] = []

    def told(event: Event) -> None:
        if event["event"] == "result":
            lines.append(event["line"])

    _request(options, told=told, iters="1", warmup="0")
    case = asked.event("case")["case"]
    wanted = {name: case[name] for name in ("iters", "warmup")}
    return lines[-1] | wanted, lines[-2]["roof_ms"]


def _add_roofs(line: Line, gradient: Line, forward_roof: float) -> None:
    name = line["pass"]
    line |= {each: gradient[each] for each in _ROOF_KEYS}
    if name == "forward":
        line["roof_ms"] = forward_roof
    elif name == "value_and_grad" or gradient["hidden"]:
        line["roof_ms"] = gradient["roof_ms"]
    else:  # donated logits are written over; a teacher's are read
        teachers = line["loss"] == "distillation"
        memory = gradient["in_place_ms"] + teachers * gradient["read_ms"]
        line["roof_ms"] = max(memory, (1 + teachers) * gradient["exp_ms"])
    line["ratio_to_roof"] = line["median_ms"] / line["roof_ms"]


# --------------------------------------------------------------------------------------------------------------------- tables


def _print_json(lines: list[Line]) -> None:
    for line in lines:
        print(compact(line))


def _print_run(case: Line, lines: list[Line], roofs: str, options: argparse.Namespace) -> None:
    first = lines[0]
    threads = case["threads"] or lib.tileloss_default_threads()
    device = first["device"]
    shape = _shape(first) + ", frozen head" * options.frozen_head
    calls = {"iters": case["iters"]}  # of the reference fewer
    where = f"{threads} threads" if device == "cpu" else f"device {device}"
    _print_case(first | calls, shape, where)
    measured = [
        ["in place: read + write", f"{first['in_place_ms']:.2f}"],
        ["copy: read + non-temporal write", f"{first['copy_ms']:.2f}"],
        ["read", f"{first['read_ms']:.2f}"],
    ]
    if first["exp_ms"] > 0:
        measured.append(["exp: one an element, in L1", f"{first['exp_ms']:.2f}"])
    if first.get("roof_tflops"):
        measured.append(["products, in L1", f"{first['roof_tflops']:.3f} TFLOP/s"])
    print()
    print_columns(["roof", "ms"], measured, num_texts=1)
    print(f"{roofs}\n")
    _print_passes(lines)
    for line in lines:
        if "speedup_over_reference" in line:
            print(f"{line['pass']}: {line['speedup_over_reference']:.1f} x the reference")
    if first["hidden"]:
        parts = [
            [line["pass"], name, _megabytes(size)]
            for line in lines
            for name, size in line.get("buffers", {}).items()
        ]
        print()
        print_columns(["pass", "part of its workspace", "MB"], parts, num_texts=2)


def _shape(line: Line) -> str:
    tokens, vocab, hidden = line["tokens"], line["vocab"], line["hidden"]
    if not hidden:
        return f"[{tokens}, {vocab}]"
    head = [hidden, vocab] if line.get("head_layout") == "hv" else [vocab, hidden]
    return f"[{tokens}, {hidden}] x {head}"


def _print_case(line: Line, shape: str, where: str) -> None:
    name = " ".join(filter(None, (line["loss"], line["preset"])))
    ways = ", in place" * line.get("in_place", False)
    ways += ", with entropy" * line.get("entropy", False)
    calls = f"{line['iters']} iterations after {line['warmup']}"
    print(f"{name} {shape} {line['dtype']}{ways}, {where}, {calls}")
    print_options(line["options"])


def _print_passes(lines: list[Line]) -> None:
    rows = [_cells(line) for line in lines]
    print_columns(list(rows[0]), [list(row.values()) for row in rows], 4 if "isa" in rows[0] else 2)


def _cells(line: Line) -> dict[str, str]:
    """A pass as a row of the table, by column."""
    digits = 4 if "host_ns" in line else 2
    cells = {"pass": line["pass"], "impl": line["impl"]}
    if "isa" in line:
        schedule = line["schedule"]
        kernel = line.get("cuda_kernel", schedule)
        cells |= {"isa": line["isa"], "schedule": kernel if schedule == "-" else schedule}
    cells["first s"] = f"{line['first_call_s']:.3f}"
    for name in ("median", "min", "mean"):
        cells[f"{name} ms"] = f"{line[f'{name}_ms']:.{digits}f}"
    if "host_ns" in line:
        cells["host us a call"] = f"{line['host_ns'] / 1e3:.1f}"
    if "kept_columns" in line:
        cells["kept columns"] = str(line["kept_columns"])
        cells["rows in dhead"] = str(line["kept_rows"])
    if "tflops" in line:
        cells["TFLOP/s"] = f"{line['tflops']:.3f}"
        if line["roof_share"] is not None:
            cells["of roof"] = f"{100 * line['roof_share']:.1f} %"
    else:
        cells["GB/s"] = f"{line['gb_per_s']:.1f}"
    cells["roof ms"] = f"{line['roof_ms']:.{digits}f}"
    cells["ratio"] = f"{line['ratio_to_roof']:.2f}"
    if "workspace_bytes" in line:
        cells["workspace MB"] = _megabytes(line["workspace_bytes"])
    cells["measured MB"] = _megabytes(line["mem_scratch"])
    if "mem_peak" in line:
        cells["peak MB"] = f"{line['mem_peak'] / 1e6:.0f}"
    return cells


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"
