"""TileLoss through its front ends, as users call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tileloss.check.case import Case, Refused


def of_jax(case: Case) -> Mapping[str, Any]:
    from tileloss.check import jax_case

    if "shards" in case.knobs:
        return _over_shards(case, case.knobs["shards"])
    return jax_case.compute(case, None)


def of_torch(case: Case) -> dict[str, Any]:
    import torch

    import tileloss.torch
    from tileloss._core.functions import FUNCTIONS

    described = FUNCTIONS[case.function]
    options = dict(case.options)
    labels = torch.from_numpy(np.array(case.tensors["labels"]))
    if described.is_linear:
        first = [case.torch("hidden"), case.torch("head")]
        options["linear_bias"] = case.torch("bias") if "bias" in case.tensors else None
        options["workspace_bytes"] = case.knobs.get("chunk_size")
        if "compute_dtype" in options:
            options["compute_dtype"] = getattr(torch, options["compute_dtype"])
    else:
        first = [case.torch("logits")]
    if described.loss in ("distillation", "sparse_distillation"):
        return _of_torch_distillation(case, first, labels, options)
    if case.function == "soft_cross_entropy":
        return _of_torch_soft_labels(case, options)
    function = getattr(tileloss.torch, case.function)
    if not described.is_loss:
        asked = dict.fromkeys((*case.outputs, *_differentiated(case)))
        rows = function(*first, labels, outputs=list(asked), **options)
        return case.torch_outputs(**{name: getattr(rows, name) for name in asked})
    tensors = {
        {"class_weights": "weight"}.get(name, name): torch.from_numpy(np.array(array))
        for name, array in case.tensors.items()
        if name not in ("logits", "hidden", "head", "bias", "labels", "advantages", "loss_grad")
    }
    if not described.metrics:
        loss = function(*first, labels, **tensors, **options)
        return case.torch_outputs(loss=loss)
    if "sequence_offsets" not in tensors:
        shape = (case.batch_size, case.seq_len)
        labels, first[0] = labels.reshape(shape), first[0].reshape(*shape, -1)
    advantages = torch.from_numpy(np.array(case.tensors["advantages"]))
    loss, metrics = function(*first, labels, advantages, return_metrics=True, **tensors, **options)
    ordered = torch.stack([metrics[name] for name in described.metrics])
    return case.torch_outputs(loss=loss) | {"metrics": ordered}


def _of_torch_distillation(
    case: Case, first: list[Any], labels: Any, options: dict[str, Any]
) -> dict[str, Any]:
    import torch

    import tileloss.torch

    names = ("token_weights", "mask", "teacher_bias")
    arrays = {name: case.tensors[name] for name in names if name in case.tensors}
    tensors: dict[str, Any] = {n: torch.from_numpy(np.array(x)) for n, x in arrays.items()}
    if "scale_by_temperature_squared" in options:
        options["scale_by_temperature_squared"] = options["scale_by_temperature_squared"] == "true"
    offered = [n for n in case.outputs if n in tileloss.torch.DistillationRows._fields]
    of_teacher = (
        "teacher_logits",
        "teacher_hidden",
        "teacher_head",
        "teacher_ids",
        "teacher_logprobs",
    )
    teacher = [case.torch(name) for name in of_teacher if name in case.tensors]
    function: Any = getattr(tileloss.torch, case.function)
    found: Any = function(
        *first,
        *teacher,
        labels,
        outputs=offered,
        **tensors,
        **options,
    )
    loss, rows = found if offered else (found, None)
    outputs = case.torch_outputs(loss=loss)
    return outputs | {name: getattr(rows, name) for name in offered}


def _of_torch_soft_labels(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    import torch

    import tileloss.torch

    if not case.in_use.all():
        raise Refused("rows that are not in use: not offered beside class probabilities")
    names = {"class_weights": "weight", "token_weights": "token_weights"}
    tensors: dict[str, Any] = {
        name: torch.from_numpy(np.array(case.tensors[tensor]))
        for tensor, name in names.items()
        if tensor in case.tensors
    }
    probabilities = case.torch("target_probs")
    loss = tileloss.torch.cross_entropy(case.torch("logits"), probabilities, **tensors, **options)
    return case.torch_outputs(loss=loss)


def _differentiated(case: Case) -> list[str]:
    return [name.removesuffix("_grad") for name in case.tensors if name.endswith("_grad")]


def _over_shards(case: Case, count: int) -> Mapping[str, Any]:
    """logp of a vocabulary that is cut over the first devices."""
    import jax
    from jax.sharding import Mesh, PartitionSpec

    import tileloss.jax

    case.refuse_unless(["logprobs", "linear_logprobs"], differentiable=["logp"])
    P: Any = PartitionSpec
    mesh = Mesh(np.array(jax.devices()[:count]), ("tp",))
    labels, function = case.jax("labels"), getattr(tileloss.jax, case.function)
    layout = {"head_layout": "VH"} if case.function.startswith("linear_") else {}

    def rows(*operands: Any) -> Any:
        return function(*operands, labels, vocab_axis="tp", **layout).logp

    def compute(operands: dict[str, Any]) -> dict[str, Any]:
        cut = {"logits": P(None, "tp"), "hidden": P(), "head": P("tp")}
        specs = tuple(cut[name] for name in operands)
        return {
            "logp": jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=P())(
                *operands.values()
            )
        }

    return case.jax_outputs(compute)
