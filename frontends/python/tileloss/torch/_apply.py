"""The operators' formulas of autograd.

The forward of an operator f saves its row state (3 or 4 floats a row), from which f_backward computes the gradient at one
exponential an element. An operator f_value_and_grad has computed the gradients with the value; its backward multiplies them by
the upstream gradient, in place, and gives them as they are when that is 1; while the graph is retained it gives copies. The
backward of an operator f_adding adds the head's gradient to a tensor of the caller's. Double backward is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileloss.torch._arguments import refuse_duals
from tileloss.torch._call import scale_gradient
from tileloss.torch._operators import (
    HEAD,
    OPERATORS,
    Operators,
    is_batched,
    is_traced,
    run,
)

Ctx = Any
Gradients = tuple[Tensor | None, ...]  # of the first inputs; the others have none
Setup = Callable[[Ctx, Sequence[Any], Any], None]
Backward = Callable[..., Gradients]

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
        if forward_ad._current_level >= 0:
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
    several. At a factor on a GPU the GPU looks, as the host would wait for it."""
    if not in_place or is_traced() or type(upstream) is not Tensor or is_batched():
        return _times(gradient, upstream)
    if upstream.is_cpu:
        factor = upstream.item()
        if _keeps_graph():
            return gradient * factor
        return gradient if factor == 1 else gradient.mul_(factor)
    gradient = gradient.clone() if _keeps_graph() else gradient
    scale_gradient(gradient, upstream)
    return gradient


def _times(gradient: Tensor, upstream: Tensor) -> Tensor:
    """Of the gradient's type, rounded once. On a GPU a factor without dimensions would first be rounded to that type, where 1/3
    has eight bits and a loss scale of 65536 is inf: with a dimension it counts as float32."""
    if upstream.is_cpu:
        return gradient * upstream
    return (gradient * upstream.reshape(1)).to(gradient.dtype)


def _never_in_place(setup: Setup) -> Setup:
    """What torch.compile plans is never written in place."""

    def wrapper(ctx: Ctx, inputs: Sequence[Any], output: Any) -> None:
        ctx.set_materialize_grads(False)
        setup(ctx, inputs, output)
        ctx.in_place, ctx.num_inputs = False, len(inputs)

    return wrapper


def padded(backward: Backward) -> Backward:
    """With None for the inputs behind those that the backward has gradients of."""

    def wrapper(ctx: Ctx, *grads: Tensor | None) -> Gradients:
        gradients = backward(ctx, *grads)
        return *gradients, *(None,) * (ctx.num_inputs - len(gradients))

    return wrapper


# By operator.
FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}


def _define_function(name: str, setup: Setup, backward: Backward, unseen: int = 0) -> None:
    """A torch.autograd.Function around the operator ``name``, for eager calls. Its inputs are the matrices, the operator's others
    as one, whether the backward may write over them, or over the gradients that the forward computed, and what is kept of calls
    like this one. ``unseen``: how many of the operator's last results are for the backward alone."""

    def forward(ctx: Ctx, *arguments: Any) -> Any:
        *matrices, others, ctx.in_place, alike = arguments
        ctx.num_inputs, inputs = len(arguments), (*matrices, *others)
        output = run(name, inputs, alike)
        ctx.set_materialize_grads(False)
        setup(ctx, inputs, output)
        if unseen:
            output = output[:-unseen] if len(output) > unseen + 1 else output[0]
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(padded(once(backward)))}
    FUNCTIONS[name] = type(f"tileloss_{name}", (torch.autograd.Function,), methods)


def _register_operator(name: str, setup: Setup, backward: Backward) -> None:
    """The same formula for the operator itself, as torch.compile sees it."""
    torch.library.register_autograd(
        f"tileloss::{name}", padded(once(backward)), setup_context=_never_in_place(setup)
    )


def _register_two_passes(op: Operators, adds: bool = False) -> None:
    """f, whose backward is an operator of its own; f_adding, whose backward ``adds``."""
    name, count, end = f"{op.name}_backward", len(op.upstream), op.num_tensors

    def save(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        state = output[-1] if op.has_state else None
        ctx.save_for_backward(*inputs[:end], inputs[end + 2], state)
        ctx.options, ctx.head_options = inputs[end : end + 2], inputs[end + 3 : op.end]
        # Not saved with the others: other calls may add to it before this one's backward does.
        ctx.head_grad = inputs[-1] if adds else None

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        if others := [t for t in output[count : len(op.results)] if t is not None]:
            ctx.mark_non_differentiable(*others)
        save(ctx, inputs, output)

    def setup_operator(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.mark_non_differentiable(*output[count:])
        save(ctx, inputs, output)

    def backward(ctx: Ctx, *grads: Tensor | None) -> Gradients:
        upstream, needs = grads[:count], ctx.needs_input_grad
        if upstream[0] is None and all(g is None for g in upstream):
            return ()
        first, *tensors, scalars, state = ctx.saved_tensors
        rest = (*tensors, *ctx.options, scalars, *ctx.head_options)
        if op.has_state:
            rest = (*rest, state)
        if op.is_linear:
            if adds and needs[HEAD]:
                return add_head_gradient((*upstream, first, *rest), needs, ctx.head_grad)
            asked = [name for name, need in zip(op.gradients, needs, strict=False) if need]
            found = run(name, (*upstream, first, *rest, ",".join(asked)))
            return tuple([g if need else None for g, need in zip(found, needs, strict=False)])
        if not needs[0]:
            return ()
        if ctx.in_place:
            first = first.detach()
            run(f"{name}_", (*upstream, first, *rest, "dlogits"))
            return (first,)
        return (run(name, (*upstream, first, *rest, "dlogits")),)

    def add_head_gradient(
        arguments: Sequence[Any], needs: Sequence[bool], head_grad: Tensor
    ) -> Gradients:
        if is_batched():
            raise RuntimeError(
                "linear_weight_grad: expected one backward at a time, as it adds to that tensor, got is_grads_batched=True"
            )
        needs = [need and place != HEAD for place, need in enumerate(needs[: op.num_matrices])]
        asked = [name for name, need in zip(op.gradients, needs, strict=True) if need]
        found = run(f"{name}_", (*arguments, ",".join(asked), head_grad))
        return tuple(g if need else None for g, need in zip(found, needs, strict=True))

    forward = f"{op.name}_adding" if adds else op.name
    _register_operator(forward, setup_operator, backward)
    _define_function(forward, setup, backward, unseen=int(op.has_state))


def _register_one_pass(op: Operators) -> None:
    """f_value_and_grad; at the logits level also the one that writes its gradient over the logits."""
    name, count = f"{op.name}_value_and_grad", op.num_matrices

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        # The gradients pass for outputs with a gradient, which nobody is given: so they lead back (see once) without an input
        # that lives on for it.
        ctx.mark_non_differentiable(*[t for t in output[1 + count :] if t is not None])
        ctx.save_for_backward(*output[1 : 1 + count])

    def setup_operator(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        # The inputs lead back; a compiled backward, which reads none of them, does not keep them.
        ctx.save_for_backward(*output[1 : 1 + count], *inputs[:count])

    def setup_in_place(ctx: Ctx, inputs: Sequence[Any], output: Tensor | Sequence[Tensor]) -> None:
        if not isinstance(output, Tensor):
            ctx.mark_non_differentiable(*[t for t in output[1:] if t is not None])
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Ctx, grad: Tensor | None, *_: Any) -> Gradients:
        return _scaled(ctx, grad, count)

    _define_function(name, setup, backward)
    _register_operator(name, setup_operator, backward)
    if not op.is_linear:
        # An operator that writes its input can have no formula of its own; torch.compile gets the functional one.
        _define_function(f"{name}_", setup_in_place, backward)


def _scaled(ctx: Ctx, grad: Tensor | None, count: int) -> Gradients:
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


for _op in OPERATORS.values():
    _register_two_passes(_op)
    if _op.is_linear:
        _register_two_passes(_op, adds=True)
    if _op.function.is_loss:
        _register_one_pass(_op)
