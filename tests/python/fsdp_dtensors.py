"""The functions of tileloss.torch given DTensors, on two processes: a part of fsdp_losses.py."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tileloss import torch as tl


def dtensor_errors() -> dict[str, dict[str, float]]:
    """linear_cross_entropy of DTensors: one of 97 rows, so that the shards differ in size."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh, hybrid = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (size, 1))
    layouts = {
        "replicated": (mesh, [Replicate()]),
        "sharded": (mesh, [Shard(0)]),
        "hybrid": (hybrid, [Replicate(), Shard(0)]),
    }
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(size, 12, 16), torch.randn(97, 16), torch.randn(97)
    labels = torch.randint(0, 97, (size, 12))
    whole = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    per_rank = [
        tl.linear_cross_entropy(whole[0][i], *whole[1:2], labels[i], linear_bias=whole[2])
        for i in range(size)
    ]
    (sum(per_rank) / size).backward()
    found = {}
    for name, layout in layouts.items():
        w, b = (distribute_tensor(x, *layout).requires_grad_() for x in (weight, bias))
        for mode in (True, False):
            w.grad = b.grad = None
            mine = hidden[rank].clone().requires_grad_()
            loss = tl.linear_cross_entropy(
                mine, w, labels[rank], linear_bias=b, grad_in_forward=mode
            )
            loss.backward()
            pairs = [(mine.grad / size, whole[0].grad[rank])]
            pairs += [(x.grad.full_tensor(), y.grad) for x, y in ((w, whole[1]), (b, whole[2]))]
            found[f"{name}, grad_in_forward={mode}"] = {
                "loss": abs(float(loss.detach() / per_rank[rank].detach()) - 1),
                "gradient": max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs),
            }
            assert w.grad.placements == w.placements
    return found | refusals(mesh, hidden, labels)


def laid_out(tensor: torch.Tensor, mesh: Any, placement: Any) -> DTensor:
    if isinstance(placement, Partial):
        return DTensor.from_local(tensor, mesh, [placement])
    return distribute_tensor(tensor.reshape(-1, *tensor.shape[1:]), mesh, [placement])


def refusals(mesh: Any, hidden: torch.Tensor, labels: torch.Tensor) -> dict[str, dict[str, float]]:
    """DTensors of rows: replicated ones are as plain ones, others are refused, with what to do."""
    weight, advantages = torch.randn(97, 16), torch.randn(hidden.shape[0])
    logits, count = hidden @ weight.T, torch.tensor(7.0)
    rows = {
        "input": (tl.cross_entropy, (logits, labels), {}),
        "target": (tl.cross_entropy, (logits, labels), {}),
        "num_items": (tl.cross_entropy, (logits, labels), {"num_items": count}),
        "advantages": (tl.policy_loss, (logits, labels, advantages), {"preset": "grpo"}),
        "mask": (
            tl.policy_loss,
            (logits, labels, advantages),
            {"preset": "grpo", "mask": labels > 9},
        ),
        "token_weights": (
            tl.linear_cross_entropy,
            (hidden, weight, labels),
            {"token_weights": labels},
        ),
        "old_logp": (
            tl.linear_policy_loss,
            (hidden, weight, labels, advantages),
            {"preset": "grpo", "old_logp": -labels / 9},
        ),
    }
    order = {"input": 0, "target": 1, "advantages": 2}
    for name, (function, args, options) in rows.items():
        plain = function(*args, **options)
        for placement in (Replicate(), Shard(0), Partial()):
            put = functools.partial(laid_out, mesh=mesh, placement=placement)
            given = [put(x) if order.get(name) == n else x for n, x in enumerate(args)]
            more = {key: put(x) if key == name else x for key, x in options.items()}
            if placement == Replicate():
                assert torch.equal(function(*given, **more), plain), name
                continue
            message = rf"{name}: expected a plain tensor or a replicated DTensor, .* placements \(.*to_local\(\)"
            with pytest.raises(ValueError, match=message):
                function(*given, **more)
    replicated = distribute_tensor(logits, mesh, [Replicate()]).requires_grad_()
    tl.cross_entropy(replicated, labels).backward()
    assert replicated.grad.placements == (Replicate(),)
    assert torch.equal(replicated.grad.to_local(), logits_gradient(logits, labels))
    message = r"linear_weight: expected a plain tensor, or a DTensor that is replicated or sharded, .*linear_weight\.redistribute"
    with pytest.raises(ValueError, match=message):
        tl.linear_logprobs(hidden, DTensor.from_local(weight, mesh, [Partial()]), labels)
    return {}


def logits_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    plain = logits.clone().requires_grad_()
    tl.cross_entropy(plain, labels).backward()
    gradient: torch.Tensor = plain.grad
    return gradient
