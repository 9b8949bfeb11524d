"""Losses that are told more of a row than its label, a teacher's logits or class probabilities, of a vocabulary that is cut over
a group.

The ranks meet for the states of all pieces, of the student, of the teacher, and of the student at its label's temperature; and,
as a column's divergence is relative to those, once more for the sums of all pieces. All are merged in the vocabulary's order, so
that they have the same bits on every rank and for any number of ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileloss._core.row_states import address_of
from tileloss._core.slots import LINEAR_WANTED, ROW_OUTPUT, WANTED, names_of
from tileloss._core.structs import BACKWARD, FORWARD, FROM_ROW_STATE, PairState
from tileloss.torch._autograd import Ctx, once
from tileloss.torch._call import Call
from tileloss.torch._define import empty, new_loss
from tileloss.torch._tensors import CPU
from tileloss.torch.distributed._gradients import gradients_of
from tileloss.torch.distributed._meeting import Group, gather, raise_together, ranks_of
from tileloss.torch.distributed._request import Operands, Request, Tensors
from tileloss.torch.distributed._shards import Piece
from tileloss.torch.distributed._states import State, gathered, merge, set_state

SIDES = ("student", "teacher", "label")


class PairRequest(NamedTuple):
    """``whole``: of the function itself. The others are logprobs' of each side, None where there is none."""

    whole: Request
    student: Request
    teacher: Request | None
    label: Request | None
    scalars: tuple[Tensor | None, ...]  # of each side's options
    outputs: tuple[str, ...]  # of the function's row outputs
    has_labels: bool

    def sides(self) -> tuple[Request | None, ...]:
        return self.student, self.teacher, self.label

    def bits(self) -> list[int]:
        """Of each side's states."""
        return [0 if side is None else side.bits() for side in self.sides()]


class PairOperands(NamedTuple):
    """``given``: as of a loss of labels; its labels are what the states leave out of their sums, zeros where there are none.
    ``wanted``: this rank's teacher's logits, or its hidden, head and bias; or class probabilities."""

    given: Operands
    wanted: Tensors

    def flat(self) -> tuple[Tensor | None, ...]:
        return (*self.given.matrices, *self.wanted, *self.given.flat()[len(self.given.matrices) :])


def compute(
    request: PairRequest, given: PairOperands, group: Group, wants_grad: bool, in_place: bool
) -> tuple[Tensor, ...]:
    """The loss, and the function's row outputs, empty where they were not asked for."""
    if not wants_grad:
        return _forward(request, given, group)[0]
    results: tuple[Tensor, ...] = _Pair.apply(
        request, group, in_place, len(given.wanted), *given.flat()
    )
    return results


def _operands(request: PairRequest, count: int, flat: Sequence[Tensor | None]) -> PairOperands:
    first = 3 if request.whole.is_linear else 1
    given = request.whole.operands((*flat[:first], *flat[first + count :]))
    return PairOperands(given, flat[first : first + count])


class _Whole(NamedTuple):
    """What all ranks know of all rows: floats of each side's state, and the sums, float64 [2, N]."""

    sides: tuple[State | None, ...]
    sums: Tensor

    def set(self, request: PairRequest, call: Call) -> None:
        bits = request.bits()
        student, *others = self.sides
        assert student is not None
        set_state(call, student, bits[0])
        state = PairState(struct_size=ctypes.sizeof(PairState), rows=self.sums.shape[1])
        for name, side, arrays in zip(SIDES[1:], others, bits[1:], strict=True):
            if side is not None:
                struct = side.as_struct(arrays)
                setattr(state, name, address_of(struct))
                call.alive += (struct, side)
        state.divergence, state.mean = (row.data_ptr() for row in self.sums)
        call.args.pair_state = ctypes.addressof(state)
        call.alive += (state, self.sums)


def _forward(
    request: PairRequest, given: PairOperands, group: Group
) -> tuple[tuple[Tensor, ...], _Whole]:
    student = given.given._replace(extra=())
    matrices = (student.matrices, given.wanted, student.matrices)
    sides: list[State | None] = []
    for side, of_side, scalars in zip(request.sides(), matrices, request.scalars, strict=True):
        if side is None:
            sides.append(None)
            continue
        operands = student._replace(matrices=of_side, scalars=scalars)
        parts = gathered(side, operands, side.bits(), group)
        found = merge(side, operands, parts, side.bits())
        # Not a part of what was gathered, which would live as long.
        sides.append(State(found.floats.clone(), found.argmax.clone()))
    whole = _Whole(tuple(sides), _sums(request, given, tuple(sides), group))
    call = request.whole.new_call(given.given)
    _set_labels(request, call)
    whole.set(request, call)
    loss = new_loss(call, given.given.labels)
    rows = [
        call.new_output(name, given.given.labels.shape) if name in request.outputs else empty()
        for name in names_of(ROW_OUTPUT, request.whole.function)
    ]
    call.run(FROM_ROW_STATE)
    return (loss, *rows), whole


def _sums(
    request: PairRequest, given: PairOperands, sides: tuple[State | None, ...], group: Group
) -> Tensor:
    shards, (rank, count) = request.whole.shards, ranks_of(group)
    pieces, rows = shards.pieces[rank], given.given.labels.numel()
    most = max(map(len, shards.pieces))
    # The last number says that this rank has failed.
    buffer = torch.zeros(most * 2 * rows + 1, dtype=torch.float64, device=CPU)
    own = buffer[:-1].view(most, 2, rows)
    failure = None
    try:
        for number, piece in enumerate(pieces):
            call = _sweep(request, given, piece)
            _Whole(sides, own[number]).set(request, call)
            call.run(FORWARD, request.whole.workspace_bytes)
    except Exception as error:
        failure = error
    buffer[-1] = failure is not None
    everyone = gather(buffer, group, count)
    raise_together(failure, everyone[:, -1].tolist(), group)
    parts = everyone[:, :-1].view(count, most, 2, rows)
    total = torch.zeros(2, rows, dtype=torch.float64, device=CPU)
    for of_rank, number, _ in shards.in_order():
        total += parts[of_rank, number]
    return total


def _set_labels(request: PairRequest, call: Call) -> None:
    if not request.has_labels:
        call.args.labels.dtype = 0


def _sweep(request: PairRequest, given: PairOperands, piece: Piece) -> Call:
    call = request.whole.sweep(given.given, piece)
    _set_labels(request, call)
    columns = slice(piece.column, piece.column + piece.columns)
    _set_wanted(request, call, given, columns)
    return call


def _set_wanted(request: PairRequest, call: Call, given: PairOperands, columns: slice) -> None:
    function = request.whole.function
    if request.whole.is_linear and "teacher_head" in LINEAR_WANTED[function]:
        hidden, head, bias = given.wanted
        assert hidden is not None and head is not None
        call.teacher_head(hidden, head[columns], None if bias is None else bias[columns])
        return
    (wanted,) = given.wanted
    assert wanted is not None
    call.wanted(WANTED[function], [wanted[..., columns]])


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx,
        request: PairRequest,
        group: Group,
        in_place: bool,
        count: int,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        results, whole = _forward(request, _operands(request, count, flat), group)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        floats = [None if side is None else side.floats for side in whole.sides]
        ctx.save_for_backward(*flat, *floats, whole.sums)
        ctx.request, ctx.group, ctx.in_place, ctx.count = request, group, in_place, count
        return results

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> Any:
        gradients = _gradients(ctx, *grads)
        rest = len(ctx.needs_input_grad) - 4 - len(gradients)
        return None, None, None, None, *gradients, *(None,) * rest


@once
def _gradients(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    request: PairRequest = ctx.request
    if grads[0] is None:
        return ()
    *flat, student, teacher, label, sums = ctx.saved_tensors
    given = _operands(request, ctx.count, flat)
    nothing = torch.empty(0, dtype=torch.int64, device=CPU)
    sides = [None if x is None else State(x, nothing) for x in (student, teacher, label)]
    whole = _Whole(tuple(sides), sums)
    needs = ctx.needs_input_grad[4 : 7 if request.whole.is_linear else 5]

    def run(call: Call) -> None:
        _set_labels(request, call)
        _set_wanted(request, call, given, slice(None))
        whole.set(request, call)
        call.vector("loss_grad", grads[0])
        call.run(BACKWARD, request.whole.workspace_bytes)

    return gradients_of(request.whole, given.given, needs, ctx.group, ctx.in_place, run)
