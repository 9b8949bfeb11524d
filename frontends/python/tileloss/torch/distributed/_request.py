"""What a function was asked for, and the calls of the library that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tileloss._core.functions import FUNCTIONS
from tileloss._core.options import given_names
from tileloss._core.row_states import bits_of_loss, bits_of_outputs
from tileloss._core.slots import INPUTS
from tileloss.torch._call import Call
from tileloss.torch.distributed._shards import Piece, Shards

Tensors = Sequence[Tensor | None]


class Operands(NamedTuple):
    """This rank's shard, and what goes with the rows on every rank."""

    matrices: Tensors  # logits; or hidden, head and bias
    labels: Tensor
    extra: Tensors  # the function's INPUTS
    scalars: Tensor | None

    def flat(self) -> tuple[Tensor | None, ...]:
        return (*self.matrices, self.labels, *self.extra, self.scalars)


class Request(NamedTuple):
    """Everything but the tensors."""

    function: str  # its name from logits
    is_linear: bool
    options: str
    values: list[float]
    shards: Shards
    compute_dtype: int = 0
    workspace_bytes: int = 0
    outputs: tuple[str, ...] = ()  # of row outputs
    wants_metrics: bool = False
    grad_in_forward: bool = False  # of a loss with a head
    # MEAN_OUTPUT is that of this rank's columns, which Megatron-LM's label smoothing takes. With the default ignore_index.
    mean_of_shard: bool = False

    def operands(self, flat: Tensors) -> Operands:
        """Of `Operands.flat`."""
        count = 3 if self.is_linear else 1
        labels = flat[count]
        assert labels is not None
        return Operands(flat[:count], labels, flat[count + 1 : -1], flat[-1])

    def bits(self) -> int:
        """The arrays of the row state that are gathered."""
        if self.outputs:
            return bits_of_outputs(self.outputs)
        function = FUNCTIONS[self.function]
        return bits_of_loss(function, given_names(self.options), self.wants_metrics)

    def class_weights(self, given: Operands) -> Tensor | None:
        names = INPUTS[self.function]
        if "class_weights" not in names:
            return None
        return given.extra[names.index("class_weights")]

    def new_call(self, given: Operands) -> Call:
        """Of the row stage alone: no vocabulary is in sight."""
        return self._call(self.function, given, Piece(0, self.shards.classes, 0))

    def sweep(self, given: Operands, piece: Piece) -> Call:
        """A forward of the columns of one piece."""
        columns = slice(piece.column, piece.column + piece.columns)
        first, *head = given.matrices
        call = self._call(self._name(), given, piece)
        if self.is_linear:
            weight, bias = (None if x is None else x[columns] for x in head)
            self._set_head(call, first, weight, bias)
        else:
            assert first is not None
            call.logits(first[..., columns])
        return call

    def backward(self, given: Operands, dlogits: Tensor | None = None) -> Call:
        """Of the whole shard, whose columns that are no classes get gradients of 0."""
        mine = self.shards.mine
        first, *head = given.matrices
        call = self._call(self._name(), given, mine)
        call.set_options(valid_vocab=mine.columns)
        if self.is_linear:
            self._set_head(call, first, *head)
        else:
            assert first is not None
            call.logits(first, dlogits)
        return call

    def _name(self) -> str:
        return f"linear_{self.function}" if self.is_linear else self.function

    def _set_head(
        self, call: Call, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> None:
        assert hidden is not None and weight is not None
        call.head(hidden, weight, bias, self.compute_dtype)

    def _call(self, name: str, given: Operands, piece: Piece) -> Call:
        call = Call(name, self.options, self.values, given.scalars)
        call.set_options(vocab_start=piece.first, vocab_total=self.shards.classes)
        call.inputs(self.function, given.labels, given.extra)
        return call
