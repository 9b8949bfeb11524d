"""A program: `vocab_ranks.py COUNT FOLDER` runs COUNT gloo ranks through all cases, each of which leaves RANK.pt in the folder.

There: {case: (None or what went wrong, what it gave, its gradients)}.
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
from vocab_cases import CASES


def run(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=40),
    )
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            results[name] = (None, *case.check(count))
        except Exception:
            results[name] = (traceback.format_exc(), {}, {})
    for name, check in vocab_checks.CHECKS.items():
        try:
            check()
            results[name] = (None, {}, {})
        except Exception:
            results[name] = (traceback.format_exc(), {}, {})
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, place = int(sys.argv[1]), sys.argv[2]
    torch.multiprocessing.start_processes(run, (size, place), nprocs=size, start_method="fork")
