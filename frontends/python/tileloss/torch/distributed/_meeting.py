"""Before anything runs: every rank tells the others what it was called with, and all of them go on or raise together."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tileloss.torch._tensors import CPU

Group = dist.ProcessGroup | None
_T = TypeVar("_T")


class Facts(NamedTuple):
    """What a rank was called with, as integers."""

    columns: int  # of its shard
    vocab_start: int  # -1: not given
    rows: int
    width: int  # of the hidden states; 0: logits
    dtype: int  # of input, as the ABI numbers it
    head_dtype: int
    has_bias: int
    needs_dhidden: int
    options: int  # a digest, as the next two
    labels: int
    tensors: int


# What has to be the same on every rank, in the callers' words.
_ALIKE = {
    "rows": ("input", "the same number of rows"),
    "width": ("input", "hidden states of one width, or logits (0),"),
    "dtype": ("input", "one dtype"),
    "head_dtype": ("linear_weight", "one dtype"),
    "has_bias": ("linear_bias", "a bias, or none,"),
    "needs_dhidden": ("input", "the same requires_grad"),
    "options": ("options", "the same function and options"),
    "labels": ("target", "the same labels"),
    "tensors": ("token_weights, advantages, ...", "the same tensors"),
}
_DIGESTS = ("options", "labels", "tensors")


def ranks_of(group: Any) -> tuple[int, int]:
    """(this process's rank in the group, how many there are)"""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "group: expected torch.distributed to be initialised (torch.distributed.init_process_group), got no process group"
        )
    if (
        group is dist.GroupMember.NON_GROUP_MEMBER
    ):  # what torch gives to a process that is not in a new group
        raise ValueError("group: expected a group that this process belongs to, got another")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}"
        )
    return dist.get_rank(group), dist.get_world_size(group)


def gather(tensor: Tensor, group: Group, count: int) -> Tensor:
    """[count, ...]: every rank's tensor."""
    gathered = tensor.new_empty((count, *tensor.shape))
    dist.all_gather(list(gathered.unbind(0)), tensor.contiguous(), group=group)
    return gathered


def digest(values: Iterable[object]) -> int:
    """Of numbers, strings and tensors, by their content."""
    found = 0
    for value in values:
        if isinstance(value, Tensor):
            found = zlib.crc32(f"{value.dtype}{list(value.shape)}".encode(), found)
            flat = value.detach().resolve_neg().contiguous().view(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
        else:
            found = zlib.crc32(repr(value).encode(), found)
    return found


def meet(group: Group, prepare: Callable[[], tuple[_T, Facts]]) -> tuple[_T, list[Facts]]:
    """What ``prepare`` made on this rank, and every rank's facts. Where one rank's arguments are refused, or do not fit the
    others', all of them raise: one that went on alone would wait for the rest for ever."""
    _, count = ranks_of(group)
    refusal: Exception | None = None
    try:
        prepared, facts = prepare()
    except Exception as error:
        refusal, facts = error, Facts(*[-1] * len(Facts._fields))
    mine = torch.tensor([refusal is None, *facts], dtype=torch.int64, device=CPU)
    table = gather(mine, group, count).tolist()
    raise_together(refusal, [not row[0] for row in table])
    everyone = [Facts(*row[1:]) for row in table]
    _check_alike(everyone)
    return prepared, everyone


def raise_together(failure: Exception | None, failed: Sequence[float]) -> None:
    """This rank's own ``failure``, or an error that names the ranks that have one."""
    if failure is not None:
        raise failure
    if ranks := [str(rank) for rank, has_failed in enumerate(failed) if has_failed]:
        raise RuntimeError(
            "tileloss: expected every rank of the group to take its part, got an error, which says why, on rank "
            + ", ".join(ranks)
        )


def _check_alike(everyone: list[Facts]) -> None:
    for field, (name, expected) in _ALIKE.items():
        values = [getattr(facts, field) for facts in everyone]
        for rank, value in enumerate(values):
            if value == values[0]:
                continue
            got = (
                f"others on rank {rank} than on rank 0"
                if field in _DIGESTS
                else f"{values[0]} on rank 0 and {value} on rank {rank}"
            )
            raise ValueError(f"{name}: expected {expected} on every rank of the group, got {got}")
