"""Losses that are told more of a row than its label: from a public function's arguments to the operator that serves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tileloss._core.slots import ROW_OUTPUT, names_of
from tileloss.torch._apply import (
    Head,
    extra_inputs,
    has_float16_gradient,
    is_per_row,
    needs_of,
    refuse_per_row,
)
from tileloss.torch._autograd import apply
from tileloss.torch._define import is_traced
from tileloss.torch._dtensor import local_rows
from tileloss.torch._options import Value, encode
from tileloss.torch._tensors import checked_labels


class DistillationRows(NamedTuple):
    """Numbers of each row, [...] as the rows lie; None: not asked for. None of them is differentiable."""

    divergence: Tensor | None = None  # float32, neither weighted nor scaled
    entropy: Tensor | None = (
        None  # float32, nats; the student's, as all that follow but teacher_entropy and agreement
    )
    teacher_entropy: Tensor | None = None
    agreement: Tensor | None = None  # bool: both have the same argmax
    logp: Tensor | None = None
    lse: Tensor | None = None


def of_logits(
    function: str,
    logits: Tensor,
    wanted: Sequence[Tensor],
    labels: Tensor | None,
    extra: Mapping[str, Tensor | None],
    given: Mapping[str, Value],
    *,
    outputs: Iterable[str] = (),
    grad_in_forward: bool | None,
    inplace_backward: bool,
) -> tuple[Tensor, DistillationRows]:
    """Logits and labels are checked, ``wanted`` too: slots.WANTED of the function. A backward of its own makes all of the
    forward's sums again: by default the gradient is made in the forward, but for float16, which AMP's scale would reach too
    late, and in place, where the logits are the caller's until the backward."""
    names = checked_outputs(outputs)
    rows = logits[..., 0] if labels is None else labels
    tensors = extra_inputs(function, extra, rows, logits.shape[-1], given)
    inputs = (logits, *wanted, labels, *tensors, *encode(function, given), ",".join(names))
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    inplace_backward = inplace_backward and not is_traced()
    if grad_in_forward is None:
        grad_in_forward = not (
            inplace_backward or is_per_row(given) or logits.dtype == torch.float16
        )
    if not wants_grad or not grad_in_forward:
        loss, *found = apply(function, inputs, wants_grad, inplace_backward)
    else:
        refuse_per_row(given)
        if inplace_backward:
            loss, *found = apply(f"{function}_value_and_grad_", inputs, True, True)
        else:
            loss, _, *found = apply(f"{function}_value_and_grad", inputs, True, True)
    return loss, rows_by_name(function, found, names)


def of_hidden(
    function: str,
    head: Head,
    wanted: Sequence[Tensor | None],
    target: Tensor | None,
    extra: Mapping[str, Tensor | None],
    given: Mapping[str, Value],
    *,
    outputs: Iterable[str] = (),
    grad_in_forward: bool | None,
) -> tuple[Tensor, DistillationRows]:
    """The same with the LM head; ``wanted``: slots.LINEAR_WANTED. A loss per row takes the two-pass way whatever is asked."""
    names = checked_outputs(outputs)
    labels = None if target is None else checked_labels(local_rows("target", target), head.hidden)
    rows = head.hidden[..., 0] if labels is None else labels
    of_rows = extra_inputs(function, extra, rows, head.head.shape[0], given)
    options = (*encode(f"linear_{function}", given), head.compute_dtype, head.workspace_bytes)
    tensors = (*head[:3], *wanted, labels, *of_rows)
    needs, joined = needs_of(head), ",".join(names)
    if grad_in_forward is None:
        grad_in_forward = not has_float16_gradient(head, needs)
    if any(needs) and grad_in_forward and not is_per_row(given):
        inputs = (*tensors, *options, *needs, joined)
        loss, _, _, _, *found = apply(f"linear_{function}_value_and_grad", inputs, True, True)
    else:
        loss, *found = apply(f"linear_{function}", (*tensors, *options, joined), any(needs), False)
    return loss, rows_by_name(function, found, names)


def rows_by_name(function: str, found: Sequence[Tensor], names: Sequence[str]) -> DistillationRows:
    named = dict(zip(names_of(ROW_OUTPUT, function), found, strict=True))
    wanted = {name: named[name] for name in names}
    return DistillationRows(
        **{n: t.view(torch.bool) if t.dtype == torch.uint8 else t for n, t in wanted.items()}
    )


def checked_outputs(outputs: Iterable[str]) -> tuple[str, ...]:
    if isinstance(outputs, str):
        outputs = (outputs,)
    names = tuple(outputs) if isinstance(outputs, Iterable) else None
    unknown = [name for name in names or () if name not in DistillationRows._fields]
    if unknown or names is None:
        raise ValueError(
            f"outputs: expected names among {', '.join(DistillationRows._fields)}, got {unknown or outputs!r}"
        )
    return names
