"""What a function was asked for, and the calls of the library that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileloss._core.functions import FUNCTIONS, given_names
from tileloss._core.row_states import bits_of_labels, bits_of_loss, bits_of_outputs
from tileloss._core.slots import ARGUMENTS, SLOTS, Arguments
from tileloss._core.views import WORD, words_of
from tileloss.torch._call import Call
from tileloss.torch._operators import OPERATORS
from tileloss.torch.distributed._shards import Piece, Shards

Tensors = Sequence[Tensor | None]


class Operands(NamedTuple):
    """This rank's shard, and what goes with the rows on every rank."""

    matrices: Tensors  # logits; or hidden, head and bias
    target: Tensors  # what the rows are compared with besides labels
    labels: Tensor  # what states leave out of their sums; zeros where there are none
    inputs: Tensors
    scalars: Tensors  # of the function's options, then of each side's

    @property
    def rows(self) -> torch.Size:
        first = self.matrices[0]
        assert first is not None
        return first.shape[:-1]

    def flat(self) -> tuple[Tensor | None, ...]:
        return (*self.matrices, *self.target, self.labels, *self.inputs, *self.scalars)


class Request(NamedTuple):
    """Everything but the operands."""

    function: str  # its name from logits
    is_linear: bool
    options: str
    values: list[float]
    shards: Shards
    compute_dtype: int = 0
    workspace_bytes: int = 0
    outputs: tuple[str, ...] = ()
    has_labels: bool = True
    labels_per_row: int = 1
    grad_in_forward: bool = False  # of a loss of labels with a head
    # MEAN_OUTPUT is that of this rank's columns, which Megatron-LM's label smoothing takes. With the default ignore_index.
    mean_of_shard: bool = False
    allowed_bits: int = (
        0  # the arrays of the row state that are there where rows have sets of columns
    )
    # Of a target that is more than labels: what the states are made of, logprobs of the student, of the teacher, and of the
    # student at its label's temperature, None where there is none.
    sides: tuple[Any, ...] = ()
    head_grad: Tensor | None = None  # to which a backward adds the head's gradient

    @property
    def name(self) -> str:
        return f"linear_{self.function}" if self.is_linear else self.function

    @property
    def arguments(self) -> Arguments:
        return ARGUMENTS[self.name]

    @property
    def results(self) -> tuple[str, ...]:
        """Names of what a call gives."""
        return OPERATORS[self.name].results

    def operands(self, flat: Tensors) -> Operands:
        """Of `Operands.flat`."""
        of, first = self.arguments, len(self.arguments.matrices)
        place, end = first + len(of.target), len(of.slots)
        labels = flat[place]
        assert labels is not None
        return Operands(flat[:first], flat[first:place], labels, flat[place + 1 : end], flat[end:])

    def all_sides(self, given: Operands) -> list[tuple[Request, Operands] | None]:
        """What the ranks gather states of: the request itself, or its sides."""
        if not self.sides:
            return [(self, given)]
        matrices = (given.matrices, given.target, given.matrices)
        allowed = tuple(
            x for slot, x in self._inputs(given) if slot == "allowed"
        )  # all that they have
        return [
            None
            if side is None
            else (
                side,
                Operands(
                    (*own, *(None,) * (len(side.arguments.matrices) - len(own))),
                    (),
                    given.labels,
                    allowed,
                    given.scalars[number : number + 1],
                ),
            )
            for number, (side, own) in enumerate(zip(self.sides, matrices, strict=True), start=1)
        ]

    def bits(self) -> int:
        """The arrays of the row state that are gathered."""
        function = FUNCTIONS[self.function]
        more = self.allowed_bits | bits_of_labels(self.labels_per_row)
        if not function.is_loss:
            return bits_of_outputs(self.outputs) | more
        names = given_names(self.options)
        return bits_of_loss(function, names, "metrics" in self.outputs) | more

    def all_bits(self) -> list[int]:
        return [0 if side is None else side.bits() for side in self.sides or (self,)]

    def class_weights(self, given: Operands) -> Tensor | None:
        return dict(self._inputs(given)).get("class_weights")

    def row_stage(self, given: Operands) -> Call:
        """The row stage alone: no vocabulary is in sight."""
        call = self._new_call(self.function, given, Piece(0, self.shards.classes, 0))
        nothing = [None] * ARGUMENTS[self.function].slots.index("labels")
        call.set_tensors((*nothing, *self._with_rows(given, None)))
        call.args.labels_per_row = self.labels_per_row  # which no matrix tells
        return call

    def sweep(self, given: Operands, piece: Piece, gradients: Tensors = ()) -> Call:
        """Of the columns of one piece."""
        call = self._new_call(self.name, given, piece)
        columns = slice(piece.column, piece.column + piece.columns)
        slots = zip(self.arguments.slots, (*given.matrices, *given.target), strict=False)
        cut = [_columns(slot, x, columns) for slot, x in slots]
        call.set_tensors((*cut, *self._with_rows(given, columns)), gradients)
        return call

    def backward(self, given: Operands, gradients: Tensors) -> Call:
        """Of the whole shard, whose columns that are no classes get gradients of 0."""
        call = self._new_call(self.name, given, self.shards.mine)
        call.set_options(valid_vocab=self.shards.mine.columns)
        of_rows = self._with_rows(given, slice(0, None))
        call.set_tensors((*given.matrices, *given.target, *of_rows), gradients)
        return call

    def _inputs(self, given: Operands) -> list[tuple[str, Tensor | None]]:
        return list(zip(self.arguments.inputs, given.inputs, strict=True))

    def _with_rows(self, given: Operands, columns: slice | None) -> Tensors:
        """``columns``: of the shard, that are swept; None: nobody sees any."""
        inputs = [_words(x, columns) if slot == "allowed" else x for slot, x in self._inputs(given)]
        return given.labels if self.has_labels else None, *inputs

    def _new_call(self, name: str, given: Operands, piece: Piece) -> Call:
        options = self.options, self.values, given.scalars[0]
        call = Call(name, *options, given.labels.device)
        call.set_options(vocab_start=piece.first, vocab_total=self.shards.classes)
        if FUNCTIONS[name].is_linear and self.compute_dtype:
            call.set_options(compute_dtype=self.compute_dtype)
        return call


def _words(sets: Tensor | None, columns: slice | None) -> Tensor | None:
    if sets is None or columns is None:
        return None
    end = None if columns.stop is None else words_of(columns.stop)
    return sets[..., columns.start // WORD : end]


def _columns(slot: str, x: Tensor | None, columns: slice) -> Tensor | None:
    shape = SLOTS[slot].shape
    if x is None or "V" not in shape:
        return x
    return x[columns] if shape[0] == "V" else x[..., columns]
