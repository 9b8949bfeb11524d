"""The LM head cut over two gloo ranks with half of the threads each: this process, and one that it starts."""

from __future__ import annotations

import datetime
import tempfile
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from comparison.contestants import OURS, Output, Step, contestant
from comparison.inputs import Inputs, Shape, make_inputs

RANKS = 2
LONGEST = datetime.timedelta(minutes=30)  # between two collectives: the other contestants' turns


def join(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=LONGEST,
    )


class Rank:
    """A rank's share of a step. The other rank's part of dhead comes by a file, as the answer is one tensor."""

    def __init__(self, rank: int, inputs: Inputs, file: Path) -> None:
        assert inputs.hidden is not None and inputs.head is not None
        self.hidden, self.labels, self.is_first = inputs.hidden, inputs.labels, rank == 0
        middle = len(inputs.head) // RANKS
        head = inputs.head.detach()
        self.shard = (head[:middle] if self.is_first else head[middle:]).requires_grad_()
        others = head[middle:]
        size = others.numel()
        self.others = torch.from_file(str(file), shared=True, size=size, dtype=head.dtype)
        self.others = self.others.view(others.shape).zero_()

    def step(self) -> Output:
        from tileloss.torch.distributed import linear_cross_entropy

        loss = linear_cross_entropy(self.hidden, self.shard, self.labels)
        dhidden, dhead = torch.autograd.grad(loss, (self.hidden, self.shard))
        if not self.is_first:
            self.others.copy_(dhead)
        dist.barrier()
        return loss, (dhidden, torch.cat([dhead, self.others]) if self.is_first else dhead)


def serve(orders: Connection, folder: str, threads: int) -> None:
    """The other rank: a step for each order, of the inputs of that shape; until the orders end."""
    torch.set_num_threads(threads)
    join(1, folder)
    shape, rank = None, None
    while True:
        try:
            order: tuple[Shape, Path] = orders.recv()
        except EOFError:
            return
        if rank is None or order != shape:
            shape, rank = order, Rank(1, make_inputs(order[0], linear=True, policy=False), order[1])
        rank.step()


@cache
def other_rank(threads: int) -> tuple[Connection, tempfile.TemporaryDirectory[str]]:
    """Where its orders go, and the folder that both have."""
    folder = tempfile.TemporaryDirectory()
    context = torch.multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(theirs, folder.name, threads), daemon=True)
    process.start()
    theirs.close()
    join(0, folder.name)
    return ours, folder


@contestant("linear_cross_entropy", "TileLoss, 2 gloo ranks", tolerance=OURS)
def _(inputs: Inputs) -> Step:
    all_threads = torch.get_num_threads()
    threads = max(1, all_threads // RANKS)
    orders, folder = other_rank(threads)
    shape = inputs.shape
    dhead = Path(folder.name) / f"dhead-{shape.tokens}-{shape.vocab}-{shape.hidden}"
    rank = Rank(0, inputs, dhead)

    def step() -> Output:
        torch.set_num_threads(threads)
        try:
            orders.send((shape, dhead))
            return rank.step()
        finally:
            torch.set_num_threads(all_threads)

    return step
