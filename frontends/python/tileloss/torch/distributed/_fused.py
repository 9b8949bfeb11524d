"""Loss and gradients of a head in one go: a piece's logits are kept from its forward to its backward, in between all ranks merge.

The pieces' calls lie inside one another: a call's forward is over when it asks for the merged states, there the next piece's call
begins, and the innermost one meets the other ranks. Then come the backwards, from the last piece to the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tileloss._core.structs import VALUE_AND_GRAD
from tileloss.torch._call import new_gradient
from tileloss.torch.distributed._meeting import Group, Sum
from tileloss.torch.distributed._request import Operands, Request
from tileloss.torch.distributed._states import Exchange, Met, State, merge, results_of, set_state


class ValueAndGradient:
    """Of a loss. After `run`: `results`, the request's."""

    results: tuple[Tensor, ...]

    def __init__(
        self, request: Request, given: Operands, needs: Sequence[bool], group: Group
    ) -> None:
        asked = [x if need else None for x, need in zip(given.matrices, needs, strict=True)]
        hidden, head, bias, hidden_r, head_r = asked
        self._request, self._given = request, given
        self._exchange = Exchange(request, given, request.bits(), group)
        self._has_met = self._goes_on = False
        columns = request.shards.mine.columns
        self._sums = Sum((hidden, hidden_r), group)
        # Of one piece, which are added to the sums' parts.
        self._parts = [
            None if part is None else torch.empty_like(part) for part in self._sums.parts
        ]
        self._of_heads = [
            None if x is None else new_gradient(x, kind)
            for x, kind in ((head, "dhead"), (bias, "dbias"), (head_r, "dhead_r"))
        ]
        for gradient in self._of_heads:
            if gradient is not None:
                gradient[columns:].zero_()

    def run(self) -> tuple[Tensor | None, ...]:
        """The gradients of the operands' matrices, those that are needed."""
        try:
            self._piece(0)
        except Exception as error:
            if not self._has_met:
                self._meet(error)
            elif self._goes_on:
                self._sums.collect(error)
            raise
        (dhidden, dhidden_r), (dhead, dbias, dhead_r) = self._sums.collect(), self._of_heads
        return dhidden, dhead, dbias, dhidden_r, dhead_r

    def _piece(self, number: int) -> None:
        """The calls of this piece and of those after it."""
        if number == len(self._exchange.pieces):
            return self._meet()
        piece = self._exchange.pieces[number]
        own = self._exchange.own.of(number)
        columns = slice(piece.column, piece.column + piece.columns)
        part, part_r = self._parts
        dhead, dbias, dhead_r = (None if x is None else x[columns] for x in self._of_heads)
        call = self._request.sweep(self._given, piece, (part, dhead, dbias, part_r, dhead_r))
        set_state(call, own, self._exchange.bits)

        def merge_states() -> None:
            self._piece(number + 1)
            own.floats.copy_(self._state.floats)
            own.argmax.copy_(self._state.argmax)

        if piece.columns == self._request.shards.classes:  # nobody to merge with
            call.run(VALUE_AND_GRAD, self._request.workspace_bytes)
            self._piece(number + 1)
        else:
            call.run(VALUE_AND_GRAD, self._request.workspace_bytes, merge_states)
        for total, of_piece in zip(self._sums.parts, self._parts, strict=True):
            if total is not None and of_piece is not None:
                total += of_piece

    def _meet(self, failure: Exception | None = None) -> None:
        self._has_met = True
        parts = self._exchange.collect(failure)
        self._goes_on = True
        self._state: State = merge(self._request, self._given, parts, self._exchange.bits)
        self.results = results_of(self._request, self._given, Met((self._state,)))
