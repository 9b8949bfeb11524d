"""The forward: a rank sweeps its pieces, the states of all pieces are gathered and merged, and the row stage works on those.

Of a target that is more than labels there are states of each side, and, as a column's divergence is relative to those, the ranks
meet once more for the sums of all pieces. All are merged in the vocabulary's order, so that they have the same bits on every rank
and for any number of ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tileloss._core import row_states
from tileloss._core.structs import FORWARD, FROM_ROW_STATE, PairState, RowState
from tileloss.torch._call import Call, place_of
from tileloss.torch._operators import OPERATORS
from tileloss.torch.distributed._meeting import Group, gather, gather_unless_failed, ranks_of
from tileloss.torch.distributed._request import Operands, Request
from tileloss.torch.distributed._shards import Piece


class State(NamedTuple):
    """Row states: `floats` [..., A, N], the arrays of `row_states.float_arrays`, of which the labels' takes K lines; `argmax`
    [..., N] int64, or nothing of it."""

    floats: Tensor
    argmax: Tensor

    def of(self, index: int | tuple[int, int]) -> State:
        return State(self.floats[index], self.argmax[index])

    def as_struct(self, bits: int, weight: float = 0.0) -> RowState:
        """Of one piece. The tensors have to outlive it."""
        names, (lines, rows) = row_states.float_arrays(bits), self.floats.shape
        floats = zip(names, self.floats[: len(names)], strict=True)
        addresses = {name: row.data_ptr() for name, row in floats}
        if self.argmax.numel():
            addresses["argmax"] = self.argmax.data_ptr()
        place, per_row = place_of(self.floats.device), lines - len(names) + 1
        return row_states.new_row_state(rows, addresses, weight, place, per_row)


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
        rows, device = given.rows.numel(), given.labels.device
        most = max(map(len, request.shards.pieces))
        lines = len(row_states.float_arrays(bits)) + request.labels_per_row - 1
        self._shape = (most, lines, rows)
        # One more, for `gather_unless_failed`.
        self._buffer = torch.zeros(prod(self._shape) + 1, dtype=torch.float32, device=device)
        width = rows if row_states.has_argmax(bits) else 0
        argmax = torch.zeros((most, width), dtype=torch.int64, device=device)
        self.own = State(self._buffer[:-1].view(self._shape), argmax)

    def collect(self, failure: Exception | None = None) -> list[tuple[State, Piece]]:
        """The states of all pieces, in the order of the vocabulary. Every rank raises if one comes with a ``failure``."""
        floats = gather_unless_failed(self._buffer, failure, self._group)
        argmax = self.own.argmax
        argmaxes = (
            gather(argmax, self._group, self._count)
            if argmax.numel()
            else argmax.expand(self._count, *argmax.shape)
        )
        states = State(floats.view(self._count, *self._shape), argmaxes)
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
    with _on_default_stream(first.floats.device):
        for state, piece in parts[1:]:
            row_states.merge(whole, state.as_struct(bits, piece.weight(class_weights)))
    return first


@contextmanager
def _on_default_stream(device: torch.device) -> Iterator[None]:
    """Around what the library, which is told no stream for it, queues on a GPU's default one: it comes after what the current
    stream has been given, and before what that is given next."""
    if device.type == "cpu":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    try:
        yield
    finally:
        current.wait_stream(default)


class Met(NamedTuple):
    """What all ranks know of all rows: states of each side, the request's own or a student's, its teacher's and its label's; of
    a target that is more than labels also the sums, float64 [2, N]."""

    states: tuple[State | None, ...]
    sums: Tensor | None = None

    def set(self, request: Request, call: Call) -> None:
        (state, *others), (bits, *other_bits) = self.states, request.all_bits()
        assert state is not None
        set_state(call, state, bits)
        if self.sums is None:
            return
        pair = PairState(struct_size=ctypes.sizeof(PairState), rows=self.sums.shape[1])
        for name, other, bits in zip(("teacher", "label"), others, other_bits, strict=True):
            if other is not None:
                struct = other.as_struct(bits)
                setattr(pair, name, row_states.address_of(struct))
                call.alive += (struct, other)
        pair.divergence, pair.mean = (row.data_ptr() for row in self.sums)
        call.args.pair_state = ctypes.addressof(pair)
        call.alive += (pair, self.sums)


def summed(
    request: Request, given: Operands, states: tuple[State | None, ...], group: Group
) -> Tensor:
    """The second meeting: the sums of all pieces."""
    shards, (rank, count) = request.shards, ranks_of(group)
    pieces, rows, device = shards.pieces[rank], given.rows.numel(), given.labels.device
    most = max(map(len, shards.pieces))
    # One more, for `gather_unless_failed`.
    buffer = torch.zeros(most * 2 * rows + 1, dtype=torch.float64, device=device)
    own = buffer[:-1].view(most, 2, rows)
    failure = None
    try:
        for number, piece in enumerate(pieces):
            call = request.sweep(given, piece)
            Met(states, own[number]).set(request, call)
            call.run(FORWARD, request.workspace_bytes)
    except Exception as error:
        failure = error
    parts = gather_unless_failed(buffer, failure, group).view(count, most, 2, rows)
    total = torch.zeros(2, rows, dtype=torch.float64, device=device)
    for of_rank, number, _ in shards.in_order():
        total += parts[of_rank, number]
    return total


def results_of(request: Request, given: Operands, met: Met) -> tuple[Tensor, ...]:
    """What the row stage makes of it, `request.results`; what was not asked for is empty."""
    call, op = request.row_stage(given), OPERATORS[request.function]
    met.set(request, call)
    outputs, shapes = ",".join(request.outputs), (given.rows, given.labels.shape)
    names, options, values = request.results, request.options, request.values
    results = op.new_results(names, *shapes, options, values, outputs, call.new_output)
    call.run(FROM_ROW_STATE)
    return tuple(results)
