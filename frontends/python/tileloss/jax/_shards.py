"""The vocabulary cut over a mesh axis: sweeps over a shard, states merged by a collective on [N]-sized arrays.

The whole vocabulary is cut into SLICES slices wherever the shards end on them, and every shard sweeps its own slices one by one.
All shards then merge all slices in their order, so that the state, and what the row stage makes of it, has the same bits on every
shard and for any number of shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from tileloss._core.views import WORD
from tileloss.jax._devices import varying, varying_alike
from tileloss.jax._rows.state import RowState, merge
from tileloss.jax._sweeps.operands import ELSEWHERE, BackwardRows, Logits, Operand, Spec, Target
from tileloss.jax._sweeps.slots import slot_logits

SLICES = 8
_Run = Callable[..., Any]  # Choice.run
_Tree = TypeVar("_Tree")


@dataclass(frozen=True)
class Shards:
    """Shards of one width, the last of which may hold padding, or nothing else."""

    axis: str
    count: int
    width: int  # columns of a shard
    classes: int  # of the whole vocabulary, padding excluded

    def forward(self, run: _Run, operand: Operand, target: Target, spec: Spec) -> RowState:
        """The state of the whole vocabulary, and so are the target's classes and weights."""
        total = self.count * self.width
        slices = SLICES if SLICES % self.count == 0 and total % SLICES == 0 else self.count
        if spec.has_allowed and total // slices % WORD:
            slices = self.count
        of_shard, width = slices // self.count, total // slices
        shard = lax.axis_index(self.axis)
        operand, target = self._here((operand, target))

        def state_of(i: int) -> RowState:
            start = shard * self.width + i * width
            here = self._columns_from(target, start, width)

            def sweep(columns: int) -> RowState:
                if columns == 0:
                    return varying_alike((here.empty(spec.sums), here.labels))[0]
                part = spec._replace(first=i * width, columns=columns)
                found = run("forward", operand, _first(here, columns), part)
                return varying_alike((found, here.labels))[0]

            state: RowState = self._by_columns(start, width, sweep)
            if state.argmax is None:
                return state
            classes = jnp.where(state.argmax < 0, -1, state.argmax + start)
            return state._replace(argmax=classes.astype(jnp.int32))

        states = [state_of(i) for i in range(of_shard)]
        ours = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        # A sum with zeros: it has the bits of the one number that is not 0, and all shards know that they hold the same.
        placed = jax.tree.map(
            lambda leaf: lax.dynamic_update_slice_in_dim(
                jnp.zeros((slices, *leaf.shape[1:]), leaf.dtype), leaf, shard * of_shard, axis=0
            ),
            ours,
        )
        gathered = self._sum(placed)
        first, rest = (jax.tree.map(itemgetter(of), gathered) for of in (0, slice(1, None)))
        whole, _ = lax.scan(lambda state, other: (merge(state, other), None), first, rest)
        return whole

    def slot_logits(self, operand: Operand, columns: Array, target: Target, spec: Spec) -> Array:
        """As that of one device: each shard has its own columns', 0 stands for the others'."""
        operand, columns, target = self._here((operand, columns, target))
        here = _columns_here(columns, lax.axis_index(self.axis) * self.width, self.width)
        z = slot_logits(operand, jnp.where(here < 0, 0, here), target, spec)
        found: Array = self._sum(jnp.where(here < 0, 0.0, z))
        return found

    def backward(
        self, run: _Run, operand: Operand, target: Target, rows: BackwardRows, spec: Spec
    ) -> Operand:
        """The gradient of this shard's columns, and of all hidden states: summed over the shards in float32."""
        start = lax.axis_index(self.axis) * self.width
        whole = operand
        operand, target, rows = self._here((operand, target, rows))
        here = self._columns_from(target, start, self.width)
        if rows.slots is not None:
            columns = _columns_here(rows.slots.columns, start, self.width)
            rows = rows._replace(slots=rows.slots._replace(columns=columns))
        spec = spec._replace(dhidden_dtype=jnp.float32)

        def sweep(columns: int) -> Operand:
            if columns == 0:
                zeros = jax.eval_shape(partial(sweep, self.width))
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
                return varying_alike((zeros, operand))[0]
            part = spec._replace(columns=columns)
            return run("backward", operand, _first(here, columns), rows, part)

        gradient: Operand = self._by_columns(start, self.width, sweep)
        if isinstance(gradient, Logits):
            return gradient
        of_rows = {name: getattr(gradient, name) for name in ("hidden", "hidden_r")}
        of_rows = {name: x for name, x in of_rows.items() if x is not None}
        if self._is_checked(whole):
            of_rows = self._sum(of_rows)
        rounded = {name: x.astype(getattr(operand, name).dtype) for name, x in of_rows.items()}
        return gradient._replace(**rounded)

    def upstream(self, operand: Operand, gradient: Array) -> Array:
        """The upstream gradient of the loss. Where shard_map does not check what varies (check_vma=False), each shard has a part
        of it, as of a psum's, and JAX adds up dhidden; where it does, each has all of it."""
        return gradient if self._is_checked(operand) else self._sum(gradient)

    def _here(self, tree: _Tree) -> _Tree:
        """What a sweep gets, all of it as varying over this axis too, as custom calls and loops want it."""
        return varying_alike((tree, lax.axis_index(self.axis)))[0]

    def _sum(self, tree: Any) -> Any:
        return lax.psum(tree, self.axis)  # type: ignore[no-untyped-call]

    def _is_checked(self, operand: Operand) -> bool:
        return any(self.axis in varying(x) for x in jax.tree.leaves(operand))

    def _columns_from(self, target: Target, start: Array, width: int) -> Target:
        """The target as columns from class ``start`` on, with weights of at least ``width``: 0 in the padding."""
        arrays, weights = target.arrays, target.class_weights
        if weights is not None:
            padded = jnp.pad(weights, (0, (self.count + 1) * self.width - self.classes))
            here = lax.dynamic_slice_in_dim(padded, start, self.width)
            arrays = arrays | {"class_weights": here}
        return target._replace(labels=_columns_here(target.labels, start, width), arrays=arrays)

    def _by_columns(self, start: Array, width: int, sweep: Callable[[int], Any]) -> Any:
        """sweep(columns): ``width`` of them from class ``start`` on, less those of the padding."""
        if self.classes == self.count * self.width:
            return sweep(width)
        here = jnp.clip(self.classes - start, 0, width)
        counts = sorted({0, self.classes % width, width})
        which = jnp.searchsorted(jnp.array(counts), here)
        return lax.switch(which, [partial(sweep, c) for c in counts])


def _first(target: Target, columns: int) -> Target:
    """The target with the weights of so many columns."""
    weights = target.class_weights
    return target if weights is None else target.replaced(class_weights=weights[:columns])


def _columns_here(labels: Array, start: Array, width: int) -> Array:
    """Labels as columns from class ``start`` on; ELSEWHERE and UNUSED are negative."""
    here = labels - start
    column = jnp.where((here >= 0) & (here < width), here, ELSEWHERE)
    return jnp.where(labels < 0, labels, column).astype(jnp.int32)
