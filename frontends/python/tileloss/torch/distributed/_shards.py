"""How a vocabulary is cut over the ranks of a group, and each rank's shard into the pieces that are swept one by one.

The whole vocabulary is cut into SLICES slices wherever the shards end on them. All ranks merge the states of all slices in their
order: the state, and what the row stage makes of it, then has the same bits on every rank and for any number of ranks. Elsewhere
each shard is one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tileloss._core.views import WORD

SLICES = 8


class Piece(NamedTuple):
    """Classes [first, first + columns), which lie in a shard's columns from ``column`` on."""

    first: int
    columns: int
    column: int

    def weight(self, class_weights: Tensor | None) -> float:
        """The sum of its class weights; without them its number of columns."""
        if class_weights is None:
            return float(self.columns)
        return float(class_weights[self.first : self.first + self.columns].double().sum())


@dataclass(frozen=True)
class Shards:
    classes: int  # of the whole vocabulary, padding excluded
    columns: int  # of all shards, padding at the end included
    mine: Piece  # this rank's classes; without columns where it has nothing but padding
    pieces: tuple[tuple[Piece, ...], ...]  # of each rank

    def in_order(self) -> list[tuple[int, int, Piece]]:
        """(rank, number among the rank's pieces, piece) in the order of the vocabulary."""
        found = [
            (rank, number, piece)
            for rank, pieces in enumerate(self.pieces)
            for number, piece in enumerate(pieces)
        ]
        return sorted(found, key=lambda each: each[2].first)


def cut(
    columns: list[int],
    starts: list[int],
    valid_vocab: int | None,
    rank: int,
    has_allowed: bool = False,
) -> Shards:
    """``columns``: of each rank's shard. ``starts``: the class of its first column; -1 on every rank: one after another, in the
    order of the ranks. ``has_allowed``: whether shards and pieces begin with a word of the rows' sets."""
    starts = _checked_starts(columns, starts)
    total = sum(columns)
    if total == 0:
        raise ValueError("input: expected at least one column in all shards, got none")
    if valid_vocab is not None and not 0 < valid_vocab <= total:
        raise ValueError(
            f"valid_vocab: expected 1 to {total}, the columns of all shards, got {valid_vocab}"
        )
    classes = total if valid_vocab is None else valid_vocab
    held = [
        max(0, min(start + width, classes) - start)
        for start, width in zip(starts, columns, strict=True)
    ]
    in_slices = total % SLICES == 0 and all(start % (total // SLICES) == 0 for start in starts)
    if has_allowed:
        in_slices = in_slices and total // SLICES % WORD == 0
        for of_rank, start in enumerate(starts):
            if start % WORD and held[of_rank]:
                raise ValueError(
                    f"vocab_start: expected multiples of {WORD} with allowed, got shards from class {start} on on rank {of_rank}"
                )
    pieces = tuple(
        _pieces(start, count, total // SLICES if in_slices else max(count, 1))
        for start, count in zip(starts, held, strict=True)
    )
    return Shards(classes, total, Piece(starts[rank], held[rank], 0), pieces)


def _checked_starts(columns: list[int], starts: list[int]) -> list[int]:
    ranks = range(len(starts))
    missing = [str(rank) for rank in ranks if starts[rank] == -1]
    if len(missing) == len(starts):
        return [sum(columns[:rank]) for rank in ranks]
    if missing:
        raise ValueError(
            f"vocab_start: expected on every rank of the group or on none, got none on rank {', '.join(missing)}"
        )
    end = 0
    for rank in sorted(ranks, key=lambda r: (starts[r], columns[r])):
        if starts[rank] != end:
            raise ValueError(
                f"vocab_start: expected shards side by side, the next one from class {end} on, got {starts[rank]} on rank {rank}"
            )
        end += columns[rank]
    return starts


def _pieces(start: int, count: int, width: int) -> tuple[Piece, ...]:
    return tuple(
        Piece(start + column, min(width, count - column), column)
        for column in range(0, count, width)
    )
