"""Formulas of autograd for the operators of _ops.py.

The forward of an operator f saves its row state (3 or 4 floats a row), from which f_backward computes the gradient at one
exponential an element. An operator f_value_and_grad has computed the gradients with the value; its backward multiplies them by
the upstream gradient, in place, and hands them over as they are when that is 1; while the graph is retained it gives copies.
Double backward is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tileloss._core.slots import DIFFERENTIABLE, INPUTS, LINEAR_WANTED, LOSSES, WANTED
from tileloss.torch import _ops as _operators  # noqa: F401 (registers)
from tileloss.torch._define import is_batched, is_traced, run
from tileloss.torch._tensors import refuse_duals

Ctx = Any
Gradients = tuple[Tensor | None, ...]  # of the first inputs; the others have none
Setup = Callable[[Ctx, Sequence[Any], Any], None]
Backward = Callable[..., Gradients]
_ops = torch.ops.tileloss
_UPSTREAM = len(DIFFERENTIABLE)  # gradients that a backward of row outputs is given

# Whether the caller passed retain_graph=True. A private name of torch 2.10 and newer; without it gradients are copied.
_keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)

_NO_SECOND = "tileloss: double backward is not supported: the gradients of these losses cannot be differentiated again"


class _Final(torch.autograd.Function):
    """Gradients as they are, which cannot be differentiated. `sources` are what they were made of: every way back to those
    leads through here, also that of callers who take "not used" for a zero (torch.autograd.functional.hessian)."""

    @staticmethod
    def forward(ctx: Ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        # An input as it is would be a view, which the caller could not change in place.
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Ctx, *grads: Any) -> Any:
        raise RuntimeError(_NO_SECOND)


def once(backward: Backward) -> Backward:
    """Runs without recording, and makes a second differentiation (create_graph=True) an error that says so. What is saved has
    to lead back to every input that may ask for a gradient: it is that input, or an output of the same function."""

    @wraps(backward)
    def wrapper(ctx: Ctx, *grads: Tensor | None) -> Gradients:
        refuse_duals(*grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if is_batched():  # torch takes the batch apart below autograd, where the way back is lost
            raise RuntimeError(f"{_NO_SECOND}; call without create_graph=True or is_grads_batched")
        sources = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        with torch.no_grad():
            results = backward(ctx, *grads)
        given = [r for r in results if r is not None]
        final = iter(_Final.apply(len(given), *given, *sources))
        return tuple(None if r is None else next(final) for r in results)

    return wrapper


def rescaled(gradient: Tensor, upstream: Tensor, in_place: bool) -> Tensor:
    """gradient * upstream (a scalar). When the graph is not needed again: `gradient` itself, written over unless the factor is 1.
    A graph that is kept never gives its own tensor away: the caller may change what he got, and a later backward would.

    While somebody traces (compiled autograd, fake tensors) `upstream` has no value yet; of a batch (is_grads_batched) it has
    several."""
    if not in_place or is_traced() or type(upstream) is not Tensor or is_batched():
        return gradient * upstream  # of the gradient's type, but the factor is not rounded to it
    if _keeps_graph():
        return gradient * upstream.item()
    factor = upstream.item()
    return gradient if factor == 1 else gradient.mul_(factor)


class _Saved:
    """The arguments of an operator between its forward and its backward: tensors with autograd, the rest on the context."""

    @staticmethod
    def keep(
        ctx: Ctx,
        function: str,
        tensors: Sequence[Tensor | None],
        rest: Sequence[Any],
        state: Tensor | None,  # a pair of rows has none
    ) -> None:
        n = len(INPUTS[function])
        extra, options, values, scalars = rest[:n], rest[n], rest[n + 1], rest[n + 2]
        ctx.save_for_backward(*tensors, *extra, scalars, state)
        ctx.num_tensors = len(tensors)
        ctx.options, ctx.values = options, values

    @staticmethod
    def restore(ctx: Ctx) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """(tensors, extra inputs and options, row state)"""
        *inputs, scalars, state = ctx.saved_tensors
        n = ctx.num_tensors
        return tuple(inputs[:n]), (*inputs[n:], ctx.options, ctx.values, scalars), state


def _never_in_place(setup: Setup) -> Setup:
    """What torch.compile plans is never written in place."""

    def wrapper(ctx: Ctx, inputs: Sequence[Any], output: Any) -> None:
        ctx.set_materialize_grads(False)
        setup(ctx, inputs, output)
        ctx.in_place, ctx.num_inputs = False, len(inputs)

    return wrapper


def _padded(backward: Backward) -> Backward:
    def wrapper(ctx: Ctx, *grads: Tensor | None) -> Gradients:
        gradients = backward(ctx, *grads)
        return *gradients, *(None,) * (ctx.num_inputs - len(gradients))

    return wrapper


_functions: dict[str, type[torch.autograd.Function]] = {}


def _define_function(name: str, setup: Setup, backward: Backward) -> None:
    """A torch.autograd.Function around the operator ``name``, for eager calls. Its last input is whether the backward may
    write in place."""

    def forward(ctx: Ctx, *inputs: Any) -> Any:
        output = run(name, *inputs[:-1])
        ctx.set_materialize_grads(False)
        setup(ctx, inputs[:-1], output)
        ctx.in_place, ctx.num_inputs = inputs[-1], len(inputs)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(_padded(once(backward)))}
    _functions[name] = type(f"tileloss_{name}", (torch.autograd.Function,), methods)


def _register_operator(name: str, setup: Setup, backward: Backward) -> None:
    """The same formula for the operator itself, as torch.compile sees it."""
    torch.library.register_autograd(
        f"tileloss::{name}", _padded(once(backward)), setup_context=_never_in_place(setup)
    )


def _register(name: str, setup: Setup, backward: Backward) -> None:
    _register_operator(name, setup, backward)
    _define_function(name, setup, backward)


def _register_one_pass(name: str, count: int) -> None:
    """An operator that gives a loss, the gradients of its first ``count`` inputs, and numbers that have none; at the logits level
    also the one that writes its gradient over the logits."""

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        # The gradients pass for outputs with a gradient, which nobody is given: so they lead back (see once) without an input
        # that lives on for it.
        ctx.mark_non_differentiable(*output[1 + count :])
        ctx.save_for_backward(*output[1 : 1 + count])

    def setup_operator(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        # The inputs lead back; a compiled backward, which reads none of them, does not keep them.
        ctx.save_for_backward(*output[1 : 1 + count], *inputs[:count])

    def setup_in_place(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Ctx, grad: Tensor | None, *_: Any) -> Gradients:
        return _hand_over(ctx, grad, count)

    _define_function(name, setup, backward)
    _register_operator(name, setup_operator, backward)
    if count == 1:
        # An operator that writes its input can have no formula of its own; torch.compile gets the functional one.
        _define_function(f"{name}_", setup_in_place, backward)


def _hand_over(ctx: Ctx, grad: Tensor | None, count: int) -> Gradients:
    """The gradients that a forward computed."""
    if grad is None:
        return ()
    try:
        gradients = ctx.saved_tensors[:count]
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise RuntimeError(
            "tileloss: the gradients that the forward computed (with inplace_backward they lie where the logits were) have been "
            "changed by an inplace operation before the backward; call without inplace_backward"
        ) from error
    needed = zip(gradients, ctx.needs_input_grad, strict=False)
    return tuple(rescaled(g.detach(), grad, ctx.in_place) if needs else None for g, needs in needed)


def apply(name: str, inputs: Sequence[Any], wants_grad: bool, in_place: bool) -> Any:
    """The operator ``name``, with autograd where that is asked for. ``in_place``: whether its backward may write over its
    inputs, or over the gradients that its forward computed; not so where torch plans memory itself."""
    if is_traced():
        return getattr(_ops, name)(*inputs)
    return _functions[name].apply(*inputs, in_place) if wants_grad else run(name, *inputs)


# ------------------------------------------------------------------------------------------------------- from logits


def _register_loss(f: str) -> None:
    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        _, state, metrics = output
        ctx.mark_non_differentiable(state, metrics)
        _Saved.keep(ctx, f, inputs[:2], inputs[2:], state)

    def backward(ctx: Ctx, grad: Tensor | None, *_: Any) -> Gradients:
        if grad is None or not ctx.needs_input_grad[0]:
            return ()
        (logits, labels), rest, state = _Saved.restore(ctx)
        if ctx.in_place:
            dlogits = logits.detach()
            run(f"{f}_backward_", grad, dlogits, labels, *rest, state)
            return (dlogits,)
        return (run(f"{f}_backward", grad, logits, labels, *rest, state),)

    _register(f, setup, backward)
    _register_one_pass(f"{f}_value_and_grad", 1)


# ------------------------------------------------------------------------------ from logits and what is wanted of them


def _register_pair(f: str) -> None:
    n = 2 + len(WANTED[f])

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _Saved.keep(ctx, f, inputs[:n], inputs[n:], None)

    def backward(ctx: Ctx, grad: Tensor | None, *_: Any) -> Gradients:
        if grad is None or not ctx.needs_input_grad[0]:
            return ()
        (logits, *others), rest, _ = _Saved.restore(ctx)
        if ctx.in_place:
            dlogits = logits.detach()
            run(f"{f}_backward_", grad, dlogits, *others, *rest)
            return (dlogits,)
        return (run(f"{f}_backward", grad, logits, *others, *rest),)

    _register(f, setup, backward)
    _register_one_pass(f"{f}_value_and_grad", 1)


# ---------------------------------------------------------------------------------------------- fused with the LM head


def _head_gradients(ctx: Ctx, gradients: Sequence[Tensor]) -> Gradients:
    needed = zip(gradients, ctx.needs_input_grad, strict=False)
    return tuple(g if needs else None for g, needs in needed)


def _register_linear_loss(f: str) -> None:
    num_extra = len(INPUTS[f])
    name = f"linear_{f}"

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        _, state, metrics = output
        ctx.mark_non_differentiable(state, metrics)
        _Saved.keep(ctx, f, inputs[:4], inputs[4:], state)
        ctx.head_options = inputs[num_extra + 7 : num_extra + 9]

    def backward(ctx: Ctx, grad: Tensor | None, *_: Any) -> Gradients:
        if grad is None:
            return ()
        tensors, rest, state = _Saved.restore(ctx)
        needs = ctx.needs_input_grad[:3]
        gradients = run(f"{name}_backward", grad, *tensors, *rest, *ctx.head_options, state, *needs)
        return _head_gradients(ctx, gradients)

    _register(name, setup, backward)
    _register_one_pass(f"{name}_value_and_grad", 3)


def _register_linear_pair(f: str) -> None:
    name, n = f"linear_{f}", 4 + len(LINEAR_WANTED[f])
    first_option = n + len(INPUTS[f]) + 3

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _Saved.keep(ctx, f, inputs[:n], inputs[n:], None)
        ctx.head_options = inputs[first_option : first_option + 2]

    def backward(ctx: Ctx, grad: Tensor | None, *_: Any) -> Gradients:
        if grad is None:
            return ()
        tensors, rest, _ = _Saved.restore(ctx)
        needs = ctx.needs_input_grad[:3]
        gradients = run(f"{name}_backward", grad, *tensors, *rest, *ctx.head_options, *needs)
        return _head_gradients(ctx, gradients)

    _register(name, setup, backward)
    _register_one_pass(f"{name}_value_and_grad", 3)


# ------------------------------------------------------------------------------------------------------ row outputs


def _register_logprobs() -> None:
    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        *outputs, state = output
        ctx.mark_non_differentiable(*outputs[_UPSTREAM:], state)
        _Saved.keep(ctx, "logprobs", inputs[:2], inputs[2:], state)

    def backward(ctx: Ctx, *grads: Tensor | None) -> Gradients:
        upstream = grads[:_UPSTREAM]
        if all(g is None for g in upstream):
            return ()
        (logits, labels), rest, state = _Saved.restore(ctx)
        if ctx.in_place:
            dlogits = logits.detach()
            run("logprobs_backward_", *upstream, dlogits, labels, *rest, state)
            return (dlogits,)
        return (run("logprobs_backward", *upstream, logits, labels, *rest, state),)

    _register("logprobs", setup, backward)


def _register_linear_logprobs() -> None:
    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        *outputs, state = output
        ctx.mark_non_differentiable(*outputs[_UPSTREAM:], state)
        _Saved.keep(ctx, "logprobs", inputs[:4], inputs[4:], state)
        ctx.head_options = inputs[7:9]

    def backward(ctx: Ctx, *grads: Tensor | None) -> Gradients:
        upstream = grads[:_UPSTREAM]
        if all(g is None for g in upstream):
            return ()
        tensors, rest, state = _Saved.restore(ctx)
        needs = ctx.needs_input_grad[:3]
        gradients = run(
            "linear_logprobs_backward", *upstream, *tensors, *rest, *ctx.head_options, state, *needs
        )
        return _head_gradients(ctx, gradients)

    _register("linear_logprobs", setup, backward)


for _loss in LOSSES:
    _register_loss(_loss)
    _register_linear_loss(_loss)
for _f in WANTED:
    _register_pair(_f)
    _register_linear_pair(_f)
_register_logprobs()
_register_linear_logprobs()
