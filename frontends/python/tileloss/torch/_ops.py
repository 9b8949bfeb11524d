"""The operators ``torch.ops.tileloss.*``: one set for each function of the library, from logits and fused with the LM head.

For a loss f: f, f_value_and_grad, f_backward, and at the logits level f_backward_ and f_value_and_grad_, which write dlogits over
the logits. logprobs and linear_logprobs have a forward and a backward. All have a fake kernel for torch.compile; formulas for
autograd are in _autograd.py.

Every operator takes, after its tensors, the options as `_options.encode` makes them: ``options`` (names), ``values``, ``scalars``.
Outputs that were not asked for are empty tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss import _library
from tileloss._library import BACKWARD, FORWARD, VALUE_AND_GRAD
from tileloss.torch._call import EXTRA_INPUTS, ROW_OUTPUTS, Call, is_per_row, state_arrays
from tileloss.torch._tensors import as_rows, new_gradient, set_row_state, set_strided_matrix

LOSSES = ("cross_entropy", "policy_loss")
Extra = Sequence[Tensor | None]

_OPTIONS = "str options, float[] values, Tensor? scalars"
_LINEAR = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_HEAD_OPTIONS = "int compute_dtype, int workspace_bytes"
_NEEDS = "bool needs_hidden, bool needs_weight, bool needs_bias"
_KEEP = "bool keep_state, bool inplace_backward"  # the second is for the formula of autograd
_RESCALE = "bool rescale_in_place"  # for the formula of autograd


def _extra_schema(function: str) -> str:
    return "".join(f", Tensor? {name}" for name in EXTRA_INPUTS[function])


def _empty() -> Tensor:
    return torch.empty(0)


def _metrics_size(name: str, wanted: bool) -> int:
    return len(_library.FUNCTIONS[name].metrics) if wanted else 0


def _new_loss(call: Call, labels: Tensor, options: str, values: Sequence[float]) -> Tensor:
    shape = labels.shape if is_per_row(call.function.name, options, values) else ()
    return call.new_output("loss", shape)


def _new_metrics(call: Call, wanted: bool) -> Tensor:
    size = _metrics_size(call.function.name, wanted)
    return call.new_output("metrics", (size,)) if size else _empty()


def _new_state(call: Call, labels: Tensor, arrays: int) -> Tensor:
    state = torch.empty((arrays, labels.numel()), dtype=torch.float32)
    if arrays:
        set_row_state(call.args, state)
    return state


def _split(function: str, rest: Sequence[Any]) -> tuple[Extra, str, list[float], Tensor | None, Sequence[Any]]:
    """An operator's arguments after its labels: the extra inputs, the options, what is left."""
    n = len(EXTRA_INPUTS[function])
    return rest[:n], rest[n], rest[n + 1], rest[n + 2], rest[n + 3 :]


def _define(
    name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> None:
    operator = torch.library.custom_op(f"tileloss::{name}", kernel, mutates_args=mutates, device_types="cpu", schema=schema)
    operator.register_fake(fake)


# ------------------------------------------------------------------------------------------------------- from logits


def _define_loss(f: str) -> None:
    inputs = f"Tensor logits, Tensor labels{_extra_schema(f)}, {_OPTIONS}"
    in_place = inputs.replace("Tensor logits", "Tensor(a!) logits")

    def start(logits: Tensor, labels: Tensor, rest: Sequence[Any], dlogits: Tensor | None) -> tuple[Call, Sequence[Any]]:
        extra, options, values, scalars, left = _split(f, rest)
        call = Call(f, options, values, scalars)
        call.logits(logits, dlogits)
        call.inputs(labels, extra)
        return call, left

    def forward(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, (keep_state, _, wants_metrics) = start(logits, labels, rest, None)
        loss = _new_loss(call, labels, call.names, call.values)
        state = _new_state(call, labels, state_arrays(f, call.names) if keep_state else 0)
        metrics = _new_metrics(call, wants_metrics)
        call.run(FORWARD)
        return loss, state, metrics

    def fake_forward(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, options, values, _, (keep_state, _, wants_metrics) = _split(f, rest)
        loss, metrics = _fake_loss(f, labels, options, values, wants_metrics)
        arrays = state_arrays(f, options) if keep_state else 0
        return loss, labels.new_empty((arrays, labels.numel()), dtype=torch.float32), metrics

    def value_and_grad(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        dlogits = new_gradient(logits)
        call, (_, wants_metrics) = start(logits, labels, rest, dlogits)
        loss = _new_loss(call, labels, call.names, call.values)
        metrics = _new_metrics(call, wants_metrics)
        call.run(VALUE_AND_GRAD)
        return loss, dlogits, metrics

    def fake_value_and_grad(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, options, values, _, (_, wants_metrics) = _split(f, rest)
        loss, metrics = _fake_loss(f, labels, options, values, wants_metrics)
        return loss, logits.new_empty(logits.shape), metrics

    def value_and_grad_(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        _check_in_place(logits)
        call, (wants_metrics,) = start(logits, labels, rest, logits)
        loss = _new_loss(call, labels, call.names, call.values)
        metrics = _new_metrics(call, wants_metrics)
        call.run(VALUE_AND_GRAD)
        return loss, metrics

    def fake_value_and_grad_(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        _, options, values, _, (wants_metrics,) = _split(f, rest)
        return _fake_loss(f, labels, options, values, wants_metrics)

    def backward_into(dlogits: Tensor, grad: Tensor, logits: Tensor, labels: Tensor, rest: Sequence[Any]) -> None:
        call, (state,) = start(logits, labels, rest, dlogits)
        call.vector("loss_grad", grad, torch.float32)
        set_row_state(call.args, state)
        call.run(BACKWARD)

    def backward(grad: Tensor, logits: Tensor, labels: Tensor, *rest: Any) -> Tensor:
        dlogits = new_gradient(logits)
        backward_into(dlogits, grad, logits, labels, rest)
        return dlogits

    def backward_(grad: Tensor, logits: Tensor, labels: Tensor, *rest: Any) -> None:
        _check_in_place(logits)
        backward_into(logits, grad, logits, labels, rest)

    _define(f, f"({inputs}, {_KEEP}, bool wants_metrics) -> (Tensor, Tensor, Tensor)", forward, fake_forward)
    _define(
        f"{f}_value_and_grad",
        f"({inputs}, {_RESCALE}, bool wants_metrics) -> (Tensor, Tensor, Tensor)",
        value_and_grad,
        fake_value_and_grad,
    )
    _define(
        f"{f}_value_and_grad_",
        f"({in_place}, bool wants_metrics) -> (Tensor, Tensor)",
        value_and_grad_,
        fake_value_and_grad_,
        ("logits",),
    )
    _define(f"{f}_backward", f"(Tensor grad, {inputs}, Tensor state) -> Tensor", backward, _fake_dlogits)
    _define(
        f"{f}_backward_", f"(Tensor grad, {in_place}, Tensor state) -> ()", backward_, lambda *args: None, ("logits",)
    )


def _fake_loss(
    f: str, labels: Tensor, options: str, values: Sequence[float], wants_metrics: bool
) -> tuple[Tensor, Tensor]:
    per_row = is_per_row(f, options, values)
    loss = labels.new_empty(labels.shape if per_row else (), dtype=torch.float32)
    return loss, labels.new_empty((_metrics_size(f, wants_metrics),), dtype=torch.float32)


def _fake_dlogits(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _check_in_place(logits: Tensor) -> None:
    if as_rows(logits) is not logits:
        raise ValueError(
            "inplace_backward: expected logits whose rows can be written where they lie (last stride 1, no broadcast), "
            f"got shape {list(logits.shape)} with strides {list(logits.stride())}"
        )


# ---------------------------------------------------------------------------------------------- fused with the LM head


def _start_linear(f: str, tensors: Sequence[Any], rest: Sequence[Any]) -> tuple[Call, int, Sequence[Any]]:
    hidden, weight, bias, labels = tensors
    extra, options, values, scalars, (compute_dtype, workspace_bytes, *left) = _split(f, rest)
    call = Call(f"linear_{f}", options, values, scalars)
    call.head(hidden, weight, bias, compute_dtype)
    call.inputs(labels, extra)
    return call, workspace_bytes, left


def _new_head_gradients(call: Call, tensors: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias, _ = tensors
    dhidden, dweight, dbias = _empty(), _empty(), _empty()
    if needs[0]:
        dhidden = new_gradient(hidden)
        set_strided_matrix(call.args, "dhidden", dhidden.view(-1, hidden.shape[-1]))
    if needs[1]:
        dweight = new_gradient(weight)
        set_strided_matrix(call.args, "dhead", dweight)
    if needs[2] and bias is not None:
        dbias = torch.empty(bias.shape, dtype=bias.dtype)
        call.vector("dbias", dbias)
    return dhidden, dweight, dbias


def _fake_head_gradients(tensors: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        if tensor is None or not wanted:
            return tensors[0].new_empty((0,), dtype=torch.float32)
        return tensor.new_empty(tensor.shape)

    return like(tensors[0], needs[0]), like(tensors[1], needs[1]), like(tensors[2], needs[2])


def _define_linear_loss(f: str) -> None:
    name = f"linear_{f}"
    inputs = f"{_LINEAR}{_extra_schema(f)}, {_OPTIONS}, {_HEAD_OPTIONS}"

    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, budget, (keep_state, wants_metrics) = _start_linear(f, args[:4], args[4:])
        loss = _new_loss(call, args[3], call.names, call.values)
        state = _new_state(call, args[3], state_arrays(f, call.names) if keep_state else 0)
        metrics = _new_metrics(call, wants_metrics)
        call.run(FORWARD, budget)
        return loss, state, metrics

    def fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        labels = args[3]
        _, options, values, _, (_, _, keep_state, wants_metrics) = _split(f, args[4:])
        loss, metrics = _fake_loss(name, labels, options, values, wants_metrics)
        arrays = state_arrays(f, options) if keep_state else 0
        return loss, labels.new_empty((arrays, labels.numel()), dtype=torch.float32), metrics

    def value_and_grad(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        call, budget, (*needs, _, wants_metrics) = _start_linear(f, args[:4], args[4:])
        loss = _new_loss(call, args[3], call.names, call.values)
        metrics = _new_metrics(call, wants_metrics)
        gradients = _new_head_gradients(call, args[:4], needs)
        call.run(VALUE_AND_GRAD, budget)
        return loss, *gradients, metrics

    def fake_value_and_grad(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        _, options, values, _, (_, _, *needs, _, wants_metrics) = _split(f, args[4:])
        loss, metrics = _fake_loss(name, args[3], options, values, wants_metrics)
        return loss, *_fake_head_gradients(args[:4], needs), metrics

    def backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, budget, (state, *needs) = _start_linear(f, args[:4], args[4:])
        call.vector("loss_grad", grad, torch.float32)
        set_row_state(call.args, state)
        gradients = _new_head_gradients(call, args[:4], needs)
        call.run(BACKWARD, budget)
        return gradients

    def fake_backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _fake_head_gradients(args[:4], args[-3:])

    _define(name, f"({inputs}, bool keep_state, bool wants_metrics) -> (Tensor, Tensor, Tensor)", forward, fake_forward)
    _define(
        f"{name}_value_and_grad",
        f"({inputs}, {_NEEDS}, {_RESCALE}, bool wants_metrics) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        value_and_grad,
        fake_value_and_grad,
    )
    _define(
        f"{name}_backward",
        f"(Tensor grad, {inputs}, Tensor state, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
        backward,
        fake_backward,
    )


# ----------------------------------------------------------------------------------------------------- row outputs

_ROWS = "(" + ", ".join(["Tensor"] * (len(ROW_OUTPUTS) + 1)) + ")"
_ROW_GRADS = "Tensor? logp_grad, Tensor? lse_grad, Tensor? entropy_grad"


def _new_row_outputs(call: Call, labels: Tensor, outputs: str, keep_state: bool) -> tuple[Tensor, ...]:
    wanted = outputs.split(",")
    results = [
        call.new_output(name, labels.shape, dtype) if name in wanted else _empty() for name, dtype in ROW_OUTPUTS.items()
    ]
    results.append(_new_state(call, labels, (4 if "entropy" in wanted else 3) if keep_state else 0))
    return tuple(results)


def _fake_row_outputs(labels: Tensor, outputs: str, keep_state: bool) -> tuple[Tensor, ...]:
    wanted = outputs.split(",")
    results = [
        labels.new_empty(labels.shape, dtype=dtype) if name in wanted else labels.new_empty((0,), dtype=torch.float32)
        for name, dtype in ROW_OUTPUTS.items()
    ]
    arrays = (4 if "entropy" in wanted else 3) if keep_state else 0
    results.append(labels.new_empty((arrays, labels.numel()), dtype=torch.float32))
    return tuple(results)


def _row_grads(call: Call, grads: Sequence[Tensor | None], state: Tensor) -> None:
    for slot, grad in zip(("logp_grad", "lse_grad", "entropy_grad"), grads, strict=True):
        call.vector(slot, grad, torch.float32)
    set_row_state(call.args, state)


def _define_logprobs() -> None:
    inputs = f"Tensor logits, Tensor labels, {_OPTIONS}"
    in_place = inputs.replace("Tensor logits", "Tensor(a!) logits")

    def start(logits: Tensor, labels: Tensor, rest: Sequence[Any], dlogits: Tensor | None) -> Call:
        options, values, scalars = rest
        call = Call("logprobs", options, values, scalars)
        call.logits(logits, dlogits)
        call.inputs(labels, ())
        return call

    def forward(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *options, outputs, keep_state, _ = rest
        call = start(logits, labels, options, None)
        results = _new_row_outputs(call, labels, outputs, keep_state)
        call.run(FORWARD)
        return results

    def backward_into(dlogits: Tensor, grads: Sequence[Any], logits: Tensor, labels: Tensor, rest: Sequence[Any]) -> None:
        *options, state = rest
        call = start(logits, labels, options, dlogits)
        _row_grads(call, grads, state)
        call.run(BACKWARD)

    def backward(*args: Any) -> Tensor:
        logits = args[3]
        dlogits = new_gradient(logits)
        backward_into(dlogits, args[:3], logits, args[4], args[5:])
        return dlogits

    def backward_(*args: Any) -> None:
        logits = args[3]
        _check_in_place(logits)
        backward_into(logits, args[:3], logits, args[4], args[5:])

    def fake_backward(*args: Any) -> Tensor:
        return args[3].new_empty(args[3].shape)

    def fake_forward(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return _fake_row_outputs(labels, *rest[-3:-1])

    _define("logprobs", f"({inputs}, str outputs, {_KEEP}) -> {_ROWS}", forward, fake_forward)
    _define("logprobs_backward", f"({_ROW_GRADS}, {inputs}, Tensor state) -> Tensor", backward, fake_backward)
    _define(
        "logprobs_backward_", f"({_ROW_GRADS}, {in_place}, Tensor state) -> ()", backward_, lambda *args: None, ("logits",)
    )


def _define_linear_logprobs() -> None:
    inputs = f"{_LINEAR}, {_OPTIONS}, {_HEAD_OPTIONS}"

    def forward(*args: Any) -> tuple[Tensor, ...]:
        call, budget, (outputs, keep_state) = _start_linear("logprobs", args[:4], args[4:])
        results = _new_row_outputs(call, args[3], outputs, keep_state)
        call.run(FORWARD, budget)
        return results

    def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        tensors = args[3:7]
        call, budget, (state, *needs) = _start_linear("logprobs", tensors, args[7:])
        _row_grads(call, args[:3], state)
        gradients = _new_head_gradients(call, tensors, needs)
        call.run(BACKWARD, budget)
        return gradients

    def fake_forward(*args: Any) -> tuple[Tensor, ...]:
        return _fake_row_outputs(args[3], *args[-2:])

    def fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _fake_head_gradients(args[3:7], args[-3:])

    _define("linear_logprobs", f"({inputs}, str outputs, bool keep_state) -> {_ROWS}", forward, fake_forward)
    _define(
        "linear_logprobs_backward",
        f"({_ROW_GRADS}, {inputs}, Tensor state, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
        backward,
        fake_backward,
    )


for _loss in LOSSES:
    _define_loss(_loss)
    _define_linear_loss(_loss)
_define_logprobs()
_define_linear_logprobs()
