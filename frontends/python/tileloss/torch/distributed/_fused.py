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
    """Of a loss. After `run`: `results`, the request's; dhidden, of this rank's columns alone; dhead and dbias."""

    results: tuple[Tensor, ...]

    def __init__(
        self, request: Request, given: Operands, needs: Sequence[bool], group: Group
    ) -> None:
        hidden, head, bias, *_ = given.matrices
        assert hidden is not None and head is not None
        self._request, self._given = request, given
        self._exchange = Exchange(request, given, request.bits(), group)
        self._has_met = self._goes_on = False
        columns = request.shards.mine.columns
        self.dhidden = self._part = self.dhead = self.dbias = None
        if needs[0]:
            self.dhidden = Sum(hidden.shape, group, hidden.device)
            self._part = torch.empty_like(self.dhidden.part)
        if needs[1]:
            self.dhead = new_gradient(head, "dhead")
            self.dhead[columns:].zero_()
        if needs[2]:
            assert bias is not None
            self.dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
            self.dbias[columns:].zero_()

    dhidden: Sum | None
    _part: Tensor | None  # of one piece
    dhead: Tensor | None
    dbias: Tensor | None

    def run(self) -> None:
        try:
            self._piece(0)
        except Exception as error:
            if not self._has_met:
                self._meet(error)
            elif self._goes_on and self.dhidden is not None:
                self.dhidden.collect(error)
            raise

    def _piece(self, number: int) -> None:
        """The calls of this piece and of those after it."""
        if number == len(self._exchange.pieces):
            return self._meet()
        piece = self._exchange.pieces[number]
        own = self._exchange.own.of(number)
        columns = slice(piece.column, piece.column + piece.columns)
        of_head = [None if x is None else x[columns] for x in (self.dhead, self.dbias)]
        call = self._request.sweep(self._given, piece, (self._part, *of_head))
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
        if self.dhidden is not None and self._part is not None:
            self.dhidden.part += self._part

    def _meet(self, failure: Exception | None = None) -> None:
        self._has_met = True
        parts = self._exchange.collect(failure)
        self._goes_on = True
        self._state: State = merge(self._request, self._given, parts, self._exchange.bits)
        self.results = results_of(self._request, self._given, Met((self._state,)))
