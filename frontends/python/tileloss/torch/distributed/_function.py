"""The functions of a vocabulary over a group, with their formula for autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss._core.row_states import MEAN_OUTPUT, backward_arrays, float_arrays
from tileloss._core.slots import DIFFERENTIABLE, ROW_OUTPUTS
from tileloss._core.structs import BACKWARD
from tileloss.torch._autograd import Ctx, once, rescaled
from tileloss.torch._call import Call
from tileloss.torch._define import row_grads
from tileloss.torch._tensors import set_row_state
from tileloss.torch.distributed._fused import ValueAndGradient
from tileloss.torch.distributed._gradients import gradients_of
from tileloss.torch.distributed._meeting import Group
from tileloss.torch.distributed._request import Operands, Request
from tileloss.torch.distributed._states import State, gathered, loss_of, merge, rows_of

Upstream = Sequence[Tensor | None]
_IGNORED = -100  # the default label of rows that do not count
_MEAN = ROW_OUTPUTS.index(MEAN_OUTPUT)


def compute(
    request: Request, given: Operands, group: Group, wants_grad: bool, in_place: bool
) -> tuple[Tensor, ...]:
    """(loss, metrics), or the row outputs in the order of ROW_OUTPUTS; what was not asked for is empty."""
    if wants_grad:
        function = _WithGradient if request.grad_in_forward else _Sharded
        results: tuple[Tensor, ...] = function.apply(request, group, in_place, *given.flat())
        return results[:2] if request.grad_in_forward else results
    return _forward(request, given, group)[0]


def _forward(request: Request, given: Operands, group: Group) -> tuple[tuple[Tensor, ...], Tensor]:
    """The results, and the state that a backward reads."""
    bits = request.bits()
    parts = gathered(request, given, bits, group)
    own_mean = _mean_of_shard(request, given, parts, bits) if request.mean_of_shard else None
    state = merge(request, given, parts, bits)
    if request.outputs:
        results = rows_of(request, given, state, bits, ROW_OUTPUTS)
        if own_mean is not None:
            results = (*results[:_MEAN], own_mean, *results[_MEAN + 1 :])
    else:
        results = loss_of(request, given, state, bits)
    # Not a part of what was gathered, which would live as long.
    return results, state.floats[: backward_arrays(bits)].clone()


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
    used = given.labels.flatten() != _IGNORED
    mean = torch.where(used, largest + rest / mine.columns, 0.0)
    return mean.float().view(given.labels.shape)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, request: Request, group: Group, in_place: bool, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        results, state = _forward(request, request.operands(flat), group)
        ctx.set_materialize_grads(False)
        with_gradient = len(DIFFERENTIABLE) if request.outputs else 1
        ctx.mark_non_differentiable(*results[with_gradient:])
        ctx.save_for_backward(*flat, state)
        ctx.request, ctx.group, ctx.in_place = request, group, in_place
        return results

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> Any:
        gradients = _gradients(ctx, *grads)
        rest = len(ctx.needs_input_grad) - 3 - len(gradients)
        return None, None, None, *gradients, *(None,) * rest


@once
def _gradients(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    request: Request = ctx.request
    upstream = grads[: len(DIFFERENTIABLE)] if request.outputs else grads[:1]
    needs = ctx.needs_input_grad[3 : 6 if request.is_linear else 4]
    if all(grad is None for grad in upstream):
        return ()
    *flat, state = ctx.saved_tensors
    given = request.operands(flat)

    def run(call: Call) -> None:
        _run_backward(request, call, upstream, state)

    return gradients_of(request, given, needs, ctx.group, ctx.in_place, run)


def _run_backward(request: Request, call: Call, upstream: Upstream, state: Tensor) -> None:
    if request.mean_of_shard and (grad := upstream[_MEAN]) is not None:
        # The library divides by the number of all classes.
        shards = request.shards
        scaled = grad * (shards.classes / shards.mine.columns)
        upstream = (*upstream[:_MEAN], scaled, *upstream[_MEAN + 1 :])
    if request.outputs:
        row_grads(call, upstream, state)
    else:
        call.vector("loss_grad", upstream[0])
        set_row_state(call.args, state)
    call.run(BACKWARD, request.workspace_bytes)


class _WithGradient(torch.autograd.Function):
    """A loss of hidden states, with the gradients in its forward: the backward scales them and sends nothing. They are
    outputs, so that they lead back to the inputs, as in _autograd.py."""

    @staticmethod
    def forward(
        ctx: Ctx, request: Request, group: Group, in_place: bool, *flat: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        given = request.operands(flat)
        hidden = given.matrices[0]
        assert hidden is not None
        found = ValueAndGradient(request, given, ctx.needs_input_grad[3:6], group)
        found.run()
        loss, metrics = found.results
        dhidden = None if found.dhidden is None else found.dhidden.collect().to(hidden.dtype)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(metrics)
        ctx.save_for_backward(dhidden, found.dhead, found.dbias)
        return loss, metrics, dhidden, found.dhead, found.dbias

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> Any:
        gradients = _scaled(ctx, *grads)
        rest = len(ctx.needs_input_grad) - 3 - len(gradients)
        return None, None, None, *gradients, *(None,) * rest


@once
def _scaled(ctx: Ctx, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return ()
    saved = ctx.saved_tensors
    return tuple(None if g is None else rescaled(g.detach(), grad, True) for g in saved)
