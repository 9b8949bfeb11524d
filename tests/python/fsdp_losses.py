"""Run by torch.distributed.run on two processes: what FSDP2 makes of a step, against the same step in one process, as JSON.

For each case the worst error of a loss, and of a parameter's gradient relative to its largest element (some are 0 but for
rounding: to a tenth of the largest of all at least).
"""

import contextlib
import copy
import functools
import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
from trl.models.utils import _ForwardRedirection
from trl.trainer import distillation_trainer
from trl.trainer.utils import add_fused_lm_head

from fsdp_dtensors import dtensor_errors
from peft_models import with_lora
from tileloss import torch as tl
from tileloss.integrations import trl as trl_integration
from tileloss.integrations.transformers import make_compute_loss_func, patch
from transformers_families import build_small
from transformers_models import VOCAB, build
from trl_runs import make_tokenizer

LENGTH = 9
Step = Callable[[Any, torch.Tensor], torch.Tensor]


def tokens(rank: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * micro_batch + rank)
    return torch.randint(3, VOCAB, (2, LENGTH), generator=generator)


def of(*units: str) -> Callable[..., None]:
    """A unit of each of these, several modules where they are several words, and one of what is left."""

    def shard(model: Any, **options: Any) -> None:
        for unit in units:
            fully_shard([model.get_submodule(name) for name in unit.split()], **options)
        fully_shard(model, **options)

    return shard


head_alone, head_and_norm = of("lm_head"), of("model.norm lm_head")
head_and_embedding = of("model.embed_tokens lm_head")  # tied, they have to be in one


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
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for name, parameter in model.named_parameters():
        got, want = parameter.grad, expected[name]
        if want is None:  # frozen
            assert got is None, name
            continue
        assert isinstance(got, DTensor), f"{name}: {type(got)}"
        off = float((got.full_tensor() - want).abs().max())
        gradient = max(gradient, off / max(float(want.abs().max()), 0.1 * largest))
    return {"loss": worst, "gradient": gradient}


def sharded(reference: Any, shard: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(a copy of a patched model after `shard`, the model, which stays in one process)."""
    model = copy.deepcopy(reference)
    shard(model)
    return model, reference


def model_errors() -> dict[str, dict[str, float]]:
    kept = functools.partial(head_alone, reshard_after_forward=False)
    cases = {
        "root": ("llama", fully_shard),
        "head": ("llama", head_alone),
        "head with bias, accumulated": ("phi", head_alone, own_loss, 3),
        "head kept after forward": ("llama", kept),
        "head and norm": ("llama", head_and_norm),
        "tied, root": ("qwen2", fully_shard),
        "tied, head and embedding": ("qwen2", head_and_embedding),
    }
    return {
        name: errors(*sharded(patch(build(kind)), shard), *how)
        for name, (kind, shard, *how) in cases.items()
    }


SHARDS = {
    "root": ("llama", fully_shard),
    "head": ("llama", head_alone),
    "layers": ("llama", layers),
    "layers and head": ("llama", layers_and_head),
    "tied, layers": ("qwen2", layers),
    "tied, layers and head": ("qwen2", layers_and_head),
}


def unpatched_differences() -> dict[str, dict[str, float]]:
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
            found[f"{name}, patched {when}, unpatched FSDP"] = difference(
                losses[model], losses[own], model, own
            )
    return found


def difference(
    loss: torch.Tensor, own_loss: torch.Tensor, model: Any, own: Any
) -> dict[str, float]:
    """Of two sharded models: each process's shard of each gradient, by the largest element of the whole."""
    pairs = [
        (p.grad.to_local(), q.grad.to_local(), q.grad.full_tensor())
        for p, q in zip(model.parameters(), own.parameters(), strict=True)
    ]
    largest = 0.1 * max(float(whole.abs().max()) for *_, whole in pairs)
    return {
        "loss": abs(float(loss.detach() / own_loss.detach()) - 1),
        "gradient": max(
            float((ours - theirs).abs().max()) / max(float(whole.abs().max()), largest)
            for ours, theirs, whole in pairs
            if ours.numel()
        ),
    }


def mixed_precision() -> dict[str, dict[str, float]]:
    """Against float32: bfloat16's rounding, and no more than the unpatched model's."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for name, (kind, shard) in SHARDS.items():
        shard = functools.partial(shard, mp_policy=policy)
        model, reference = sharded(patch(build(kind)), shard)
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
        model, reference = sharded(patch(build("llama")), shard)
        losses = {m: make_compute_loss_func(m, label_smoothing=0.1) for m in (model, reference)}
        found[f"smoothed, {name}"] = errors(model, reference, step)
    return found


def nested_head_errors() -> dict[str, dict[str, float]]:
    """A head whose last module is the Linear: BERT's, three levels deep."""

    def smoothed(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = losses[model](model(input_ids=ids), ids)
        return loss

    found = {}
    shards = {
        "root": fully_shard,
        "head": of("cls"),
        "last": of("cls.predictions.decoder"),
        "each": of("cls.predictions.decoder", "cls.predictions", "cls"),
    }
    for name, shard in shards.items():
        reference = patch(build_small("BertLMHeadModel", tie_word_embeddings=False))
        model, _ = sharded(reference, shard)
        found[f"several modules, {name}"] = errors(model, reference)
        losses = {m: make_compute_loss_func(m, label_smoothing=0.1) for m in (model, reference)}
        model.zero_grad(), reference.zero_grad()
        found[f"several modules, smoothed, {name}"] = errors(model, reference, smoothed)
    return found


def inner_model_errors() -> dict[str, dict[str, float]]:
    """Llama 4's language model is a causal LM, with the head in it."""

    # The model around it calls the embedding by itself.
    units = "language_model.model.embed_tokens", "language_model"
    shards = {
        "root": fully_shard,
        "inside": of(*units),
        "head": of("language_model.lm_head", *units),
    }
    return {
        f"model inside, {name}": errors(
            *sharded(patch(build_small("Llama4ForConditionalGeneration")), shard)
        )
        for name, shard in shards.items()
    }


def peft_errors() -> dict[str, dict[str, float]]:
    """LoRA in the body, the head trained whole: in a unit the wrapper of the head, or its copy in it."""
    head, found = "base_model.model.lm_head", {}
    copied = of(f"{head}.modules_to_save.default")
    for name, shard in {"root": fully_shard, "head": of(head), "copy": copied}.items():
        reference = with_lora(patch(build("llama")), modules_to_save=["lm_head"])
        found[f"peft, {name}"] = errors(*sharded(reference, shard))
    return found


def trl_errors() -> dict[str, dict[str, float]]:
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


def two_head_errors() -> dict[str, dict[str, float]]:
    """TRL's divergence of a student's head from a teacher's, each sharded as its model is, inside the student's forward."""

    def step_of(teacher: Any) -> Step:
        def divergence(model: Any, ids: torch.Tensor) -> torch.Tensor:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            heads = model.lm_head, teacher.lm_head
            loss: torch.Tensor = distillation_trainer._chunked_divergence_loss(
                hidden,
                hidden.detach().roll(1, 0),
                *(head.weight for head in heads),
                torch.ones_like(ids),
                0.5,
                **{
                    f"{side}_lm_head_bias": head.bias
                    for side, head in zip(("student", "teacher"), heads, strict=True)
                },
            )[0]
            return loss

        def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = _ForwardRedirection()(model, model, divergence, model, ids)
            return loss

        return step

    found = {}
    for name, kind, shard in (("root", "llama", fully_shard), ("heads", "phi", head_alone)):
        model, reference, teacher = build(kind), build(kind), build(kind)
        shard(model)
        if name == "heads":
            shard(teacher)
        with trl_integration.patch():
            found[f"TRL, two heads, {name}"] = errors(model, reference, step_of(teacher), 2)
    return found


def sft_trainer_differences() -> dict[str, dict[str, float]]:
    """The loss of TRL's SFTTrainer on a sharded model, patched against TRL's own. (With the head a unit by itself TRL's own has
    gradients that are not summed over the processes.)"""
    found = {}
    for name, shard in {"root": fully_shard, "layers": layers}.items():
        losses, models = {}, {}
        for which, patched in (("own", contextlib.nullcontext), ("patched", trl_integration.patch)):
            model = AutoModelForCausalLM.from_config(build("qwen2").config)
            model.load_state_dict(build("qwen2").state_dict())
            trainer = sft_trainer(model)
            models[which] = trainer.model.train()
            shard(trainer.model)
            ids, calls = tokens(dist.get_rank(), 0), sum(tl.call_counts().values())
            inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
            with patched():
                losses[which] = trainer.compute_loss(trainer.model, inputs)
                losses[which].backward()
            assert (sum(tl.call_counts().values()) > calls) == (which == "patched")
        found[f"SFTTrainer, {name}"] = difference(
            losses["patched"], losses["own"], models["patched"], models["own"]
        )
    return found


def sft_trainer(model: Any) -> SFTTrainer:
    folder = tempfile.mkdtemp()
    rows = Dataset.from_list([{"input_ids": tokens(0, n)[0].tolist()} for n in range(4)])
    skip = {"skip_prepare_dataset": True}
    config = SFTConfig(folder, use_cpu=True, report_to="none", dataset_kwargs=skip)
    return SFTTrainer(model, config, train_dataset=rows, processing_class=make_tokenizer())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = (
        model_errors()
        | unpatched_differences()
        | mixed_precision()
        | smoothed()
        | trl_errors()
        | dtensor_errors()
    )
    results |= (
        nested_head_errors() | inner_model_errors() | peft_errors() | sft_trainer_differences()
    )
    results |= two_head_errors()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        print(json.dumps(gathered))
    dist.destroy_process_group()
