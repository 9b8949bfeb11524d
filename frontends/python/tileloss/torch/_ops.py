"""The operators ``torch.ops.tileloss.*``: one set for each function of the library, from logits and fused with the LM head.

For a loss f: f, f_value_and_grad, f_backward, and at the logits level f_backward_ and f_value_and_grad_, which write dlogits over
the logits. logprobs and linear_logprobs have a forward and a backward. All have a fake kernel for torch.compile; formulas for
autograd are in _autograd.py.

Every operator takes, after its tensors, the options as `_options.encode` makes them: ``options`` (names), ``values`` and
``scalars``. Outputs that were not asked for are empty tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss._core.slots import DIFFERENTIABLE, LOSSES
from tileloss._core.structs import BACKWARD, FORWARD, VALUE_AND_GRAD
from tileloss.torch import _ops_linear, _ops_pairs  # noqa: F401 (register)
from tileloss.torch._call import Call
from tileloss.torch._define import (
    OPTIONS,
    ROW_GRADS,
    ROWS,
    define,
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
from tileloss.torch._tensors import check_in_place, new_gradient, set_row_state


def _define_loss(f: str) -> None:
    inputs = f"Tensor logits, Tensor labels{extra_schema(f)}, {OPTIONS}"
    in_place = inputs.replace("Tensor logits", "Tensor(a!) logits")

    def start(
        logits: Tensor, labels: Tensor, rest: Sequence[Any], dlogits: Tensor | None
    ) -> tuple[Call, Sequence[Any]]:
        extra, options, values, scalars, left = split(f, rest)
        call = Call(f, options, values, scalars)
        call.logits(logits, dlogits)
        call.inputs(f, labels, extra)
        return call, left

    def forward(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        call, (keep_state, wants_metrics) = start(logits, labels, rest, None)
        loss = new_loss(call, labels)
        state = new_state(call, labels, loss_state_arrays(call.names, keep_state))
        metrics = new_metrics(call, wants_metrics)
        call.run(FORWARD)
        return loss, state, metrics

    def fake_forward(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, options, values, _, (keep_state, wants_metrics) = split(f, rest)
        loss, metrics = fake_loss(f, labels, options, values, wants_metrics)
        arrays = loss_state_arrays(options, keep_state)
        return loss, labels.new_empty((arrays, labels.numel()), dtype=torch.float32), metrics

    def value_and_grad(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        dlogits = new_gradient(logits, "dlogits")
        call, (wants_metrics,) = start(logits, labels, rest, dlogits)
        loss = new_loss(call, labels)
        metrics = new_metrics(call, wants_metrics)
        call.run(VALUE_AND_GRAD)
        return loss, dlogits, metrics

    def fake_value_and_grad(
        logits: Tensor, labels: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, options, values, _, (wants_metrics,) = split(f, rest)
        loss, metrics = fake_loss(f, labels, options, values, wants_metrics)
        return loss, logits.new_empty(logits.shape), metrics

    def value_and_grad_(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        check_in_place(logits)
        call, (wants_metrics,) = start(logits, labels, rest, logits)
        loss = new_loss(call, labels)
        metrics = new_metrics(call, wants_metrics)
        call.run(VALUE_AND_GRAD)
        return loss, metrics

    def fake_value_and_grad_(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        _, options, values, _, (wants_metrics,) = split(f, rest)
        return fake_loss(f, labels, options, values, wants_metrics)

    def backward_into(
        dlogits: Tensor, grad: Tensor, logits: Tensor, labels: Tensor, rest: Sequence[Any]
    ) -> None:
        call, (state,) = start(logits, labels, rest, dlogits)
        call.vector("loss_grad", grad)
        set_row_state(call.args, state)
        call.run(BACKWARD)

    def backward(grad: Tensor, logits: Tensor, labels: Tensor, *rest: Any) -> Tensor:
        dlogits = new_gradient(logits, "dlogits")
        backward_into(dlogits, grad, logits, labels, rest)
        return dlogits

    def backward_(grad: Tensor, logits: Tensor, labels: Tensor, *rest: Any) -> None:
        check_in_place(logits)
        backward_into(logits, grad, logits, labels, rest)

    define(
        f,
        f"({inputs}, bool keep_state, bool wants_metrics) -> (Tensor, Tensor, Tensor)",
        forward,
        fake_forward,
    )
    define(
        f"{f}_value_and_grad",
        f"({inputs}, bool wants_metrics) -> (Tensor, Tensor, Tensor)",
        value_and_grad,
        fake_value_and_grad,
    )
    define(
        f"{f}_value_and_grad_",
        f"({in_place}, bool wants_metrics) -> (Tensor, Tensor)",
        value_and_grad_,
        fake_value_and_grad_,
        ("logits",),
    )
    define(
        f"{f}_backward", f"(Tensor grad, {inputs}, Tensor state) -> Tensor", backward, _fake_dlogits
    )
    define(
        f"{f}_backward_",
        f"(Tensor grad, {in_place}, Tensor state) -> ()",
        backward_,
        lambda *args: None,
        ("logits",),
    )


def _fake_dlogits(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _define_logprobs() -> None:
    n = len(DIFFERENTIABLE)  # the upstream gradients, a backward's first arguments
    inputs = f"Tensor logits, Tensor labels, {OPTIONS}"
    in_place = inputs.replace("Tensor logits", "Tensor(a!) logits")

    def start(logits: Tensor, labels: Tensor, rest: Sequence[Any], dlogits: Tensor | None) -> Call:
        options, values, scalars = rest
        call = Call("logprobs", options, values, scalars)
        call.logits(logits, dlogits)
        call.inputs("logprobs", labels, ())
        return call

    def forward(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *options, outputs, keep_state = rest
        call = start(logits, labels, options, None)
        results = new_row_outputs(call, labels, outputs, keep_state)
        call.run(FORWARD)
        return results

    def backward_into(
        dlogits: Tensor, grads: Sequence[Any], logits: Tensor, labels: Tensor, rest: Sequence[Any]
    ) -> None:
        *options, state = rest
        call = start(logits, labels, options, dlogits)
        row_grads(call, grads, state)
        call.run(BACKWARD)

    def backward(*args: Any) -> Tensor:
        grads, (logits, labels, *rest) = args[:n], args[n:]
        dlogits = new_gradient(logits, "dlogits")
        backward_into(dlogits, grads, logits, labels, rest)
        return dlogits

    def backward_(*args: Any) -> None:
        grads, (logits, labels, *rest) = args[:n], args[n:]
        check_in_place(logits)
        backward_into(logits, grads, logits, labels, rest)

    def fake_backward(*args: Any) -> Tensor:
        return args[n].new_empty(args[n].shape)

    def fake_forward(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return fake_row_outputs(labels, *rest[-2:])

    define("logprobs", f"({inputs}, str outputs, bool keep_state) -> {ROWS}", forward, fake_forward)
    define(
        "logprobs_backward",
        f"({ROW_GRADS}, {inputs}, Tensor state) -> Tensor",
        backward,
        fake_backward,
    )
    define(
        "logprobs_backward_",
        f"({ROW_GRADS}, {in_place}, Tensor state) -> ()",
        backward_,
        lambda *args: None,
        ("logits",),
    )


for _loss in LOSSES:
    _define_loss(_loss)
_define_logprobs()
