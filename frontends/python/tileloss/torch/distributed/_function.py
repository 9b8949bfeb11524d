"""The functions of a vocabulary over a group, with their formula for autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss._core.row_states import MEAN_OUTPUT, float_arrays
from tileloss._core.structs import BACKWARD
from tileloss.torch._apply import Ctx, Gradients, once, padded, rescaled
from tileloss.torch._call import Call
from tileloss.torch._operators import OPERATORS
from tileloss.torch.distributed._fused import ValueAndGradient
from tileloss.torch.distributed._gradients import gradients_of
from tileloss.torch.distributed._meeting import Group
from tileloss.torch.distributed._request import Operands, Request
from tileloss.torch.distributed._states import Met, State, gathered, merge, results_of, summed

Upstream = Sequence[Tensor | None]
IGNORED = -100  # the default label of rows that do not count


def compute(
    request: Request, given: Operands, group: Group, wants_grad: bool, in_place: bool
) -> dict[str, Tensor]:
    """The results of the function by name; what was not asked for is empty."""
    if not wants_grad:
        results = _forward(request, given, group)[0]
    else:
        function = _WithGradient if request.grad_in_forward else _Sharded
        results = function.apply(request, group, in_place, *given.flat())
    return dict(zip(request.results, results, strict=False))


def _forward(request: Request, given: Operands, group: Group) -> tuple[tuple[Tensor, ...], Met]:
    """The results, and what a backward reads."""
    states: list[State | None] = []
    own_mean = None
    for each in request.all_sides(given):
        if each is None:
            states.append(None)
            continue
        side, operands = each
        bits = side.bits()
        parts = gathered(side, operands, bits, group)
        if request.mean_of_shard:
            own_mean = _mean_of_shard(request, given, parts, bits)
        state = merge(side, operands, parts, bits)
        # Not a part of what was gathered, which would live as long.
        states.append(State(state.floats.clone(), state.argmax.clone()))
    met = Met(tuple(states))
    if request.sides:
        met = met._replace(sums=summed(request, given, met.states, group))
    results = results_of(request, given, met)
    if own_mean is not None:
        place = request.results.index(MEAN_OUTPUT)
        results = (*results[:place], own_mean, *results[place + 1 :])
    return results, met


def _mean_of_shard(request: Request, given: Operands, parts: list[Any], bits: int) -> Tensor:
    """The mean of the logits of this rank's shard alone."""
    mine = request.shards.mine
    own = [
        (State(state.floats.clone(), state.argmax.clone()), piece)
        for state, piece in parts
        if mine.first <= piece.first < mine.first + mine.columns
    ]
    floats = merge(request, given, own, bits).floats.double()
    largest, rest = floats[0], floats[float_arrays(bits).index("smoothing_sum")]
    used = given.labels.flatten() != IGNORED
    mean = torch.where(used, largest + rest / mine.columns, 0.0)
    return mean.float().view(given.labels.shape)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, request: Request, group: Group, in_place: bool, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        results, met = _forward(request, request.operands(flat), group)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[len(OPERATORS[request.name].upstream) :])
        floats = [None if state is None else state.floats for state in met.states]
        ctx.save_for_backward(*flat, *floats, met.sums)
        ctx.request, ctx.group, ctx.in_place = request, group, in_place
        ctx.num_inputs = 3 + len(flat)
        return results

    @staticmethod
    @padded
    @once
    def backward(ctx: Ctx, *grads: Tensor | None) -> Gradients:
        request: Request = ctx.request
        names = OPERATORS[request.name].upstream
        upstream = grads[: len(names)]
        if all(grad is None for grad in upstream):
            return ()
        *flat, sums = ctx.saved_tensors
        end = -len(request.all_bits())
        given = request.operands(flat[:end])
        nothing = given.labels.new_empty(0, dtype=torch.int64)
        states = tuple(None if floats is None else State(floats, nothing) for floats in flat[end:])
        needs = ctx.needs_input_grad[3 : 3 + len(request.arguments.matrices)]

        def run(call: Call) -> None:
            call.set_upstream(names, _scale_mean_grad(request, upstream))
            Met(states, sums).set(request, call)
            call.run(BACKWARD, request.workspace_bytes)

        gradients = gradients_of(request, given, needs, ctx.group, ctx.in_place, run)
        return None, None, None, *gradients


def _scale_mean_grad(request: Request, upstream: Upstream) -> Upstream:
    """The library divides a mean's gradient by the number of all classes."""
    if not request.mean_of_shard:
        return upstream
    place, shards = request.results.index(MEAN_OUTPUT), request.shards
    if (grad := upstream[place]) is None:
        return upstream
    scaled = grad * (shards.classes / shards.mine.columns)
    return *upstream[:place], scaled, *upstream[place + 1 :]


class _WithGradient(torch.autograd.Function):
    """A loss of hidden states, with the gradients in its forward: the backward scales them and sends nothing. They are
    outputs, so that they lead back to the inputs, as in _apply.py."""

    @staticmethod
    def forward(
        ctx: Ctx, request: Request, group: Group, in_place: bool, *flat: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        given = request.operands(flat)
        needs = ctx.needs_input_grad[3 : 3 + len(given.matrices)]
        found = ValueAndGradient(request, given, needs, group)
        gradients = found.run()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*found.results[1:])
        ctx.save_for_backward(*gradients)
        ctx.num_inputs = 3 + len(flat)
        return *found.results, *gradients

    @staticmethod
    @padded
    @once
    def backward(ctx: Ctx, grad: Tensor | None, *_: Tensor | None) -> Gradients:
        if grad is None:
            return ()
        gradients = (
            g if g is None else rescaled(g.detach(), grad, True) for g in ctx.saved_tensors
        )
        return None, None, None, *gradients
