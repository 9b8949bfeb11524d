"""Liger: cross-entropy by its Triton kernels, in Triton's interpreter where there is no GPU; chunked GRPO losses in torch."""

from __future__ import annotations

import os
from typing import Any

import torch

from tileloss.testing.case import Case, Refused
from tileloss.tools.implementations.loss_types import OPTIONS, trl_arguments
from tileloss.tools.implementations.signatures import taken

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import liger_kernel.chunked_loss
from liger_kernel.transformers.functional import (
    liger_cross_entropy,
    liger_fused_linear_cross_entropy,
)
from triton import knobs

# What a release did before it had the argument.
_USUAL = {
    "importance_sampling_level": "token", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "use_bias_correction_kl": False, "temperature": 1.0,
}  # fmt: skip
_CROSS_ENTROPY = ("reduction", "ignore_index", "label_smoothing", "z_loss", "softcap")


def compute(case: Case) -> dict[str, Any]:
    if case.function == "linear_policy_loss":
        return _policy(case)
    functions = ("cross_entropy", "linear_cross_entropy", "linear_policy_loss")
    case.refuse_unless(functions, _CROSS_ENTROPY, ["bias", "class_weights"])
    if knobs.runtime.interpret and ("softcap" in case.options or "class_weights" in case.tensors):
        raise Refused(
            "softcap and class_weights: not in Triton's interpreter, which has no .to of a float"
        )
    options = {
        "reduction": case.options.get("reduction", "mean"),
        "ignore_index": case.ignore_index,
        "label_smoothing": case.options.get("label_smoothing", 0.0),
        "lse_square_scale": case.options.get("z_loss", 0.0),
        "softcap": case.options.get("softcap"),
    }
    weight = case.torch("class_weights") if "class_weights" in case.tensors else None
    labels = case.torch("labels")
    if case.function == "cross_entropy":
        loss = liger_cross_entropy(case.torch("logits"), labels, weight, **options)
    else:
        options |= {"bias": _bias(case), "ce_weight": weight, "accum_dtype": torch.float32}
        options["chunk_mem_const"] = case.knobs.get("chunk_size", 1)
        usual = {"accum_dtype": torch.float32, "chunk_mem_const": 1}
        known = taken(liger_fused_linear_cross_entropy, usual, **options)
        hidden, head = case.torch("hidden"), case.torch("head")
        loss = liger_fused_linear_cross_entropy(hidden, head, labels, **known)
    return case.torch_outputs(loss=loss)


def _bias(case: Case) -> torch.Tensor | None:
    return case.torch("bias").to(case.torch("head").dtype) if "bias" in case.tensors else None


def _policy(case: Case) -> dict[str, Any]:
    case.refuse_unless(
        ["linear_policy_loss"],
        (*OPTIONS, "temperature", "ignore_index"),
        ["bias", "advantages", "old_logp", "ref_logp", "mask"],
    )
    options, shape = case.options, (case.batch_size, case.seq_len)
    kind = getattr(liger_kernel.chunked_loss, "LigerFusedLinearGRPOLoss", None)
    if kind is None:
        raise Refused("policy losses: not in this release")
    arguments = taken(
        kind,
        _USUAL,
        compiled=False,
        use_ref_model="beta" in options,
        temperature=options.get("temperature", 1.0),
        **trl_arguments(case),
        **{name: options[name] for name in options if name.startswith("vespo_")},
    )
    loss = kind(**arguments)

    def rows(name: str) -> torch.Tensor | None:
        return case.torch(name).reshape(shape) if name in case.tensors else None

    used = case.torch_in_use().reshape(shape)
    optional = taken(
        loss.forward,
        {},
        bias=_bias(case),
        ref_per_token_logps=rows("ref_logp"),
        old_per_token_logps=rows("old_logp"),
        num_items_in_batch=options.get("num_items"),
    )
    try:
        found, _ = loss(
            case.torch("hidden").reshape(*shape, -1),
            case.torch("head"),
            case.torch("labels").clamp(min=0).reshape(shape),
            used.to(torch.int64),
            case.torch("advantages"),
            **optional,
        )
    except ValueError as error:  # a loss type that this release lacks
        raise Refused(str(error)) from error
    return case.torch_outputs(loss=found)
