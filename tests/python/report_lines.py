"""Result lines for the tests of `tileloss report`: from the program where it is quick, else as the tools write them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Line = dict[str, Any]


def program_files(folder: Path) -> list[Path]:
    """A check with mutants, one of the LM head, one row's stages, times, and a sweep over two parameters."""
    checks, times, sweep = (folder / f"{name}.jsonl" for name in ("checks", "bench", "sweep"))
    config, sizes = folder / "sweep.yaml", ["--set=seq_len=6", "--set=vocab_size=255"]
    config.write_text(
        "loss: [cross_entropy, {name: policy_loss, preset: grpo}]\nshape: 4x3000\ndtype: bf16\n"
        "row_block: [1, 2]\nvocab_block: [512, 1024, 2048]\niters: 1\nwarmup: 0\nthreads: 1\n"
    )
    for name, *more in (
        ("ce_edges", "--mutants", *sizes),
        ("ce_edges", "--row=5", *sizes),
        ("linear_safetensors", "--strict"),
    ):
        path = ROOT / "configs" / f"gradcheck_{name}.yaml"
        _run("gradcheck", "--config", path, f"--set=output={checks}", *more)
    bench = ["--tokens=8", "--vocab=1000", "--iters=2", "--warmup=0", "--json"]
    times.write_text(
        _run("bench", "--loss=cross_entropy", *bench)
        + _run("bench", "--loss=linear_cross_entropy", "--hidden=16", *bench)
    )
    _run("sweep", "--config", config, f"--set=output={sweep}")
    return [checks, times, sweep]


def _run(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tileloss", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_line(name: str = "ce", **more: Any) -> Line:
    gates = [
        {"name": "logp", "limit": 1.0, "value": 0.25, "pass": True},
        {"name": "dlogits/ulp_target", "limit": 2.0, "value": 1.0, "pass": True},
        {"name": "dlogits/nonfinite", "limit": 0.0, "value": 0.0, "pass": True},
    ]
    start = {"tool": "gradcheck", "version": "0.1.0", "config": f"configs/gradcheck_{name}.yaml"}
    case = {"loss": "cross_entropy", "options": {}, "preset": None, "dtype": "bfloat16", "seed": 0}
    return start | case | {"loss_ref": 2.5, "gates": gates, "pass": True} | more


def failed_check() -> Line:
    """A gate over its limit, one without a value, one without allowance; a mutant that slipped through."""
    gates = [
        {"name": "logp", "limit": 1.0, "value": 3.25, "pass": False},
        {"name": "lse", "limit": 1.0, "value": None, "pass": False},
        {"name": "argmax", "limit": 0.0, "value": 2.0, "pass": False},
        {
            "name": "a_gate_whose_name_is_far_too_long_for_its_place/dlogits/normwise",
            "limit": 1.0,
            "value": 0.5,
            "pass": True,
        },
    ]
    mutants = [
        {"name": "gradient_zero", "planted": True, "caught_by": ["logp", "dlogits/ulp_target"]},
        {"name": "gradient_halved", "planted": True, "caught_by": []},
        {"name": "partial_tile_skipped", "planted": False, "caught_by": []},
    ]
    return check_line("ce_options", gates=gates, mutants=mutants) | {"pass": False}


def audit_lines() -> list[Line]:
    cells = [
        ("torch", "torch 2.15.0", "ce/confident", "failed"),
        ("torch", "torch 2.15.0", "ce/softcap", "refused"),
        ("tileloss", "tileloss 0.1.0", "ce/confident", "pass"),
        ("tileloss", "tileloss 0.1.0", "ce/softcap", "pass"),
        ("liger", "", "ce/softcap", "not_installed"),
        ("trl", "trl 1.16.0", "ce/softcap", "crashed"),
        ("trl", "trl 1.16.0", "ce/confident", "timeout"),
    ]
    lines = []
    for implementation, package, case, status in cells:
        is_failed = status == "failed"
        lines.append(
            {
                "tool": "audit",
                "version": "0.1.0",
                "implementation": implementation,
                "package": package,
                "case": case,
                "status": status,
                "gate": "dlogits/ulp_target" if is_failed else None,
                "value": 12.5 if is_failed else None,
                "limit": 1.0 if is_failed else None,
                "message": f"the message of {status}",
                "looks_like": "somebody/something#1: a word of it" if is_failed else None,
                "seconds": 0.25,
            }
        )
    return lines


def invariance_lines() -> list[Line]:
    """Of torch what moves, of tileloss what does not, and one that is not there."""
    cells = [
        ("torch", "batch_split", "logp", 0.07),
        ("torch", "shards", "logp", 3.0),
        ("torch", "row_order", "dlogits", 2e-5),
        ("tileloss", "batch_split", "logp", 0.0),
        ("tileloss", "batch_split", "dlogits", 0.0),
        ("mine", "implementation", "dlogits", 1e-3),  # which claims to be tileloss
    ]
    lines = []
    for implementation, varied, quantity, reach in cells:
        is_logp = quantity == "logp"
        quantiles = {"0.01": 1 - reach, "0.5": 1.0, "1": 1 + reach}
        lines.append(
            {
                "tool": "invariance",
                "version": "0.1.0",
                "implementation": implementation,
                "package": "torch 2.15.0",
                "status": "measured",
                "level": "logits",
                "varied": varied,
                "quantity": quantity,
                "dtype": "bfloat16",
                "same_bits": not reach,
                "ratio_quantiles": quantiles if is_logp else None,
                "outside_1e-3": (0.41 if reach > 1e-3 else 0.0) if is_logp else None,
                "relative_difference": None if is_logp else reach,
                "against": "tileloss" if implementation == "mine" else None,
                "claim": "broken" if implementation == "mine" else None,
                "message": None,
            }
        )
    missing = {"status": "not_installed", "implementation": "liger", "message": "no triton"}
    nothing = {"quantity": None, "same_bits": None, "ratio_quantiles": None, "outside_1e-3": None}
    return [*lines, lines[0] | nothing | missing]


def compare_lines() -> list[Line]:
    """Two groups, the second with two variants of torch eager."""
    figures = [
        ("training_step", "a training step", "TileLoss", 1.7, 430_000_000),
        ("training_step", "a training step", "transformers", 6.4, 3_900_000_000),
        ("cross_entropy", "cross-entropy from logits", "TileLoss, in place", 0.051, 60_000),
        ("cross_entropy", "cross-entropy from logits", "torch eager", 0.792, 1_244_000_000),
        (
            "cross_entropy",
            "cross-entropy from logits",
            "torch eager, float32 logits",
            0.9,
            3_000_000_000,
        ),
    ]
    lines = []
    for group, title, name, seconds, peak in figures:
        lines.append(
            {
                "tool": "compare",
                "version": "0.1.0",
                "group": group,
                "title": title,
                "sizes": "[2048, 151936], and words that go on until they no longer fit a line of a phone",
                "memory": "memory above inputs and outputs",
                "name": name,
                "median_s": seconds,
                "times_s": [seconds],
                "peak_bytes": peak,
                "workspace_bytes": None,
                "errors": {"loss": 1e-6, "gradient": 0.002},
                "dtype": "bfloat16",
                "machine": "A processor",
                "isa": "avx2",
                "threads": 2,
                "versions": {"torch": "2.15.0", "tokamax": None},
            }
        )
    return lines


def bench_line() -> Line:
    case = {"impl": "kernel", "loss": "cross_entropy", "tokens": 8, "vocab": 1000, "hidden": 16}
    times = {"median_ms": 0.5, "min_ms": 0.4, "roof_ms": 0.25, "gb_per_s": 20.0, "tflops": 0.1}
    memory = {"mem_scratch": 4096, "workspace_bytes": 2048, "buffers": {"losses": 512}}
    more = {"dtype": "bfloat16", "options": {"softcap": 30}, "pass": "forward", "threads": 2}
    return case | times | memory | more | {"preset": None, "roofs_steady": True}


def sweep_lines() -> list[Line]:
    """Over threads alone, with one case that did not come through."""
    lines = []
    for name in ("forward", "value_and_grad"):
        for threads, ms in ((0, 0.25), (1, 0.5), (2, 0.26), (16, None)):
            case = {"loss": "cross_entropy", "tokens": 64, "vocab": 32000, "dtype": "bfloat16"}
            case |= {"pass": name, "isa": "auto", "threads": threads, "row_block": 0}
            line = {
                "tool": "sweep",
                "version": "0.1.0",
                "case": case,
                "status": "ok",
                "median_ms": ms,
            }
            if ms is None:
                line |= {"status": "out_of_memory", "message": "16 threads were refused"}
            lines.append(line)
    return lines


def grid_lines(*isas: str) -> list[Line]:
    """Over nine blocks and some instruction sets: a phone has not the room for all names side by side."""
    lines = []
    for isa in isas:
        for number in range(9):
            case = {
                "loss": "cross_entropy",
                "options": {"softcap": 30.0},
                "tokens": 64,
                "vocab": 151936,
            }
            case |= {
                "dtype": "bfloat16",
                "pass": "forward",
                "isa": isa,
                "vocab_block": 512 << number,
            }
            ms = 12.345 * (number + 1) + len(isa)
            lines.append({"tool": "sweep", "case": case, "status": "ok", "median_ms": ms})
    return lines


def write(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def everything(folder: Path) -> list[Path]:
    """Files with every kind of line, and some that no section knows."""
    unknown = [{"tool": "astrology", "sign": "ram"}, {"hello": "world"}, check_line(gates="none")]
    made = {
        "made": [failed_check(), check_line()],
        "audit": [*audit_lines(), *invariance_lines()],
        "compare": compare_lines(),
        "threads": sweep_lines(),
        "grid": grid_lines("auto", "avx2", "avx512", "avx512_bf16"),
        "blocks": grid_lines("avx2"),
        "unknown": unknown,
    }
    written = [write(folder / f"{name}.jsonl", lines) for name, lines in made.items()]
    return [*program_files(folder), *written]
