"""Run by torch.distributed.run on two processes: heads that processes share, patched against unpatched, as JSON.

For each case the larger of two errors: of the loss, relative; of a parameter's gradient, relative to the largest element of all.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from tileloss.integrations import trl as integration
from tileloss.integrations._head_wrappers import is_cut
from tileloss.integrations.transformers import make_compute_loss_func, patch
from tileloss.torch import call_counts, distributed
from transformers_models import batch, build
from wrapped_tensors import quantized


def inputs_of(rank: int) -> dict[str, Any]:
    given = batch() | {"use_cache": False}
    return given | {
        "labels": given["labels"].roll(rank, 0),
        "input_ids": given["input_ids"].roll(rank, 0),
    }


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(unpatched: Any, patched: Any, inputs: dict[str, Any]) -> float:
    losses, gradients = [], []
    for model in (unpatched, patched):
        calls = sum(call_counts().values())
        outputs = model(**inputs)
        assert (
            (outputs.logits is None) == (sum(call_counts().values()) > calls) == (model is patched)
        )
        outputs.loss.backward()
        losses.append(float(outputs.loss.detach()))
        gradients.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
    worst = abs(losses[1] / losses[0] - 1)
    assert len(gradients[0]) == len(gradients[1]) > 0
    largest = max(float(g.abs().max()) for g in gradients[0] if g.numel())
    for want, got in zip(*gradients, strict=True):
        assert want.shape == got.shape and want.dtype == got.dtype
        if want.numel():
            worst = max(worst, float((got - want).abs().max()) / largest)
    with torch.no_grad():
        want, got = (
            model.eval()(**inputs, **more)
            for model, more in ((unpatched, {}), (patched, {"skip_logits": True}))
        )
    assert got.logits is None
    return max(worst, abs(float(got.loss / want.loss) - 1))


def fsdp1(model: Any, head: bool, original: bool, **options: Any) -> Any:
    """Each layer a unit, and the head another, or part of the root."""

    def is_unit(module: torch.nn.Module) -> bool:
        return type(module).__name__.endswith("DecoderLayer") or (head and module is model.lm_head)

    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_unit)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        use_orig_params=original,
        device_id=torch.device("cpu"),
        **options,
    )


def fsdp1_errors() -> dict[str, float]:
    found = {}
    for head in (False, True):
        for original in (False, True):
            for kind in ("llama", "phi"):
                wrap = functools.partial(fsdp1, head=head, original=original)
                unpatched, before = wrap(build(kind)), wrap(patch(build(kind)))
                name = f"FSDP1, {kind}, head {head}, use_orig_params {original}"
                found[name] = error(unpatched, before, inputs_of(dist.get_rank()))
    unpatched, after = (fsdp1(build("llama"), head=True, original=True) for _ in range(2))
    patch(after.module)
    found["FSDP1, patched after"] = error(unpatched, after, inputs_of(dist.get_rank()))
    return found


def loaded(kind: str, options: dict[str, Any]) -> Any:
    """From the folder of the first process: the other ones do not save."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        build(kind, **options).save_pretrained(shared[0])
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(shared[0], tp_plan="auto")
        dist.barrier()
    return model


def tensor_parallel_errors() -> dict[str, float]:
    """Every process has the same rows."""
    found = {}
    for name, kind, options, more in (
        ("", "llama", {}, {}),
        ("num_items_in_batch", "llama", {}, {"num_items_in_batch": 29}),
        ("soft-cap", "gemma2", {"tie_word_embeddings": False}, {}),
        ("bias", "phi", {}, {}),
        ("tied", "qwen2", {}, {}),
    ):
        unpatched, patched = (loaded(kind, options).train() for _ in range(2))
        patch(patched, token_accuracy=True)
        found[f"tensor parallel, {name}"] = error(unpatched, patched, batch() | more)
        assert is_cut(patched.lm_head)
    return found


def trl_errors() -> dict[str, float]:
    """TRL's own fused head against TileLoss's: of tensor parallelism's it gathers the weight, as TRL does."""
    model = loaded("llama", {}).train()
    add_fused_lm_head(model)
    losses, gradients = [], []
    for context in (contextlib.nullcontext, integration.patch):
        model.zero_grad()
        with context():
            loss = model(**batch(), fused_lm_head=True).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
    largest = max(float(g.abs().max()) for g in gradients[0])
    off = max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True)) / largest
    refuse_fsdp1_after_the_forward()
    return {"TRL, tensor parallel": max(off, abs(losses[1] / losses[0] - 1))}


def quantized_shard_errors() -> dict[str, float]:
    """tileloss.torch.distributed on each rank's rows of a head, as a wrapper subclass and as what that stands for."""
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    shard = quantized((40 + dist.get_rank(), 32))
    losses = [
        distributed.linear_cross_entropy(hidden, weight, torch.arange(5) * 16)
        for weight in (shard, shard.dequantize())
    ]
    gradients = [torch.autograd.grad(loss, hidden)[0] for loss in losses]
    assert torch.equal(*losses) and torch.equal(*gradients)
    return {"quantized shards": 0.0}


def refused(words: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def refuse_fsdp1_after_the_forward() -> None:
    model = build("llama")
    add_fused_lm_head(model)
    unit = fsdp1(model, head=True, original=True)
    with integration.patch():
        refused("a unit of FSDP1 by itself", lambda: unit(**batch(), fused_lm_head=True))
    inputs = batch()
    labels = inputs.pop("labels")
    for head in (True, False):
        unit = fsdp1(patch(build("llama")), head=head, original=True)
        loss_of = make_compute_loss_func(unit.module)
        refused("the loss is computed after it", lambda: loss_of(unit(**inputs), labels))  # noqa: B023


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = fsdp1_errors() | tensor_parallel_errors() | trl_errors() | quantized_shard_errors()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        print(json.dumps(gathered))
    dist.destroy_process_group()
