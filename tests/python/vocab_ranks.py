"""A program: `vocab_ranks.py FOLDER COUNT...` runs COUNT gloo ranks through all cases, each of which leaves COUNT-RANK.pt there.

In it: {case: (None or what went wrong, what it gave, its gradients)}.
"""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing

import vocab_checks
from tileloss import torch as tl
from vocab_cases import CASES


def run(
    rank: int, count: int, folder: str, of_one_process: dict[str, Any], backend: str = "gloo"
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store-{count}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=40),
    )
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            results[name] = (None, *case.check(count, of_one_process[name]))
        except Exception:
            results[name] = (traceback.format_exc(), {}, {})
    for name, check in vocab_checks.CHECKS.items():
        try:
            check()
            results[name] = (None, {}, {})
        except Exception:
            results[name] = (traceback.format_exc(), {}, {})
    torch.save(results, Path(folder) / f"{count}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, *counts = sys.argv[1:]
    expected = {name: case.run(getattr(tl, case.function)) for name, case in CASES.items()}
    for size in map(int, counts):
        torch.multiprocessing.start_processes(
            run, (size, place, expected), nprocs=size, start_method="fork"
        )
