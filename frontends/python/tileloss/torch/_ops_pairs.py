"""The operators of losses over a student's logits and a teacher's: f, f_value_and_grad, f_backward, and those that write dlogits
over the student's logits, f_value_and_grad_ and f_backward_. Row outputs that were not asked for are empty tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss._core.functions import FUNCTIONS
from tileloss._core.options import is_per_row
from tileloss._core.slots import PAIR_OUTPUTS, PAIRS
from tileloss._core.structs import BACKWARD, FORWARD, VALUE_AND_GRAD
from tileloss.torch._call import Call
from tileloss.torch._define import OPTIONS, define, empty, extra_schema, split
from tileloss.torch._tensors import SLOT_DTYPES, check_in_place, new_gradient, set_teacher

_ROWS = ", ".join(["Tensor"] * len(PAIR_OUTPUTS))


def _define_pair(f: str) -> None:
    inputs = f"Tensor logits, Tensor teacher, Tensor? labels{extra_schema(f)}, {OPTIONS}"
    in_place = inputs.replace("Tensor logits", "Tensor(a!) logits")

    def start(inputs: Sequence[Any], dlogits: Tensor | None) -> tuple[Call, Sequence[Any]]:
        logits, teacher, labels, *rest = inputs
        extra, options, values, scalars, left = split(f, rest)
        call = Call(f, options, values, scalars)
        call.logits(logits, dlogits)
        call.alive.append(set_teacher(call.args, teacher))
        call.inputs(f, labels, extra)
        return call, left

    def results(call: Call, logits: Tensor, outputs: str) -> list[Tensor]:
        rows, wanted = logits.shape[:-1], outputs.split(",")
        loss = call.new_output(
            "loss", rows if is_per_row(call.function, call.names, call.values) else ()
        )
        found = [call.new_output(n, rows) if n in wanted else empty() for n in PAIR_OUTPUTS]
        return [loss, *found]

    def fake_results(inputs: Sequence[Any]) -> list[Tensor]:
        logits, _, _, *rest = inputs
        _, options, values, _, (outputs,) = split(f, rest)
        rows, wanted = logits.shape[:-1], outputs.split(",")
        per_row = is_per_row(FUNCTIONS[f], options, values)
        loss = logits.new_empty(rows if per_row else (), dtype=torch.float32)
        found = [
            logits.new_empty(rows, dtype=SLOT_DTYPES[n])
            if n in wanted
            else logits.new_empty((0,), dtype=torch.float32)
            for n in PAIR_OUTPUTS
        ]
        return [loss, *found]

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
        f"({inputs}, str outputs) -> (Tensor, {_ROWS})",
        forward,
        lambda *inputs: tuple(fake_results(inputs)),
    )
    define(
        f"{f}_value_and_grad",
        f"({inputs}, str outputs) -> (Tensor, Tensor, {_ROWS})",
        value_and_grad,
        fake_value_and_grad,
    )
    define(
        f"{f}_value_and_grad_",
        f"({in_place}, str outputs) -> (Tensor, {_ROWS})",
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


for _pair in PAIRS:
    _define_pair(_pair)
