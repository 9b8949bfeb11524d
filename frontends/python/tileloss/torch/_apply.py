"""From a public function's arguments to the operator that serves them: forward, value and gradient, or in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from tileloss._core.functions import FUNCTIONS
from tileloss._core.slots import INPUTS, ROW_OUTPUTS, SLOTS
from tileloss.torch._autograd import apply
from tileloss.torch._call import ARGUMENT_NAMES
from tileloss.torch._define import is_traced
from tileloss.torch._dtensor import local_rows, whole_parameter
from tileloss.torch._options import Value, encode, refuse_gradient
from tileloss.torch._tensors import (
    DTYPES,
    autocast_dtype,
    check_cpu,
    check_float,
    check_last_dimension,
    check_rows,
    check_vector,
    checked_labels,
    refuse_transforms,
)

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class RowOutputs(NamedTuple):
    """What `logprobs` gives for each row, of target's shape; None: not asked for. Rows that are ignored give 0 (argmax -1)."""

    logp: Tensor | None = None  # float32: log softmax at the label
    lse: Tensor | None = None  # float32: log sum_j exp(z_j)
    entropy: Tensor | None = None  # float32, nats
    argmax: Tensor | None = None  # int64: lowest index on ties, -1 if the row holds a NaN
    correct: Tensor | None = None  # bool: argmax == label
    log_sum_sq_probs: Tensor | None = None  # float32: log sum_j p_j^2
    mean_logit: Tensor | None = None  # float32: mean of z over the valid columns


class Head(NamedTuple):
    """The LM head's side of a fused call."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    compute_dtype: int
    workspace_bytes: int


def make_head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    compute_dtype: torch.dtype | None,
    workspace_bytes: int | None,
) -> Head:
    hidden, head = local_rows("input", input), whole_parameter("linear_weight", linear_weight)
    bias = whole_parameter("linear_bias", linear_bias)
    check_float("input", hidden)
    check_float("linear_weight", head)
    check_last_dimension(hidden)
    if head.dim() != 2 or head.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"linear_weight: expected shape [V, {hidden.shape[-1]}], as input's last dimension, got {list(head.shape)}"
        )
    if bias is not None:
        check_float("linear_bias", bias)
        if bias.shape != head.shape[:1]:
            raise ValueError(
                f"linear_bias: expected shape [{head.shape[0]}], got {list(bias.shape)}"
            )
    refuse_transforms(hidden, head, bias)
    if workspace_bytes is not None:
        if not isinstance(workspace_bytes, int):
            raise TypeError(f"workspace_bytes: expected an integer >= 1, got {workspace_bytes!r}")
        if not 1 <= workspace_bytes < 2**63:
            raise ValueError(f"workspace_bytes: expected >= 1, got {workspace_bytes}")
    dtype = compute_dtype if compute_dtype is not None else autocast_dtype()
    if compute_dtype is None and dtype == torch.float16:
        # float16 autocast: the products know bfloat16 and float32, and float32 loses nothing.
        dtype = torch.float32
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"compute_dtype: expected torch.float32 or torch.bfloat16, got {compute_dtype}"
        )
    code = 0 if dtype is None else DTYPES[dtype]
    return Head(hidden, head, bias, code, workspace_bytes or 0)


def extra_inputs(
    function: str,
    extra: Mapping[str, Tensor | None],
    labels: Tensor,
    vocab: int,
    given: Mapping[str, Value],
) -> list[Tensor | None]:
    """The tensors that go with the labels, by their names in the ABI: in its order, checked and detached."""
    inputs: list[Tensor | None] = []
    for name in INPUTS[function]:
        shown, shape = ARGUMENT_NAMES.get(name, name), SLOTS[name].shape
        tensor = local_rows(shown, extra.get(name))
        if tensor is None:
            inputs.append(None)
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{shown}: expected a Tensor, got {type(tensor).__name__}")
        check_cpu(shown, tensor)
        if tensor.dtype not in _INTEGERS and not tensor.is_floating_point():
            raise TypeError(f"{shown}: expected numbers, got {tensor.dtype}")
        refuse_gradient(shown, tensor)
        if shape == "C":
            check_vector(shown, tensor)
            valid = given.get("valid_vocab")
            if isinstance(valid, int) and 0 < valid < vocab == tensor.shape[0]:
                tensor = tensor[:valid]
        elif shape == "B+1":
            check_vector(shown, tensor)
            if tensor.dtype not in _INTEGERS or tensor.dtype == torch.bool:
                raise TypeError(f"{shown}: expected integers, got {tensor.dtype}")
        elif shape == "B|N" and given.get("advantage_level") != "token":
            _check_sequences(shown, tensor, labels)
        else:
            check_rows(shown, tensor, labels)
        inputs.append(tensor.detach())
    return inputs


def _check_sequences(name: str, tensor: Tensor, labels: Tensor) -> None:
    """One for each sequence, [B] or [B, 1]."""
    if tensor.dim() != 1 and (tensor.dim() != 2 or tensor.shape[1] != 1):
        raise ValueError(
            f"{name}: expected [B] or [B, 1] of sequences, or target's shape {list(labels.shape)}, got {list(tensor.shape)}"
        )


def loss_of_logits(
    function: str,
    logits: Tensor,
    labels: Tensor,
    extra: Mapping[str, Tensor | None],
    given: Mapping[str, Value],
    *,
    preset: str = "",
    wants_metrics: bool = False,
    grad_in_forward: bool | None,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor]:
    """(loss, metrics); metrics is empty unless asked for."""
    logits, labels = checked_logits(logits, labels)
    tensors = extra_inputs(function, extra, labels, logits.shape[-1], given)
    inputs = (labels, *tensors, *encode(function, given, preset))
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    if wants_grad and grad_in_forward:
        refuse_per_row(given)
        if inplace_backward and not is_traced():
            loss, metrics = apply(
                f"{function}_value_and_grad_", (logits, *inputs, wants_metrics), True, True
            )
            return loss, metrics
        loss, _, metrics = apply(
            f"{function}_value_and_grad", (logits, *inputs, wants_metrics), True, True
        )
        return loss, metrics
    loss, _, metrics = apply(
        function, (logits, *inputs, wants_grad, wants_metrics), wants_grad, inplace_backward
    )
    return loss, metrics


@overload
def checked_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...
@overload
def checked_logits(logits: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]: ...
def checked_logits(logits: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
    logits = local_rows("input", logits)
    check_float("input", logits)
    refuse_transforms(logits)
    check_last_dimension(logits)
    if labels is None:
        return logits, None
    return logits, checked_labels(local_rows("target", labels), logits)


def is_per_row(given: Mapping[str, Value]) -> bool:
    # No preset aggregates by none.
    return "none" in (given.get("reduction"), given.get("aggregation"))


def refuse_per_row(given: Mapping[str, Value]) -> None:
    if is_per_row(given):
        raise ValueError(
            "grad_in_forward: expected False for a loss per row (reduction or aggregation 'none'), whose upstream gradient "
            "has to be known, got True"
        )


def loss_of_hidden(
    function: str,
    head: Head,
    labels: Tensor,
    extra: Mapping[str, Tensor | None],
    given: Mapping[str, Value],
    *,
    preset: str = "",
    wants_metrics: bool = False,
    grad_in_forward: bool | None,
) -> tuple[Tensor, Tensor]:
    """(loss, metrics); metrics is empty unless asked for. A loss per row takes the two-pass way whatever is asked."""
    labels = checked_labels(local_rows("target", labels), head.hidden)
    of_labels = extra_inputs(function, extra, labels, head.head.shape[0], given)
    name = f"linear_{function}"
    options = encode(name, given, preset)
    tensors = (head.hidden, head.head, head.bias, labels, *of_labels, *options)
    head_options = (head.compute_dtype, head.workspace_bytes)
    needs = needs_of(head)
    if grad_in_forward is None:
        grad_in_forward = not has_float16_gradient(head, needs)
    if any(needs) and grad_in_forward and not is_per_row(given):
        inputs = (*tensors, *head_options, *needs, wants_metrics)
        loss, _, _, _, metrics = apply(f"{name}_value_and_grad", inputs, True, True)
        return loss, metrics
    wants_grad = any(needs)
    inputs = (*tensors, *head_options, wants_grad, wants_metrics)
    loss, _, metrics = apply(name, inputs, wants_grad, False)
    return loss, metrics


def needs_of(head: Head) -> list[bool]:
    """Whether gradients of hidden, head and bias are asked for."""
    enabled = torch.is_grad_enabled()
    return [enabled and t is not None and t.requires_grad for t in head[:3]]


def has_float16_gradient(head: Head, needs: Sequence[bool]) -> bool:
    """In float16 a gradient that is stored before it is multiplied by AMP's scale loses what the scale is there to save."""
    tensors = zip(head[:3], needs, strict=True)
    return any(need and t is not None and t.dtype == torch.float16 for t, need in tensors)


def wanted_outputs(outputs: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(outputs, str) or not isinstance(outputs, Iterable) else tuple(outputs)
    unknown = [name for name in names if name not in ROW_OUTPUTS]
    if unknown or not names:
        shown = names or outputs
        raise ValueError(f"outputs: expected names among {', '.join(ROW_OUTPUTS)}, got {shown!r}")
    return names


def row_outputs(results: Sequence[Tensor], outputs: Sequence[str]) -> RowOutputs:
    named = {name: r for name, r in zip(ROW_OUTPUTS, results, strict=False) if name in outputs}
    for name, result in named.items():
        if result.dtype == torch.uint8:  # the ABI's truth values
            named[name] = result.view(torch.bool)
    return RowOutputs(**named)


def rows_of_logits(
    logits: Tensor,
    labels: Tensor,
    outputs: Iterable[str],
    given: Mapping[str, Value],
    *,
    inplace_backward: bool,
) -> RowOutputs:
    logits, labels = checked_logits(logits, labels)
    names = wanted_outputs(outputs)
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    inputs = (logits, labels, *encode("logprobs", given), ",".join(names), wants_grad)
    return row_outputs(apply("logprobs", inputs, wants_grad, inplace_backward), names)


def rows_of_hidden(
    head: Head, labels: Tensor, outputs: Iterable[str], given: Mapping[str, Value]
) -> RowOutputs:
    labels = checked_labels(local_rows("target", labels), head.hidden)
    names = wanted_outputs(outputs)
    wants_grad = any(needs_of(head))
    tensors = (head.hidden, head.head, head.bias, labels, *encode("linear_logprobs", given))
    head_options = (head.compute_dtype, head.workspace_bytes)
    inputs = (*tensors, *head_options, ",".join(names), wants_grad)
    return row_outputs(apply("linear_logprobs", inputs, wants_grad, False), names)


def metrics_by_name(function: str, metrics: Tensor) -> dict[str, Tensor]:
    return dict(zip(FUNCTIONS[function].metrics, metrics.unbind(), strict=True))
