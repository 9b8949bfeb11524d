"""A program: `cuda_ranks.py FOLDER BACKEND` runs two ranks, each on CUDA tensors of a device of its own: vocab_ranks.py with the
cases and checks of here. Arguments of the functions are brought to the device, and results back."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

import cuda_device
import vocab_cases
import vocab_checks
import vocab_ranks
from cuda_device import get, to_device
from tileloss import torch as tl
from tileloss.torch import distributed as td
from vocab_checks import is_last, mine, problem, raises
from vocab_cut import Whole

CASES = (
    "cross_entropy, weighted", "cross_entropy, uneven", "cross_entropy, soft labels, smoothed",
    "logprobs", "policy_loss, quantile", "distillation, mixed", "linear_cross_entropy, padded",
    "linear_cross_entropy, padded, two passes", "linear_logprobs", "linear_policy_loss, grpo",
    "linear_distillation, per row", "linear_cross_entropy, low rank", "linear_distillation, low rank",
    "logprobs, 5 labels", "linear_logprobs, 64 labels",
)  # fmt: skip


class _There(torch.autograd.Function):
    """On this rank's device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return to_device(x, dist.get_rank())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return get(grad)


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.device == torch.device("cuda", dist.get_rank())
        return get(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return to_device(grad, dist.get_rank())


def there(x: Any) -> Any:
    return _There.apply(x) if isinstance(x, Tensor) else x


def back(x: Any) -> Any:
    return _Back.apply(x) if isinstance(x, Tensor) else x


class WholeThere(Whole):
    def __call__(self, *given: Any, **options: Any) -> Any:
        given, options = tree_map(there, (given, options))
        return tree_map(back, super().__call__(*given, **options))


def check_cuda_group() -> None:
    """A group that carries CUDA tensors alone, as NCCL's: what travels lies on the rank's own device, which need not be the
    current one, and so do errors, which torch puts on the current one."""
    *_, logits, labels = problem(requires_grad=False)
    own, one = torch.device("cuda", dist.get_rank()), is_last()
    devices: list[torch.device] = []
    gather, objects = dist.all_gather, dist.all_gather_object

    def all_gather(to: list[Tensor], tensor: Tensor, group: Any) -> None:
        devices.extend(x.device for x in (*to, tensor))
        gather(to, tensor, group=group)

    def all_gather_object(*args: Any, **kwargs: Any) -> None:
        devices.append(torch.device("cuda", torch.cuda.current_device()))
        objects(*args, **kwargs)

    shard = mine(logits.T).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", all_gather)
        patch.setattr(dist, "all_gather_object", all_gather_object)
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        x, y = there(shard), there(labels)
        loss = td.cross_entropy(x, y)
        torch.testing.assert_close(get(loss), tl.cross_entropy(logits, labels))
        cut = "temperature: expected the same on every rank of the group, got the default on rank 0"
        raises(ValueError, cut, lambda: td.cross_entropy(x, y, temperature=1.0 + one))
        assert torch.cuda.current_device() == 0
        assert set(devices) == {own}
        # A rank that says no device meets on the current one.
        torch.cuda._exchange_device(own.index)
        kind = ValueError if one else RuntimeError
        words = (
            "input: expected a tensor on cuda, for which the group has a backend, got one on cpu"
        )
        raises(kind, words, lambda: td.cross_entropy(shard if one else x, labels if one else y))
        torch.cuda._exchange_device(0)
    raises(
        ValueError,
        "device of input: expected the same on every rank of the group, got cuda on rank 0 and cpu on rank 1",
        lambda: td.cross_entropy(shard if one else x, labels if one else y),
    )


def what_the_devices_find() -> None:
    """A label out of range is NaN on every rank, and each can ask why."""
    *_, logits, labels = problem(requires_grad=False)
    labels[3] = logits.shape[1]
    found = td.cross_entropy(there(mine(logits.T).T), there(labels), reduction="none")
    assert get(found).isnan().nonzero().tolist() == [[3]]
    raises(
        IndexError, r"target\[3\]: expected 0 <= label < 64", lambda: tl.check_errors(found.device)
    )


def check_dtensors() -> None:
    """A head in shards, as FSDP2 leaves it, gathered; its gradient is in shards again. A vocabulary's shards as they are."""
    hidden, head, logits, labels = problem(requires_grad=False)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def sharded(x: Tensor, dim: int) -> DTensor:
        part = there(mine(x.transpose(0, dim)).transpose(0, dim))
        return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False).requires_grad_()

    weight, plain = sharded(head, 0), head.clone().requires_grad_()
    tl.linear_cross_entropy(there(hidden), weight, there(labels)).backward()
    tl.linear_cross_entropy(hidden, plain, labels).backward()
    assert weight.grad.placements == (Shard(0),)
    torch.testing.assert_close(get(weight.grad.to_local()), mine(plain.grad))
    x, whole = sharded(logits, 1), logits.clone().requires_grad_()
    loss, expected = td.cross_entropy(x, there(labels)), tl.cross_entropy(whole, labels)
    (loss + 0).backward(), expected.backward()
    torch.testing.assert_close(get(loss.detach()), expected.detach())
    torch.testing.assert_close(get(x.grad.to_local()), mine(whole.grad.T).T)
    words = (
        r"input: expected a plain tensor or a replicated DTensor, .* placements \(Shard\(dim=1\),\)"
    )
    raises(ValueError, words, lambda: tl.cross_entropy(x, there(labels)))


def run(rank: int, folder: str, backend: str) -> None:
    cases = {name: vocab_cases.CASES[name] for name in CASES}
    expected = {name: case.run(getattr(tl, case.function)) for name, case in cases.items()}
    patch = pytest.MonkeyPatch()
    patch.setattr(vocab_ranks, "CASES", cases)
    patch.setattr(vocab_checks, "CHECKS", CHECKS)
    patch.setattr(vocab_cases, "Whole", WholeThere)
    with cuda_device.installed(), cuda_device.reads():  # that is how ranks meet
        vocab_ranks.run(rank, 2, folder, expected, backend)


CHECKS = {
    check.__name__: check for check in (check_cuda_group, what_the_devices_find, check_dtensors)
}

if __name__ == "__main__":
    torch.multiprocessing.start_processes(
        run, tuple(sys.argv[1:]), nprocs=2, start_method=cuda_device.START
    )
