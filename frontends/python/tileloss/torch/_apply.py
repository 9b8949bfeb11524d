"""The operator that serves a call, and the operators' formulas of autograd.

The forward of an operator f saves its row state (3 or 4 floats a row), from which f_backward computes the gradient at one
exponential an element. An operator f_value_and_grad has computed the gradients with the value; its backward multiplies them by
the upstream gradient, in place, and gives them as they are when that is 1; while the graph is retained it gives copies.
Double backward is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tileloss._core.functions import PUBLIC_OPTIONS
from tileloss.torch._arguments import (
    Student,
    Value,
    checked_tensors,
    encode,
    is_per_row,
    refuse_duals,
)
from tileloss.torch._call import scale_gradient
from tileloss.torch._operators import (
    OPERATORS,
    Operators,
    is_batched,
    is_exported,
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


def _register_two_passes(op: Operators) -> None:
    """f, whose backward is an operator of its own."""

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.mark_non_differentiable(*output[len(op.upstream) :])
        tensors, (options, values, scalars) = (
            inputs[: op.num_tensors],
            inputs[op.num_tensors : op.end_of_options],
        )
        state = output[-1] if op.has_state else None
        ctx.save_for_backward(*tensors, scalars, state)
        ctx.options, ctx.head_options = (options, values), inputs[op.end_of_options : op.end]

    def backward(ctx: Ctx, *grads: Tensor | None) -> Gradients:
        upstream, needs = grads[: len(op.upstream)], ctx.needs_input_grad
        if upstream[0] is None and all(g is None for g in upstream):
            return ()
        first, *tensors, scalars, state = ctx.saved_tensors
        rest = (*tensors, *ctx.options, scalars, *ctx.head_options)
        if op.has_state:
            rest = (*rest, state)
        if op.is_linear:
            asked = [name for name, need in zip(op.gradients, needs, strict=False) if need]
            found = run(f"{op.name}_backward", *upstream, first, *rest, ",".join(asked))
            return tuple(g if need else None for g, need in zip(found, needs, strict=False))
        if not needs[0]:
            return ()
        if ctx.in_place:
            first = first.detach()
            run(f"{op.name}_backward_", *upstream, first, *rest, "dlogits")
            return (first,)
        return (run(f"{op.name}_backward", *upstream, first, *rest, "dlogits"),)

    _register_operator(op.name, setup, backward)
    _define_function(op.name, setup, backward)


def _register_one_pass(op: Operators) -> None:
    """f_value_and_grad; at the logits level also the one that writes its gradient over the logits."""
    name, count = f"{op.name}_value_and_grad", op.num_matrices

    def setup(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        # The gradients pass for outputs with a gradient, which nobody is given: so they lead back (see once) without an input
        # that lives on for it.
        ctx.mark_non_differentiable(*output[1 + count :])
        ctx.save_for_backward(*output[1 : 1 + count])

    def setup_operator(ctx: Ctx, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        # The inputs lead back; a compiled backward, which reads none of them, does not keep them.
        ctx.save_for_backward(*output[1 : 1 + count], *inputs[:count])

    def setup_in_place(ctx: Ctx, inputs: Sequence[Any], output: Tensor | Sequence[Tensor]) -> None:
        if not isinstance(output, Tensor):
            ctx.mark_non_differentiable(*output[1:])
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
    if _op.function.is_loss:
        _register_one_pass(_op)


# ---------------------------------------------------------------------------------------------------------- from a function


def results_of(
    function: str,
    student: Student,
    given: Mapping[str, Value],
    *,
    preset: str = "",
    outputs: tuple[str, ...] = (),
    grad_in_forward: bool | None = False,
    inplace_backward: bool = False,
) -> dict[str, Tensor]:
    """The loss, and the outputs that were asked for, by their names in the ABI; others are empty. ``function``: its name from
    logits. ``given``: all tensors but the student's, and options, by their names in the ABI."""
    op = OPERATORS[student.name_of(function)]
    checked = checked_tensors(function, student, given, given)
    named = {name: given[name] for name in PUBLIC_OPTIONS[op.name] if name in given}
    options = encode(op.name, named, student.first.device, preset)
    inputs = (*student.matrices, *checked, *options, *student.head_options)
    needs = student.needs()
    wants_grad, in_place = True in needs, inplace_backward and not is_traced()
    if wants_grad and _is_in_forward(grad_in_forward, op, student, given, in_place):
        if is_exported():
            needs = student.has()
        wanted = [name for name, need in zip(op.gradients, needs, strict=True) if need]
        name = f"{op.name}_value_and_grad{'_' * in_place}"
        results = _apply(name, (*inputs, ",".join((*wanted, *outputs))), True, True)
        gradients = () if in_place else op.gradients
        names = (op.results[0], *gradients, *op.results[1:])
    else:
        asked = (*outputs, "row_state") if wants_grad and op.has_state else outputs
        results = _apply(op.name, (*inputs, ",".join(asked)), wants_grad, in_place)
        names = op.kept_results
    results = (results,) if isinstance(results, Tensor) else results
    return dict(zip(names, results, strict=True))


def _is_in_forward(
    asked: bool | None,
    op: Operators,
    student: Student,
    given: Mapping[str, Value],
    in_place: bool,
) -> bool:
    """Whether the gradient is made with the loss. That is the default with a head, where it saves a product; of a target that is
    more than labels, where a backward of its own makes all of the forward's sums again; and of labels from logits on a GPU, where
    it saves a read of them, but while somebody traces, as a compiled backward multiplies by 1 too. It is not for float16, which
    AMP's scale would reach too late, not in place, where the logits are the caller's until the backward, and not for a program
    that is exported while some tensors ask for no gradient. A loss per row with a head takes two passes whatever is asked."""
    per_row = is_per_row(given)
    if asked is None:
        saves = op.is_linear or not op.has_state or (student.first.is_cuda and not is_traced())
        by_default = saves and (op.is_linear or not (in_place or per_row))
        if by_default and is_exported():
            by_default = student.needs() == student.has()
        asked = by_default and not student.has_float16_gradient()
    if asked and per_row and not op.is_linear:
        raise ValueError(
            "grad_in_forward: expected False for a loss per row (reduction or aggregation 'none'), whose upstream gradient "
            "has to be known, got True"
        )
    return asked and not per_row


def _apply(name: str, inputs: Sequence[Any], wants_grad: bool, in_place: bool) -> Any:
    """The operator ``name``, with autograd where that is asked for. ``in_place``: whether its backward may write over its
    inputs, or over the gradients that its forward computed; not so where torch plans memory itself."""
    if is_traced():
        return getattr(torch.ops.tileloss, name)(*inputs)
    return _functions[name].apply(*inputs, in_place) if wants_grad else run(name, *inputs)
