"""PyTorch's own: cross-entropy and log-probabilities by torch.nn.functional, policy losses on top of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tileloss.testing.case import Case, Refused
from tileloss.tools.implementations import torch_policy

_TRANSFORM = ("logit_scale", "softcap", "temperature", "valid_vocab", "ignore_index")
_CROSS_ENTROPY = (*_TRANSFORM, "reduction", "label_smoothing", "z_loss", "num_items")
_HEAD = ("bias", "hidden_r", "head_r")
_WEIGHTS = ("class_weights", "token_weights")
# With smoothing PyTorch's sum runs over the classes outside the set too, where log p is -inf.
_SETS = ("allowed",)
_FUNCTIONS = ("logprobs", "cross_entropy", "policy_loss")
_ALL = (*_FUNCTIONS, *(f"linear_{name}" for name in _FUNCTIONS))
Outputs = dict[str, Any]


def eager(case: Case) -> Outputs:
    return _compute(case, _identity)


def eager_float32(case: Case) -> Outputs:
    """As models' loss functions do: the logits widened, the gradient rounded on its way back."""
    return _compute(case, Tensor.float)


def compiled(case: Case) -> Outputs:
    if case.backwards > 1:
        raise Refused("a second backward: torch.compile gives buffers away in the first")
    torch.compiler.reset()  # or a function has eight shapes and falls back to eager
    return _compute(case, _identity, torch.compile)


def linear(case: Case) -> Outputs:
    options = ("reduction", "ignore_index", "label_smoothing")
    case.refuse_unless(["linear_cross_entropy"], options, ["bias", "class_weights"])
    bias = case.torch("bias") if "bias" in case.tensors else None
    head = case.torch("head")
    chunks = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=case.knobs.get("chunk_size", max(1, len(case.torch("hidden")) // 4)), chunking_method=None,
        allow_retain_graph=case.backwards > 1,
    )  # fmt: skip
    loss = F.linear_cross_entropy(
        case.torch("hidden"),
        head,
        case.torch("labels"),
        linear_bias=None if bias is None else bias.to(head.dtype),
        weight=case.torch("class_weights").to(head.dtype)
        if "class_weights" in case.tensors
        else None,
        options=chunks,
        **case.options,
    )
    return case.torch_outputs(loss=loss)


def logits_of(case: Case) -> Tensor:
    """The logits, or the product of hidden states and head in their dtype, with that of a low-rank part as LoRA adds it."""
    if "logits" in case.tensors:
        return case.torch("logits")
    head = case.torch("head")
    bias = case.torch("bias").to(head.dtype) if "bias" in case.tensors else None
    logits = F.linear(case.torch("hidden"), head, bias)
    if "head_r" not in case.tensors:
        return logits
    return logits + F.linear(case.torch("hidden_r"), case.torch("head_r"))


def transformed(case: Case, x: Tensor) -> Tensor:
    """z of docs/users/losses.md, [N, valid_vocab]."""
    options = case.options
    z = x[:, : case.valid_vocab] * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    z = z / options.get("temperature", 1.0)
    if "allowed" in case.tensors:
        z = z.masked_fill(~case.torch_allowed(), -torch.inf)
    return z


def row_outputs(z: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """logp, as the labels, lse and entropy, [N]; of labels that are no class those of class 0."""
    log_p = F.log_softmax(z, -1)
    logp = log_p.gather(-1, labels.clamp(min=0).reshape(len(z), -1)).reshape(labels.shape)
    p = log_p.exp()
    entropy = -(p * torch.where(p > 0, log_p, 0)).sum(-1)  # no gradient of 0 times infinity
    return {"logp": logp, "lse": torch.logsumexp(z, -1), "entropy": entropy}


def _identity(x: Tensor) -> Tensor:
    return x


def _compute(
    case: Case, widen: Callable[[Tensor], Tensor], compiler: Callable[..., Any] = _identity
) -> Outputs:
    _refuse(case)
    used = case.torch_in_use()
    for name in case.tensors:
        case.torch(name)  # before anything is compiled: it copies from numpy

    def forward(x: Tensor) -> Outputs:
        z = transformed(case, widen(x))
        labels = case.torch("labels")
        found = {
            name: torch.where(used if row.ndim == 1 else labels != case.ignore_index, row, 0)
            for name, row in row_outputs(z, labels).items()
        }
        asked = case.asked({name: row.detach() for name, row in found.items()})
        if case.function.endswith("cross_entropy"):
            return asked | {"loss": _cross_entropy(case, z, used)}
        if case.function.endswith("policy_loss"):
            return asked | {"loss": torch_policy.loss(case, found["logp"], found["entropy"], used)}
        return found

    return case.torch_outputs(**compiler(forward)(logits_of(case)))


def _refuse(case: Case) -> None:
    if case.function.endswith("policy_loss"):
        case.refuse_unless(
            _ALL, (*_TRANSFORM, *torch_policy.OPTIONS), (*_HEAD, *_SETS, *torch_policy.TENSORS)
        )
        torch_policy.refuse(case)
    elif case.function.endswith("cross_entropy"):
        sets = () if "label_smoothing" in case.options else _SETS
        case.refuse_unless(_ALL, _CROSS_ENTROPY, (*_HEAD, *_WEIGHTS, *sets))
    else:
        rows = ("logp", "lse", "entropy")
        case.refuse_unless(_ALL, _TRANSFORM, (*_HEAD, *_SETS), rows, several_labels=True)


def _cross_entropy(case: Case, z: Tensor, used: Tensor) -> Tensor:
    options = case.options
    reduction = options.get("reduction", "mean")
    if not {"z_loss", "num_items"} & set(options) and "token_weights" not in case.tensors:
        return _of_torch(case, z, reduction)
    rows, z_rows, weight, counted = _row_losses(case, z, used)
    if reduction == "none":
        return rows + z_rows
    if reduction == "sum":
        return (rows + z_rows).sum()
    count = options.get("num_items")
    divisors = (counted.sum(), weight.sum()) if count is None else (count, count)
    return rows.sum() / divisors[0] + z_rows.sum() / divisors[1]


def _row_losses(case: Case, z: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row's loss and z-loss; its weight, and that times its class's."""
    given = "token_weights" in case.tensors
    weight = case.torch("token_weights") if given else torch.ones(len(z), device=z.device)
    weight = torch.where(used, weight, 0)
    rows = weight * _of_torch(case, z, "none")
    classes = _class_weights(case, z)
    counted = weight if classes is None else weight * classes[case.torch("labels").clamp(min=0)]
    z_rows = case.options.get("z_loss", 0.0) * weight * torch.logsumexp(z, -1).square()
    return rows, z_rows, weight, counted


def _of_torch(case: Case, z: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(
        z,
        case.torch("labels"),
        weight=_class_weights(case, z),
        reduction=reduction,
        ignore_index=case.ignore_index,
        label_smoothing=case.options.get("label_smoothing", 0.0),
    )


def _class_weights(case: Case, z: Tensor) -> Tensor | None:
    if "class_weights" not in case.tensors:
        return None
    return case.torch("class_weights")[: z.shape[-1]].to(z.dtype)
