"""Before anything runs: every rank tells the others what it was called with, and all of them go on or raise together."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tileloss.torch._call import CPU

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


Details = Mapping[str, Callable[[], dict[str, object]]]


class Prepared(NamedTuple):
    """A rank's arguments, checked. ``details``: what each digest of its facts is of, by names that the caller knows."""

    arguments: Any
    facts: Facts
    details: Details


# What has to be the same on every rank, in the callers' words, and then what there is a digest of.
_ALIKE = {
    "rows": ("input", "the same number of rows"),
    "width": ("input", "hidden states of one width, or logits (0),"),
    "dtype": ("input", "one dtype"),
    "head_dtype": ("linear_weight", "one dtype"),
    "has_bias": ("linear_bias", "a bias, or none,"),
    "needs_dhidden": ("input", "the same requires_grad"),
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


def on_device_of(input: Any) -> AbstractContextManager[None]:
    """Makes the GPU where ``input`` lies the current one, on which torch.distributed puts what it gathers of Python objects and
    `device_of_facts` the facts: NCCL wants one GPU for each rank, and not every program has told torch which is its own."""
    if isinstance(input, Tensor) and input.is_cuda:
        return torch.cuda.device(input.get_device())
    return nullcontext()


def device_of_facts(group: Group) -> torch.device:
    """Where small numbers have to lie to be gathered: the CPU, but in a group that has a backend for GPUs alone, as NCCL."""
    if "cpu" in _device_types(group):
        return CPU
    return torch.device("cuda", torch.cuda.current_device())


def check_backend(input: Tensor, group: Group) -> None:
    """Raises ValueError where ``group`` cannot carry tensors of that device."""
    types = _device_types(group)
    if input.device.type not in types:
        raise ValueError(
            f"input: expected a tensor on {' or '.join(types)}, for which the group has a backend, got one on {input.device}"
        )


def _device_types(group: Group) -> list[str]:
    backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return [backend.partition(":")[0] for backend in backends.split(",")]


def gather(tensor: Tensor, group: Group, count: int) -> Tensor:
    """[count, ...]: every rank's tensor."""
    gathered = tensor.new_empty((count, *tensor.shape))
    dist.all_gather(list(gathered.unbind(0)), tensor.contiguous(), group=group)
    return gathered


def gather_unless_failed(mine: Tensor, failure: Exception | None, group: Group) -> Tensor:
    """[count, n]: every rank's ``mine`` [n + 1] but the last number, with which travels whether the rank has failed. Every rank
    raises if one comes with a ``failure``."""
    mine[-1] = failure is not None
    everyone = gather(mine, group, ranks_of(group)[1])
    raise_together(failure, everyone[:, -1].tolist(), group)
    return everyone[:, :-1]


def _shared(mine: Any, group: Group, count: int) -> list[Any]:
    """Every rank's ``mine``, a small object: on the way to an error alone."""
    found: list[Any] = [None] * count
    dist.all_gather_object(found, mine, group=group)
    return found


def digest(values: Iterable[object]) -> int:
    """Of numbers, strings and tensors, by their content."""
    found = 0
    for value in values:
        if isinstance(value, Tensor):
            found = zlib.crc32(f"{value.dtype}{list(value.shape)}".encode(), found)
            flat = value.detach().resolve_neg().contiguous().cpu().view(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
        else:
            found = zlib.crc32(repr(value).encode(), found)
    return found


def meet(group: Group, prepare: Callable[[], Prepared]) -> tuple[Any, list[Facts]]:
    """The arguments that ``prepare`` made on this rank, and every rank's facts. Where one rank's arguments are refused, or do not
    fit the others', all of them raise: one that went on alone would wait for the rest for ever."""
    _, count = ranks_of(group)
    refusal: Exception | None = None
    mine = torch.zeros(1 + len(Facts._fields), dtype=torch.int64, device=device_of_facts(group))
    try:
        prepared = prepare()
        mine.copy_(torch.tensor([1, *prepared.facts], dtype=torch.int64, device=CPU))
    except Exception as error:
        refusal = error
    table = gather(mine, group, count).tolist()
    raise_together(refusal, [not row[0] for row in table], group)
    everyone = [Facts(*row[1:]) for row in table]
    _check_alike(everyone, prepared, group)
    return prepared.arguments, everyone


def raise_together(failure: Exception | None, failed: Sequence[float], group: Group) -> None:
    """This rank's own ``failure``, or an error with those of the ranks that have one."""
    if not any(failed):
        return
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = _shared(told, group, len(failed))
    if failure is not None:
        raise failure
    errors = "; ".join(f"on rank {rank}: {told}" for rank, told in enumerate(everyone) if told)
    raise RuntimeError(
        f"tileloss: expected every rank of the group to take its part, got an error {errors}"
    )


class Sum:
    """Tensors, of which every rank has its ``parts`` in float32. With them travels whether a rank has failed to make its own."""

    def __init__(self, like: Sequence[Tensor | None], group: Group) -> None:
        """``like``: the tensors' shapes and dtypes; None: there is no such tensor, nor part."""
        self._like, self._group, (self._rank, self._count) = like, group, ranks_of(group)
        given = [x for x in like if x is not None]
        total = sum(x.numel() for x in given) + self._count
        device = given[0].device if given else CPU
        self._flat = torch.zeros(total, dtype=torch.float32, device=device)
        parts = iter(self._flat[: -self._count].split_with_sizes([x.numel() for x in given]))
        self.parts = [None if x is None else next(parts).view(x.shape) for x in like]

    def collect(self, failure: Exception | None = None) -> list[Tensor | None]:
        """The sums over the ranks: each part of one is made on one of them and sent to the others, so that all have the same
        bits. Every rank raises if one comes with a ``failure``. Where there are no tensors nobody meets."""
        if all(x is None for x in self._like):
            return self.parts
        failed = self._flat[-self._count :]
        failed[self._rank] = failure is not None
        if self._count > 1:
            dist.all_reduce(self._flat, group=self._group)
        raise_together(failure, failed.tolist(), self._group)
        return [
            None if x is None or part is None else part.to(x.dtype)
            for x, part in zip(self._like, self.parts, strict=True)
        ]


def _check_alike(everyone: list[Facts], prepared: Prepared, group: Group) -> None:
    for field, (name, expected) in _ALIKE.items():
        values = [getattr(facts, field) for facts in everyone]
        _raise_if_different(name, expected, values)
    for field in _DIGESTS:
        if len({getattr(facts, field) for facts in everyone}) > 1:
            details = _shared(prepared.details[field](), group, len(everyone))
            for name in dict.fromkeys(name for found in details for name in found):
                _raise_if_different(
                    name, "the same", [found.get(name, "the default") for found in details]
                )


def _raise_if_different(name: str, expected: str, values: Sequence[object]) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"{name}: expected {expected} on every rank of the group, got {values[0]} on rank 0 and {value} on rank {rank}"
            )
