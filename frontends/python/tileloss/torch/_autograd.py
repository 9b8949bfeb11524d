"""Formulas of autograd for the operators of _ops.py.

The forward of an operator f saves its row state (3 or 4 floats a row), from which f_backward computes the gradient at one
exponential an element. An operator f_value_and_grad has computed the gradients with the value; its backward multiplies them by
the upstream gradient, and hands them over as they are when that is 1. Double backward is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tileloss.torch import _ops as _operators  # noqa: F401 (registers)
from tileloss.torch._call import EXTRA_INPUTS
from tileloss.torch._define import LOSSES

Ctx = Any
_ops = torch.ops.tileloss

# Whether the caller passed retain_graph=True. A private name of torch 2.10 and newer; without it gradients are copied.
_keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


class _Final(torch.autograd.Function):
    """Gradients as they are, which cannot be differentiated. `sources` are what they were made of: every way back to those
    leads through here, also that of callers who take "not used" for a zero (torch.autograd.functional.hessian)."""

    @staticmethod
    def forward(ctx: Ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Ctx, *grads: Any) -> Any:
        raise RuntimeError(
            "tileloss: double backward is not supported: the gradients of these losses cannot be differentiated again"
        )


def _once(
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Runs without recording, and makes a second differentiation (create_graph=True) an error that says so."""

    @wraps(backward)
    def wrapper(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        sources = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        with torch.no_grad():
            results = backward(ctx, *grads)
        given = [r.detach().requires_grad_() for r in results if r is not None]
        final = iter(_Final.apply(len(given), *given, *sources))
        return tuple(None if r is None else next(final) for r in results)

    return wrapper


def rescaled(gradient: Tensor, upstream: Tensor, in_place: bool) -> Tensor:
    """gradient * upstream (a scalar): `gradient` itself when that is 1, over itself if the graph is not needed again.

    While AOTAutograd traces, `upstream` is of a subclass and has no value yet."""
    if not in_place or type(upstream) is not Tensor:
        return gradient * upstream  # of the gradient's type, but the factor is not rounded to it
    factor = upstream.item()
    if factor == 1:
        return gradient
    return gradient * factor if _keeps_graph() else gradient.mul_(factor)


def _nones(count: int) -> tuple[None, ...]:
    return (None,) * count


class _Saved:
    """The arguments of an operator between its forward and its backward: tensors with autograd, the rest on the context."""

    @staticmethod
    def keep(
        ctx: Ctx,
        function: str,
        tensors: Sequence[Tensor | None],
        rest: Sequence[Any],
        state: Tensor,
    ) -> None:
        n = len(EXTRA_INPUTS[function])
        extra, options, values, scalars = rest[:n], rest[n], rest[n + 1], rest[n + 2]
        ctx.save_for_backward(*tensors, *extra, scalars, state)
        ctx.num_tensors = len(tensors)
        ctx.options, ctx.values = options, values

    @staticmethod
    def restore(ctx: Ctx) -> tuple[tuple[Any, ...], tuple[Any, ...], Tensor]:
        """(tensors, extra inputs and options, row state)"""
        *inputs, scalars, state = ctx.saved_tensors
        n = ctx.num_tensors
        return tuple(inputs[:n]), (*inputs[n:], ctx.options, ctx.values, scalars), state


# ------------------------------------------------------------------------------------------------------- from logits


def _register_loss(f: str) -> None:
    num_extra = len(EXTRA_INPUTS[f])

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        _, state, metrics = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(state, metrics)
        _Saved.keep(ctx, f, inputs[:2], inputs[2:], state)
        ctx.in_place, ctx.num_inputs = inputs[num_extra + 6], len(inputs)

    def backward(ctx: Ctx, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None or not ctx.needs_input_grad[0]:
            return _nones(ctx.num_inputs)
        (logits, labels), rest, state = _Saved.restore(ctx)
        if ctx.in_place:
            dlogits = logits.detach()
            getattr(_ops, f"{f}_backward_")(grad, dlogits, labels, *rest, state)
        else:
            dlogits = getattr(_ops, f"{f}_backward")(grad, logits, labels, *rest, state)
        return dlogits, *_nones(ctx.num_inputs - 1)

    def setup_value_and_grad(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        _, dlogits, metrics = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(dlogits, metrics)
        ctx.save_for_backward(dlogits)
        ctx.in_place, ctx.num_inputs = inputs[num_extra + 5], len(inputs)

    def backward_value_and_grad(
        ctx: Ctx, grad: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return _nones(ctx.num_inputs)
        (dlogits,) = saved_gradients(ctx)
        return rescaled(dlogits, grad, ctx.in_place), *_nones(ctx.num_inputs - 1)

    _register(f, setup, backward)
    _register(f"{f}_value_and_grad", setup_value_and_grad, backward_value_and_grad)


def saved_gradients(ctx: Ctx) -> tuple[Tensor, ...]:
    try:
        return tuple(ctx.saved_tensors)
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise RuntimeError(
            "tileloss: the gradients that the forward computed were handed over by an earlier backward and have been changed "
            "since; call with grad_in_forward=False to go through the graph twice"
        ) from error


class InPlaceLoss(torch.autograd.Function):
    """f_value_and_grad_: the loss, with dlogits over the logits. An operator that writes its input can have no formula of
    its own, hence this class; under torch.compile the functional operator stands in."""

    @staticmethod
    def forward(
        ctx: Ctx, logits: Tensor, function: str, rest: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        dlogits = logits.detach()
        loss, metrics = getattr(_ops, f"{function}_value_and_grad_")(dlogits, *rest)
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dlogits)
        return loss, metrics

    @staticmethod
    def backward(ctx: Ctx, *grads: Any) -> Any:
        return _backward_in_place(ctx, *grads)


@_once
def _backward_in_place(ctx: Ctx, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    (dlogits,) = saved_gradients(ctx)
    return rescaled(dlogits, grad, True), None, None


# ---------------------------------------------------------------------------------------------- fused with the LM head


def _head_gradients(ctx: Ctx, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return tuple(
        g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False)
    )


def _register_linear_loss(f: str) -> None:
    num_extra = len(EXTRA_INPUTS[f])
    name = f"linear_{f}"

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        _, state, metrics = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(state, metrics)
        _Saved.keep(ctx, f, inputs[:4], inputs[4:], state)
        ctx.head_options, ctx.num_inputs = inputs[num_extra + 7 : num_extra + 9], len(inputs)

    def backward(ctx: Ctx, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return _nones(ctx.num_inputs)
        tensors, rest, state = _Saved.restore(ctx)
        needs = ctx.needs_input_grad[:3]
        gradients = getattr(_ops, f"{name}_backward")(
            grad, *tensors, *rest, *ctx.head_options, state, *needs
        )
        return *_head_gradients(ctx, gradients), *_nones(ctx.num_inputs - 3)

    def setup_value_and_grad(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        _, *gradients, metrics = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*gradients, metrics)
        ctx.save_for_backward(*gradients)
        ctx.in_place, ctx.num_inputs = inputs[num_extra + 12], len(inputs)

    def backward_value_and_grad(
        ctx: Ctx, grad: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return _nones(ctx.num_inputs)
        gradients = [rescaled(g, grad, ctx.in_place) for g in saved_gradients(ctx)]
        return *_head_gradients(ctx, gradients), *_nones(ctx.num_inputs - 3)

    _register(name, setup, backward)
    _register(f"{name}_value_and_grad", setup_value_and_grad, backward_value_and_grad)


# ------------------------------------------------------------------------------------------------------ row outputs


def _register_logprobs() -> None:
    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        *outputs, state = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[3:], state)
        _Saved.keep(ctx, "logprobs", inputs[:2], inputs[2:], state)
        ctx.in_place, ctx.num_inputs = inputs[7], len(inputs)

    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = grads[:3]
        if all(g is None for g in upstream):
            return _nones(ctx.num_inputs)
        (logits, labels), rest, state = _Saved.restore(ctx)
        if ctx.in_place:
            dlogits = logits.detach()
            _ops.logprobs_backward_(*upstream, dlogits, labels, *rest, state)
        else:
            dlogits = _ops.logprobs_backward(*upstream, logits, labels, *rest, state)
        return dlogits, *_nones(ctx.num_inputs - 1)

    _register("logprobs", setup, backward)


def _register_linear_logprobs() -> None:
    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        *outputs, state = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[3:], state)
        _Saved.keep(ctx, "logprobs", inputs[:4], inputs[4:], state)
        ctx.head_options, ctx.num_inputs = inputs[7:9], len(inputs)

    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = grads[:3]
        if all(g is None for g in upstream):
            return _nones(ctx.num_inputs)
        tensors, rest, state = _Saved.restore(ctx)
        needs = ctx.needs_input_grad[:3]
        gradients = _ops.linear_logprobs_backward(
            *upstream, *tensors, *rest, *ctx.head_options, state, *needs
        )
        return *_head_gradients(ctx, gradients), *_nones(ctx.num_inputs - 3)

    _register("linear_logprobs", setup, backward)


def _register(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    torch.library.register_autograd(f"tileloss::{name}", _once(backward), setup_context=setup)


for _loss in LOSSES:
    _register_loss(_loss)
    _register_linear_loss(_loss)
_register_logprobs()
_register_linear_logprobs()
