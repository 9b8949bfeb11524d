"""The operators ``torch.ops.tileloss.linear_*``, fused with the LM head: see _ops.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss._core.slots import DIFFERENTIABLE, LOSSES
from tileloss._core.structs import BACKWARD, FORWARD, VALUE_AND_GRAD
from tileloss.torch._call import Call
from tileloss.torch._define import (
    OPTIONS,
    ROW_GRADS,
    ROWS,
    define,
    empty,
    extra_schema,
    fake_loss,
    fake_row_outputs,
    loss_state_arrays,
    new_loss,
    new_metrics,
    new_row_outputs,
    new_state,
    row_grads,
    split,
)
from tileloss.torch._tensors import CPU, new_gradient, set_row_state, set_strided_matrix

_LINEAR = "Tensor hidden, Tensor head, Tensor? bias, Tensor labels"
_HEAD_OPTIONS = "int compute_dtype, int workspace_bytes"
_NEEDS = "bool needs_hidden, bool needs_head, bool needs_bias"


def _start_linear(
    f: str, tensors: Sequence[Any], rest: Sequence[Any]
) -> tuple[Call, int, Sequence[Any]]:
    hidden, head, bias, labels = tensors
    extra, options, values, scalars, (compute_dtype, workspace_bytes, *left) = split(f, rest)
    call = Call(f"linear_{f}", options, values, scalars)
    call.head(hidden, head, bias, compute_dtype)
    call.inputs(f, labels, extra)
    return call, workspace_bytes, left


def new_head_gradients(
    call: Call,
    tensors: Sequence[Any],
    needs: Sequence[bool],
    dhidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of hidden, head and bias, the first of ``tensors``. ``dhidden``: where the first of them is to lie."""
    hidden, head, bias = tensors[:3]
    dhead, dbias = empty(), empty()
    if not needs[0]:
        dhidden = empty()
    else:
        if dhidden is None:
            dhidden = new_gradient(hidden, "dhidden")
        set_strided_matrix(call.args, "dhidden", dhidden.view(-1, hidden.shape[-1]))
    if needs[1]:
        dhead = new_gradient(head, "dhead")
        set_strided_matrix(call.args, "dhead", dhead)
    if needs[2] and bias is not None:
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=CPU)
        call.vector("dbias", dbias)
    return dhidden, dhead, dbias


def fake_head_gradients(
    tensors: Sequence[Any], needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        if tensor is None or not wanted:
            return tensors[0].new_empty((0,), dtype=torch.float32)
        return tensor.new_empty(tensor.shape)

    return like(tensors[0], needs[0]), like(tensors[1], needs[1]), like(tensors[2], needs[2])


def _define_linear_loss(f: str) -> None:
    name = f"linear_{f}"
    inputs = f"{_LINEAR}{extra_schema(f)}, {OPTIONS}, {_HEAD_OPTIONS}"

    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, budget, (keep_state, wants_metrics) = _start_linear(f, args[:4], args[4:])
        loss = new_loss(call, args[3])
        state = new_state(call, args[3], loss_state_arrays(call.names, keep_state))
        metrics = new_metrics(call, wants_metrics)
        call.run(FORWARD, budget)
        return loss, state, metrics

    def fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        labels = args[3]
        _, options, values, _, (_, _, keep_state, wants_metrics) = split(f, args[4:])
        loss, metrics = fake_loss(name, labels, options, values, wants_metrics)
        arrays = loss_state_arrays(options, keep_state)
        return loss, labels.new_empty((arrays, labels.numel()), dtype=torch.float32), metrics

    def value_and_grad(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        call, budget, (*needs, wants_metrics) = _start_linear(f, args[:4], args[4:])
        loss = new_loss(call, args[3])
        metrics = new_metrics(call, wants_metrics)
        gradients = new_head_gradients(call, args[:4], needs)
        call.run(VALUE_AND_GRAD, budget)
        return loss, *gradients, metrics

    def fake_value_and_grad(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        _, options, values, _, (_, _, *needs, wants_metrics) = split(f, args[4:])
        loss, metrics = fake_loss(name, args[3], options, values, wants_metrics)
        return loss, *fake_head_gradients(args[:4], needs), metrics

    def backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, budget, (state, *needs) = _start_linear(f, args[:4], args[4:])
        call.vector("loss_grad", grad)
        set_row_state(call.args, state)
        gradients = new_head_gradients(call, args[:4], needs)
        call.run(BACKWARD, budget)
        return gradients

    def fake_backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return fake_head_gradients(args[:4], args[-3:])

    define(
        name,
        f"({inputs}, bool keep_state, bool wants_metrics) -> (Tensor, Tensor, Tensor)",
        forward,
        fake_forward,
    )
    define(
        f"{name}_value_and_grad",
        f"({inputs}, {_NEEDS}, bool wants_metrics) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        value_and_grad,
        fake_value_and_grad,
    )
    define(
        f"{name}_backward",
        f"(Tensor grad, {inputs}, Tensor state, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
        backward,
        fake_backward,
    )


def _define_linear_logprobs() -> None:
    n = len(DIFFERENTIABLE)  # the upstream gradients, a backward's first arguments
    inputs = f"{_LINEAR}, {OPTIONS}, {_HEAD_OPTIONS}"

    def forward(*args: Any) -> tuple[Tensor, ...]:
        call, budget, (outputs, keep_state) = _start_linear("logprobs", args[:4], args[4:])
        results = new_row_outputs(call, args[3], outputs, keep_state)
        call.run(FORWARD, budget)
        return results

    def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        tensors = args[n : n + 4]
        call, budget, (state, *needs) = _start_linear("logprobs", tensors, args[n + 4 :])
        row_grads(call, args[:n], state)
        gradients = new_head_gradients(call, tensors, needs)
        call.run(BACKWARD, budget)
        return gradients

    def fake_forward(*args: Any) -> tuple[Tensor, ...]:
        return fake_row_outputs(args[3], *args[-2:])

    def fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return fake_head_gradients(args[n : n + 4], args[-3:])

    define(
        "linear_logprobs",
        f"({inputs}, str outputs, bool keep_state) -> {ROWS}",
        forward,
        fake_forward,
    )
    define(
        "linear_logprobs_backward",
        f"({ROW_GRADS}, {inputs}, Tensor state, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
        backward,
        fake_backward,
    )


for _loss in LOSSES:
    _define_linear_loss(_loss)
_define_linear_logprobs()
