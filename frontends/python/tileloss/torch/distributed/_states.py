"""The forward: a rank sweeps its pieces, the states of all pieces are gathered and merged, and the row stage works on those."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tileloss._core import row_states
from tileloss._core.structs import FORWARD, FROM_ROW_STATE, RowState
from tileloss.torch._call import Call
from tileloss.torch._define import empty, new_loss, new_metrics
from tileloss.torch._tensors import CPU
from tileloss.torch.distributed._meeting import Group, gather, raise_together, ranks_of
from tileloss.torch.distributed._request import Operands, Request
from tileloss.torch.distributed._shards import Piece


class State(NamedTuple):
    """Row states: `floats` [..., K, N], the arrays of `row_states.float_arrays`; `argmax` [..., N] int64, or nothing of it."""

    floats: Tensor
    argmax: Tensor

    def of(self, index: int | tuple[int, int]) -> State:
        return State(self.floats[index], self.argmax[index])

    def as_struct(self, bits: int, weight: float = 0.0) -> RowState:
        """Of one piece. The tensors have to outlive it."""
        names = row_states.float_arrays(bits)
        addresses = {name: row.data_ptr() for name, row in zip(names, self.floats, strict=True)}
        if self.argmax.numel():
            addresses["argmax"] = self.argmax.data_ptr()
        return row_states.new_row_state(self.floats.shape[-1], addresses, weight)


def set_state(call: Call, state: State, bits: int) -> None:
    struct = state.as_struct(bits)
    call.args.row_state = row_states.address_of(struct)
    call.alive += (struct, state)


class Exchange:
    """The states of this rank's pieces, on their way to every rank."""

    def __init__(self, request: Request, given: Operands, bits: int, group: Group) -> None:
        self._request, self._group, self.bits = request, group, bits
        rank, self._count = ranks_of(group)
        self.pieces = request.shards.pieces[rank]
        rows = given.labels.numel()
        most = max(map(len, request.shards.pieces))
        self._shape = (most, len(row_states.float_arrays(bits)), rows)
        # The last number says that this rank has failed.
        self._buffer = torch.zeros(prod(self._shape) + 1, dtype=torch.float32, device=CPU)
        width = rows if row_states.has_argmax(bits) else 0
        argmax = torch.zeros((most, width), dtype=torch.int64, device=CPU)
        self.own = State(self._buffer[:-1].view(self._shape), argmax)

    def collect(self, failure: Exception | None = None) -> list[tuple[State, Piece]]:
        """The states of all pieces, in the order of the vocabulary. Every rank raises if one comes with a ``failure``."""
        self._buffer[-1] = failure is not None
        buffers = gather(self._buffer, self._group, self._count)
        raise_together(failure, buffers[:, -1].tolist(), self._group)
        argmax = self.own.argmax
        argmaxes = (
            gather(argmax, self._group, self._count)
            if argmax.numel()
            else argmax.expand(self._count, *argmax.shape)
        )
        states = State(buffers[:, :-1].view(self._count, *self._shape), argmaxes)
        return [
            (states.of((rank, number)), piece)
            for rank, number, piece in self._request.shards.in_order()
        ]


def gathered(
    request: Request, given: Operands, bits: int, group: Group
) -> list[tuple[State, Piece]]:
    """Sweeps this rank's pieces; the states of all pieces."""
    exchange = Exchange(request, given, bits, group)
    try:
        for number, piece in enumerate(exchange.pieces):
            call = request.sweep(given, piece)
            set_state(call, exchange.own.of(number), bits)
            call.run(FORWARD, request.workspace_bytes)
    except Exception as error:
        return exchange.collect(error)
    return exchange.collect()


def merge(request: Request, given: Operands, parts: list[tuple[State, Piece]], bits: int) -> State:
    """The state of pieces side by side, in their order; in the first one's memory."""
    class_weights = request.class_weights(given)
    first, piece = parts[0]
    whole = first.as_struct(bits, piece.weight(class_weights))
    for state, piece in parts[1:]:
        row_states.merge(whole, state.as_struct(bits, piece.weight(class_weights)))
    return first


def loss_of(request: Request, given: Operands, state: State, bits: int) -> tuple[Tensor, Tensor]:
    """(loss, metrics) of the whole vocabulary's state."""
    call = request.new_call(given)
    set_state(call, state, bits)
    loss = new_loss(call, given.labels)
    metrics = new_metrics(call, request.wants_metrics)
    call.run(FROM_ROW_STATE)
    return loss, metrics


def rows_of(
    request: Request, given: Operands, state: State, bits: int, names: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """Row outputs in the order of ``names``, empty where they were not asked for."""
    call = request.new_call(given)
    set_state(call, state, bits)
    results = tuple(
        call.new_output(name, given.labels.shape) if name in request.outputs else empty()
        for name in names
    )
    call.run(FROM_ROW_STATE)
    return results
