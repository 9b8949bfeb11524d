"""The operators of losses that are told more of a row than its label (slots.WANTED: a teacher's logits, some of its columns,
class probabilities): f, f_value_and_grad, f_backward, and those that write dlogits over the logits, f_value_and_grad_ and
f_backward_; and with the LM head linear_f, linear_f_value_and_grad and linear_f_backward. Row outputs that were not asked for are
empty tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss._core.functions import FUNCTIONS
from tileloss._core.options import is_per_row
from tileloss._core.slots import LINEAR_WANTED, ROW_OUTPUT, WANTED, names_of
from tileloss._core.structs import BACKWARD, FORWARD, VALUE_AND_GRAD
from tileloss.torch._call import Call
from tileloss.torch._define import OPTIONS, define, empty, extra_schema, split
from tileloss.torch._ops_linear import fake_head_gradients, new_head_gradients
from tileloss.torch._tensors import SLOT_DTYPES, check_in_place, new_gradient

OUTPUTS = {f: names_of(ROW_OUTPUT, f) for f in WANTED}


def _rows(f: str) -> str:
    return ", ".join(["Tensor"] * len(OUTPUTS[f]))


def _schema(names: Sequence[str]) -> str:
    return ", ".join(f"Tensor{'?' * name.endswith('bias')} {name}" for name in names)


def _new_results(f: str, call: Call, rows: torch.Size, outputs: str) -> list[Tensor]:
    """The loss and the row outputs, of rows that lie so."""
    wanted = outputs.split(",")
    loss = call.new_output(
        "loss", rows if is_per_row(call.function, call.names, call.values) else ()
    )
    found = [call.new_output(n, rows) if n in wanted else empty() for n in OUTPUTS[f]]
    return [loss, *found]


def _fake_results(
    f: str, name: str, like: Tensor, options: str, values: Sequence[float], outputs: str
) -> list[Tensor]:
    rows, wanted = like.shape[:-1], outputs.split(",")
    per_row = is_per_row(FUNCTIONS[name], options, values)
    loss = like.new_empty(rows if per_row else (), dtype=torch.float32)
    found = [
        like.new_empty(rows, dtype=SLOT_DTYPES[n])
        if n in wanted
        else like.new_empty((0,), dtype=torch.float32)
        for n in OUTPUTS[f]
    ]
    return [loss, *found]


def _define_pair(f: str) -> None:
    slots, rows_schema = WANTED[f], _rows(f)
    n = 2 + len(slots)
    inputs = f"Tensor logits, {_schema(slots)}, Tensor? labels{extra_schema(f)}, {OPTIONS}"
    in_place = inputs.replace("Tensor logits", "Tensor(a!) logits")

    def start(inputs: Sequence[Any], dlogits: Tensor | None) -> tuple[Call, Sequence[Any]]:
        logits, *wanted, labels = inputs[:n]
        extra, options, values, scalars, left = split(f, inputs[n:])
        call = Call(f, options, values, scalars)
        call.logits(logits, dlogits)
        call.wanted(slots, wanted)
        call.inputs(f, labels, extra)
        return call, left

    def results(call: Call, logits: Tensor, outputs: str) -> list[Tensor]:
        return _new_results(f, call, logits.shape[:-1], outputs)

    def fake_results(inputs: Sequence[Any]) -> list[Tensor]:
        _, options, values, _, (outputs,) = split(f, inputs[n:])
        return _fake_results(f, f, inputs[0], options, values, outputs)

    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        call, (outputs,) = start(inputs, None)
        found = results(call, inputs[0], outputs)
        call.run(FORWARD)
        return tuple(found)

    def value_and_grad(*inputs: Any) -> tuple[Tensor, ...]:
        dlogits = new_gradient(inputs[0], "dlogits")
        call, (outputs,) = start(inputs, dlogits)
        loss, *rows = results(call, inputs[0], outputs)
        call.run(VALUE_AND_GRAD)
        return loss, dlogits, *rows

    def fake_value_and_grad(*inputs: Any) -> tuple[Tensor, ...]:
        loss, *rows = fake_results(inputs)
        return loss, inputs[0].new_empty(inputs[0].shape), *rows

    def value_and_grad_(*inputs: Any) -> tuple[Tensor, ...]:
        check_in_place(inputs[0])
        call, (outputs,) = start(inputs, inputs[0])
        found = results(call, inputs[0], outputs)
        call.run(VALUE_AND_GRAD)
        return tuple(found)

    def backward_into(dlogits: Tensor, grad: Tensor, inputs: Sequence[Any]) -> None:
        call, _ = start(inputs, dlogits)
        call.vector("loss_grad", grad)
        call.run(BACKWARD)

    def backward(grad: Tensor, *inputs: Any) -> Tensor:
        dlogits = new_gradient(inputs[0], "dlogits")
        backward_into(dlogits, grad, inputs)
        return dlogits

    def backward_(grad: Tensor, *inputs: Any) -> None:
        check_in_place(inputs[0])
        backward_into(inputs[0], grad, inputs)

    def fake_backward(grad: Tensor, *inputs: Any) -> Tensor:
        return torch.empty_like(inputs[0], memory_format=torch.contiguous_format)

    define(
        f,
        f"({inputs}, str outputs) -> (Tensor, {rows_schema})",
        forward,
        lambda *inputs: tuple(fake_results(inputs)),
    )
    define(
        f"{f}_value_and_grad",
        f"({inputs}, str outputs) -> (Tensor, Tensor, {rows_schema})",
        value_and_grad,
        fake_value_and_grad,
    )
    define(
        f"{f}_value_and_grad_",
        f"({in_place}, str outputs) -> (Tensor, {rows_schema})",
        value_and_grad_,
        lambda *inputs: tuple(fake_results(inputs)),
        ("logits",),
    )
    define(f"{f}_backward", f"(Tensor grad, {inputs}) -> Tensor", backward, fake_backward)
    define(
        f"{f}_backward_",
        f"(Tensor grad, {in_place}) -> ()",
        backward_,
        lambda *args: None,
        ("logits",),
    )


def _define_linear_pair(f: str) -> None:
    name, slots, rows_schema = f"linear_{f}", LINEAR_WANTED[f], _rows(f)
    n = 4 + len(slots)
    inputs = (
        f"Tensor hidden, Tensor head, Tensor? bias, {_schema(slots)}, "
        f"Tensor? labels{extra_schema(f)}, {OPTIONS}, int compute_dtype, int workspace_bytes"
    )
    needs = "bool needs_hidden, bool needs_head, bool needs_bias"

    def start(inputs: Sequence[Any]) -> tuple[Call, int, Sequence[Any]]:
        hidden, head, bias, *wanted, labels = inputs[:n]
        extra, options, values, scalars, left = split(f, inputs[n:])
        compute_dtype, workspace_bytes, *left = left
        call = Call(name, options, values, scalars)
        call.head(hidden, head, bias, compute_dtype)
        if "teacher_head" in slots:
            call.teacher_head(*wanted)
        else:
            call.wanted(slots, wanted)
        call.inputs(f, labels, extra)
        return call, workspace_bytes, left

    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        call, budget, (outputs,) = start(inputs)
        found = _new_results(f, call, inputs[0].shape[:-1], outputs)
        call.run(FORWARD, budget)
        return tuple(found)

    def fake_forward(*inputs: Any) -> tuple[Tensor, ...]:
        _, options, values, _, (_, _, outputs) = split(f, inputs[n:])
        return tuple(_fake_results(f, name, inputs[0], options, values, outputs))

    def value_and_grad(*inputs: Any) -> tuple[Tensor, ...]:
        call, budget, (*needs, outputs) = start(inputs)
        loss, *rows = _new_results(f, call, inputs[0].shape[:-1], outputs)
        gradients = new_head_gradients(call, inputs[:3], needs)
        call.run(VALUE_AND_GRAD, budget)
        return loss, *gradients, *rows

    def fake_value_and_grad(*inputs: Any) -> tuple[Tensor, ...]:
        _, options, values, _, (_, _, *needs, outputs) = split(f, inputs[n:])
        loss, *rows = _fake_results(f, name, inputs[0], options, values, outputs)
        return loss, *fake_head_gradients(inputs[:3], needs), *rows

    def backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, budget, needs = start(inputs)
        call.vector("loss_grad", grad)
        gradients = new_head_gradients(call, inputs[:3], needs)
        call.run(BACKWARD, budget)
        return gradients

    define(name, f"({inputs}, str outputs) -> (Tensor, {rows_schema})", forward, fake_forward)
    define(
        f"{name}_value_and_grad",
        f"({inputs}, {needs}, str outputs) -> (Tensor, Tensor, Tensor, Tensor, {rows_schema})",
        value_and_grad,
        fake_value_and_grad,
    )
    define(
        f"{name}_backward",
        f"(Tensor grad, {inputs}, {needs}) -> (Tensor, Tensor, Tensor)",
        backward,
        lambda grad, *inputs: fake_head_gradients(inputs[:3], inputs[-3:]),
    )


for _f in WANTED:
    _define_pair(_f)
    _define_linear_pair(_f)
