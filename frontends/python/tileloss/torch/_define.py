"""What the operators of both levels are made of: schemas, outputs, their fakes, registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss import _library
from tileloss.torch._call import EXTRA_INPUTS, ROW_OUTPUTS, Call, is_per_row
from tileloss.torch._tensors import set_row_state

LOSSES = ("cross_entropy", "policy_loss")
Extra = Sequence[Tensor | None]

OPTIONS = "str options, float[] values, Tensor? scalars"
RESCALE = "bool rescale_in_place"  # for the formula of autograd


def extra_schema(function: str) -> str:
    return "".join(f", Tensor? {name}" for name in EXTRA_INPUTS[function])


def empty() -> Tensor:
    return torch.empty(0)


def metrics_size(name: str, wanted: bool) -> int:
    return len(_library.FUNCTIONS[name].metrics) if wanted else 0


def new_loss(call: Call, labels: Tensor, options: str, values: Sequence[float]) -> Tensor:
    shape = labels.shape if is_per_row(call.function.name, options, values) else ()
    return call.new_output("loss", shape)


def new_metrics(call: Call, wanted: bool) -> Tensor:
    size = metrics_size(call.function.name, wanted)
    return call.new_output("metrics", (size,)) if size else empty()


def new_state(call: Call, labels: Tensor, arrays: int) -> Tensor:
    state = torch.empty((arrays, labels.numel()), dtype=torch.float32)
    if arrays:
        set_row_state(call.args, state)
    return state


def split(
    function: str, rest: Sequence[Any]
) -> tuple[Extra, str, list[float], Tensor | None, Sequence[Any]]:
    """An operator's arguments after its labels: the extra inputs, the options, what is left."""
    n = len(EXTRA_INPUTS[function])
    return rest[:n], rest[n], rest[n + 1], rest[n + 2], rest[n + 3 :]


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> None:
    operator = torch.library.custom_op(
        f"tileloss::{name}", kernel, mutates_args=mutates, device_types="cpu", schema=schema
    )
    operator.register_fake(fake)


def fake_loss(
    f: str, labels: Tensor, options: str, values: Sequence[float], wants_metrics: bool
) -> tuple[Tensor, Tensor]:
    per_row = is_per_row(f, options, values)
    loss = labels.new_empty(labels.shape if per_row else (), dtype=torch.float32)
    return loss, labels.new_empty((metrics_size(f, wants_metrics),), dtype=torch.float32)


ROWS = "(" + ", ".join(["Tensor"] * (len(ROW_OUTPUTS) + 1)) + ")"
ROW_GRADS = "Tensor? logp_grad, Tensor? lse_grad, Tensor? entropy_grad"


def _row_state_arrays(wanted: Sequence[str]) -> int:
    return 4 if "entropy" in wanted else 3  # its gradient reads entropy_sum


def new_row_outputs(
    call: Call, labels: Tensor, outputs: str, keep_state: bool
) -> tuple[Tensor, ...]:
    wanted = outputs.split(",")
    results = [
        call.new_output(name, labels.shape, dtype) if name in wanted else empty()
        for name, dtype in ROW_OUTPUTS.items()
    ]
    results.append(new_state(call, labels, _row_state_arrays(wanted) if keep_state else 0))
    return tuple(results)


def fake_row_outputs(labels: Tensor, outputs: str, keep_state: bool) -> tuple[Tensor, ...]:
    wanted = outputs.split(",")
    results = [
        labels.new_empty(labels.shape, dtype=dtype)
        if name in wanted
        else labels.new_empty((0,), dtype=torch.float32)
        for name, dtype in ROW_OUTPUTS.items()
    ]
    arrays = _row_state_arrays(wanted) if keep_state else 0
    results.append(labels.new_empty((arrays, labels.numel()), dtype=torch.float32))
    return tuple(results)


def row_grads(call: Call, grads: Sequence[Tensor | None], state: Tensor) -> None:
    for slot, grad in zip(("logp_grad", "lse_grad", "entropy_grad"), grads, strict=True):
        call.vector(slot, grad, torch.float32)
    set_row_state(call.args, state)
