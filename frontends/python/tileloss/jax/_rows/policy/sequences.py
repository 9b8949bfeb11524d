"""How the rows fall into sequences: by offsets, as [B, T], or, without either, all in one (src/losses/inputs.h)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import inverse_or_zero
from tileloss.jax._rows.options import Options


class Sequences:
    """B sequences of N rows, back to back; B and N are static, offsets may be traced.

    Sums are float32. With offsets, or places, they are scatter-adds, whose order a GPU does not promise; on the CPU and on TPU
    they have the same bits run to run.
    """

    def __init__(
        self,
        rows: int,
        offsets: Array | None = None,
        length: int = 0,
        places: Array | None = None,
    ) -> None:
        """``offsets``: integers [B+1], sequence b is rows offsets[b] to offsets[b+1], 0 first, N last. ``length``: T, 0: none.
        ``places``: integers [N], where in the sequences the rows are; None: in their order."""
        self.rows, self.length = rows, length if offsets is None else 0
        self._of: Array | None = None
        self._is_in_order = places is None
        if offsets is not None:
            self.count = offsets.shape[0] - 1
            if places is None:
                places = jnp.arange(rows, dtype=offsets.dtype)
            self._of = jnp.searchsorted(offsets[1:], places, side="right", method="sort")
        else:
            self.count = rows // length if length else 1
            if places is not None:
                self._of = places // (length or rows)

    def sum(self, x: Array) -> Array:
        """[N] -> [B]; 0 for an empty sequence. Rows that do not count are to be 0."""
        if self._of is not None:
            return jax.ops.segment_sum(
                x, self._of, num_segments=self.count, indices_are_sorted=self._is_in_order
            )
        return jnp.sum(x.reshape(self.count, self.rows // max(self.count, 1)), axis=1)

    def spread(self, x: Array) -> Array:
        """[B] -> [N]: each row gets its sequence's."""
        if self._of is not None:
            return x.at[self._of].get(mode="fill", fill_value=0)
        return jnp.repeat(x, self.rows // max(self.count, 1), total_repeat_length=self.rows)


def token_weights(tokens: Array, sequences: Sequences, options: Options) -> Array:
    """Each token's weight where their losses become one (src/losses/aggregation.h): float32, [] or [N]. ``tokens``: n_b [B],
    those in use of each sequence; with M of all, B sequences, empty ones included.

    Counts are floored at 1; what the caller gives (num_items) is not, and 0 of it gives 0.
    """
    aggregation, count = options.choice("aggregation"), max(sequences.count, 1)
    if aggregation == "seq_mean_token_mean":
        return sequences.spread(1 / (count * jnp.maximum(tokens, 1.0)))
    if aggregation == "token_mean":
        return _over_items(jnp.maximum(jnp.sum(tokens), 1.0), options)
    if aggregation == "seq_mean_token_sum_norm":
        given = options.integer("max_length")
        longest = given if given > 0 else sequences.length
        return jnp.float32(1 / max(sequences.count * longest, 1))
    if aggregation == "seq_mean_token_sum":
        return jnp.float32(1 / count)
    if aggregation == "sum":
        return _over_items(jnp.float32(1), options)
    assert aggregation == "none", aggregation
    return jnp.float32(1)


def _over_items(otherwise: Array, options: Options) -> Array:
    if not options.is_given("num_items"):
        return 1 / otherwise
    return inverse_or_zero(jnp.asarray(options.number("num_items"), jnp.float32))
