"""Version, instruction sets, caches, threads, and the machine's roofs (2 s)."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tileloss.tools.printable import print_columns
from tileloss.tools.requests import run_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    info = run_request({"do": "info"}, is_quiet=True).event("result")["line"]
    if options.json:
        print(json.dumps(info, separators=(",", ":")))
    else:
        print_columns(["tileloss", info["version"]], _rows(info))
    return 0


def _rows(info: dict[str, Any]) -> list[list[str]]:
    build, roofs = info["build"], info["roofs"]
    note, forced = info["isa_note"], info["TILELOSS_ISA"]
    why = f"TILELOSS_ISA={forced}" if forced is not None else "TILELOSS_ISA not set"
    if forced is None and note:
        why += f"; {note}"
    devices = [name if name == "cpu" else f"{n} {name}" for name, n in info["devices"].items()]
    caches = [
        [f"L{each['level']} {each['type']}", f"{each['size']}, cpus {each['shared_by_cpus']}"]
        for each in info["caches"]
    ]
    products = [roofs[f"products_{dtype}_tflops"] for dtype in ("bfloat16", "float32")]
    return [
        ["compiler", build["compiler"]],
        ["build", f"{build['type']} {build['flags']}"],
        ["functions", ", ".join(info["functions"])],
        ["cpu", info["cpu"] + _in_brackets(info["cpu_features"])],
        ["instruction sets", ", ".join(info["isa_available"]) + _in_brackets(info["amx"])],
        ["chosen", f"{info['isa_chosen']} ({why})"],
        ["devices", ", ".join(devices) + info["devices_note"]],
        ["threads", f"{info['threads']} (TILELOSS_NUM_THREADS, affinity, cgroup quota)"],
        *caches,
        ["memory available", f"{info['memory_available_bytes'] / 1e9:.1f} GB"],
        ["huge pages", info["huge_pages"]],
        ["roof, in place", f"{roofs['in_place_gb_per_s']:.1f} GB/s read and written"],
        ["roof, copy", f"{roofs['copy_gb_per_s']:.1f} GB/s read and written"],
        ["roof, read", f"{roofs['read_gb_per_s']:.1f} GB/s"],
        ["roof, exp", f"{roofs['exp_g_per_s']:.1f} billion/s"],
        ["roof, products", f"{products[0]:.3f} TFLOP/s bfloat16, {products[1]:.3f} float32"],
        ["roof loops", roofs["loops"]],
    ]


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
