"""Run by torch.distributed.run on two processes: what FSDP2 makes of a step, against the same step in one process, as JSON.

For each case the worst error of a loss, and of a parameter's gradient relative to its largest element (some are 0 but for
rounding: to a tenth of the largest of all at least).
"""

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from trl.trainer.utils import add_fused_lm_head

from tileloss import torch as tl
from tileloss.integrations import trl as trl_integration
from tileloss.integrations.transformers import make_compute_loss_func, patch
from transformers_models import VOCAB, build

LENGTH = 9
Step = Callable[[Any, torch.Tensor], torch.Tensor]


def tokens(rank: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * micro_batch + rank)
    return torch.randint(3, VOCAB, (2, LENGTH), generator=generator)


def head_alone(model: Any, **options: Any) -> None:
    fully_shard(model.lm_head, **options)
    fully_shard(model, **options)


def head_and_norm(model: Any) -> None:
    fully_shard([model.model.norm, model.lm_head])
    fully_shard(model)


def head_and_embedding(model: Any) -> None:
    """The tied ones have to be in one unit."""
    fully_shard([model.model.embed_tokens, model.lm_head])
    fully_shard(model)


def layers(model: Any, **options: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def layers_and_head(model: Any, **options: Any) -> None:
    """As recipes do: a unit a layer, one of embedding, norm and head each, and what is left in the root."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    ends = [model.model.norm, model.lm_head]
    fully_shard([model.model.embed_tokens, *ends] if tied else ends, **options)
    layers(model, **options)


def own_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def errors(
    model: Any, reference: Any, step: Step = own_loss, micro_batches: int = 1
) -> dict[str, float]:
    """Of `micro_batches` steps whose gradients add up, reduced in the last one; the reference does every process's work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    worst = 0.0
    for micro_batch in range(micro_batches):
        model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
        loss = step(model, tokens(rank, micro_batch))
        loss.backward()
        for other in range(size):
            want = step(reference, tokens(other, micro_batch))
            (want / size).backward()
            if other == rank:
                worst = max(worst, abs(float(loss.detach()) / float(want.detach()) - 1))
    gradient = 0.0
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, parameter in model.named_parameters():
        got, want = parameter.grad, expected[name]
        assert isinstance(got, DTensor), f"{name}: {type(got)}"
        off = float((got.full_tensor() - want).abs().max())
        gradient = max(gradient, off / max(float(want.abs().max()), 0.1 * largest))
    return {"loss": worst, "gradient": gradient}


def sharded(kind: str, shard: Callable[[Any], Any], **options: Any) -> tuple[Any, Any]:
    """(a patched model after `shard`, its twin in one process)."""
    reference = patch(build(kind, **options))
    model = copy.deepcopy(reference)
    shard(model)
    return model, reference


def of_models() -> dict[str, dict[str, float]]:
    return {
        "root": errors(*sharded("llama", fully_shard)),
        "head": errors(*sharded("llama", head_alone)),
        "head with bias, accumulated": errors(*sharded("phi", head_alone), own_loss, 3),
        "head kept after forward": errors(
            *sharded("llama", functools.partial(head_alone, reshard_after_forward=False))
        ),
        "head and norm": errors(*sharded("llama", head_and_norm)),
        "tied, root": errors(*sharded("qwen2", fully_shard)),
        "tied, head and embedding": errors(*sharded("qwen2", head_and_embedding)),
    }


SHARDS = {
    "root": ("llama", fully_shard),
    "head": ("llama", head_alone),
    "layers": ("llama", layers),
    "layers and head": ("llama", layers_and_head),
    "tied, layers": ("qwen2", layers),
    "tied, layers and head": ("qwen2", layers_and_head),
}


def of_unpatched() -> dict[str, dict[str, float]]:
    """Loss and each process's shard of each gradient, against FSDP of the unpatched model; patched before and after."""
    found = {}
    for name, (kind, shard) in SHARDS.items():
        own, before, after = build(kind), patch(build(kind)), build(kind)
        for model in (own, before, after):
            shard(model)
        patch(after)
        losses = {}
        for model in (own, before, after):
            for micro_batch in range(2):
                model.set_requires_gradient_sync(micro_batch == 1)
                losses[model] = own_loss(model, tokens(dist.get_rank(), micro_batch))
                losses[model].backward()
        for when, model in (("before", before), ("after", after)):
            pairs = [
                (p.grad.to_local(), q.grad.to_local(), q.grad.full_tensor())
                for p, q in zip(model.parameters(), own.parameters(), strict=True)
            ]
            largest = 0.1 * max(float(whole.abs().max()) for *_, whole in pairs)
            found[f"{name}, patched {when}, unpatched FSDP"] = {
                "loss": abs(float(losses[model].detach() / losses[own].detach()) - 1),
                "gradient": max(
                    float((ours - theirs).abs().max()) / max(float(whole.abs().max()), largest)
                    for ours, theirs, whole in pairs
                    if ours.numel()
                ),
            }
    return found


def mixed_precision() -> dict[str, dict[str, float]]:
    """Against float32: bfloat16's rounding, and no more than the unpatched model's."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for name, (kind, shard) in SHARDS.items():
        shard = functools.partial(shard, mp_policy=policy)
        model, reference = sharded(kind, shard)
        found[f"mixed precision: {name}"] = errors(model, reference)
        unpatched = build(kind)
        shard(unpatched)
        reference.zero_grad()
        found[f"mixed precision, unpatched: {name}"] = errors(unpatched, reference)
    return found


def smoothed() -> dict[str, dict[str, float]]:
    """A loss function that is called after the forward, as Trainer does."""

    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = losses[model](model(input_ids=ids, use_cache=False), ids)
        return loss

    found = {}
    for name, shard in {"root": fully_shard, "head": head_alone}.items():
        model, reference = sharded("llama", shard)
        losses = {m: make_compute_loss_func(m, label_smoothing=0.1) for m in (model, reference)}
        found[f"smoothed, {name}"] = errors(model, reference, step)
    return found


def of_trl() -> dict[str, dict[str, float]]:
    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
        return loss

    found = {}
    for name, kind, shard in (
        ("root", "llama", fully_shard),
        ("head", "llama", head_alone),
        ("head with bias", "phi", head_alone),
        ("head and norm", "llama", head_and_norm),
    ):
        model, reference = build(kind), build(kind)
        for each in (model, reference):
            add_fused_lm_head(each)
        shard(model)
        with trl_integration.patch():
            found[f"TRL, {name}"] = errors(model, reference, step, 2)
    return found


def of_linear() -> dict[str, dict[str, float]]:
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


def refusals(mesh: Any, hidden: torch.Tensor, labels: torch.Tensor) -> dict[str, dict[str, float]]:
    """DTensors of rows: replicated ones are as plain ones, others are refused, with what to do."""
    weight = torch.randn(97, 16)
    plain = tl.linear_logprobs(hidden, weight, labels).logp
    same = [distribute_tensor(x, mesh, [Replicate()]) for x in (hidden, weight, labels)]
    assert torch.equal(tl.linear_logprobs(*same).logp, plain)
    for given, message in (
        (
            (distribute_tensor(hidden, mesh, [Shard(0)]), weight, labels),
            r"input: expected a plain tensor or a replicated DTensor, .* placements \(Shard.*to_local\(\)",
        ),
        (
            (hidden, DTensor.from_local(weight, mesh, [Partial()]), labels),
            r"linear_weight: expected a plain tensor, or a DTensor that is replicated or sharded, .*linear_weight\.redistribute",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            tl.linear_logprobs(*given)
    return {}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = of_models() | of_unpatched() | mixed_precision() | smoothed() | of_trl() | of_linear()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        print(json.dumps(gathered))
    dist.destroy_process_group()
