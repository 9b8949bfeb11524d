"""Arrays that lie on several devices: what JAX's types tell of them, and what has to be done for them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

_Tree = TypeVar("_Tree")


def varying_alike(arrays: _Tree, but: str | None = None) -> _Tree:
    """Inside of shard_map every array as one that varies over all mesh axes, ``but`` one, over which any of them does.

    Loops and custom calls want that of what goes in. The gradient of an array that was the same on all devices, a replicated
    head, is summed over them by the transpose of this.
    """
    axes = frozenset[str]().union(*(varying(x) for x in jax.tree.leaves(arrays))) - {but}

    def cast(x: Array) -> Array:
        missing = axes - varying(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    cast_arrays: _Tree = jax.tree.map(cast, arrays)
    return cast_arrays


def type_like(x: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """The type of a custom call's result: on x's mesh, and varying inside of shard_map as x does."""
    like: Any = jax.typeof(x)
    spec = PartitionSpec(*(None for _ in shape))  # type: ignore[no-untyped-call]
    sharding = NamedSharding(like.sharding.mesh, spec)
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


class Leading:
    """The leading dimensions of an operand [..., C], and how its mesh's explicit axes cut them."""

    def __init__(self, operand: Array) -> None:
        sharding = jax.typeof(operand).sharding
        self._operand, self._mesh = operand, sharding.mesh
        self.shape, self._cut = operand.shape[:-1], tuple(sharding.spec)[:-1]
        self._axes = tuple(axis for cut in self._cut for axis in axes_of(cut))

    @property
    def is_cut_within(self) -> bool:
        """Whether another than the first is cut: the rows that a device has are not next to each other then."""
        return any(self._cut[1:])

    def flat(self, x: Array, *rest: int) -> Array:
        """x [*shape, *rest], or [N, *rest], as [N, *rest]. Where the operand is cut within, its rows stay where they are, in the
        devices' order; those of x go with them."""
        of_x = jax.typeof(x).sharding
        if not self.is_cut_within and not any(of_x.spec[1 : x.ndim - len(rest)]):
            return x.reshape(prod(self.shape), *rest)

        def flat_part(part: Array) -> Array:
            return part.reshape(prod(part.shape[: len(self.shape)]), *rest)

        return self._by_parts(flat_part, x, (*self.shape, *rest), self._cut, (self._axes,))

    def shaped(self, x: Array) -> Array:
        """[N, ...] in `flat`'s order as [*shape, ...], cut as the operand is."""
        if not self.is_cut_within:
            return x.reshape(*self.shape, *x.shape[1:])
        counts = [prod(self._mesh.shape[axis] for axis in axes_of(cut)) for cut in self._cut]
        of_part = [n // count for n, count in zip(self.shape, counts, strict=True)]

        def shaped_part(part: Array) -> Array:
            return part.reshape(*of_part, *x.shape[1:])

        return self._by_parts(shaped_part, x, x.shape, (self._axes,), self._cut)

    def _by_parts(
        self,
        function: Callable[[Array], Array],
        x: Array,
        shape: tuple[int, ...],
        before: tuple[Any, ...],
        after: tuple[Any, ...],
    ) -> Array:
        """``function`` of each device's part of x, which is first brought to ``shape`` and cut as ``before`` tells."""
        mesh = self._mesh if self._mesh.explicit_axes else jax.typeof(x).sharding.mesh
        specs = PartitionSpec(*before), PartitionSpec(*after)  # type: ignore[no-untyped-call]
        map_parts = jax.shard_map(
            function, axis_names=set(self._axes), in_specs=specs[0], out_specs=specs[1]
        )
        on_auto = jax.sharding.auto_axes(
            lambda x, _: map_parts(x.reshape(shape)),
            axes=mesh.explicit_axes,
            out_sharding=NamedSharding(mesh, specs[1]),
        )
        # Outside of jit x may be on one device: the operand tells of the others.
        found: Array = jax.jit(on_auto, keep_unused=True)(x, self._operand)
        return found


def on_auto_axes(function: Callable[..., Any], *arguments: Any, rows: Any, by_rows: Any) -> Any:
    """function(*arguments), with the mesh's explicit axes left to XLA's partitioner in it.

    ``by_rows``: bools, a tree as the results' or the top of one: whether a result is cut as the first dimension of ``rows``; if
    not, it is replicated.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments)]
    explicit = [mesh for mesh in meshes if mesh.explicit_axes]
    if not explicit:
        return function(*arguments)
    cut = jax.typeof(rows).sharding.spec[0]
    shardings = jax.tree.map(
        lambda is_by_rows: NamedSharding(explicit[0], PartitionSpec(*[cut] * is_by_rows)),  # type: ignore[no-untyped-call]
        by_rows,
    )
    on_auto = jax.sharding.auto_axes(
        function, axes=explicit[0].explicit_axes, out_sharding=shardings
    )
    return on_auto(*arguments)


def may_be_cut(arrays: Any) -> bool:
    """Whether XLA's partitioner may find them on several devices, as far as their types tell."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    return any(m.shape[axis] > 1 for m in meshes for axis in (*m.auto_axes, *m.explicit_axes))


def axes_of_rows(x: Array) -> tuple[str, ...] | None:
    """The mesh axes over which a kernel that XLA cannot partition is to cut the rows of x [N, ...]: those that x's type tells,
    and all that are left to XLA, of which no type tells; but none that the rows do not divide by. None: x lies on one device,
    as far as its type tells, or on those of a shard_map around."""
    sharding = jax.typeof(x).sharding
    mesh, cut = sharding.mesh, sharding.spec[0]
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return None
    axes: list[str] = []
    rows = x.shape[0]
    for axis in (*axes_of(cut), *mesh.auto_axes):
        if rows % mesh.shape[axis] == 0:
            axes.append(axis)
            rows //= mesh.shape[axis]
    return tuple(axes)


def axes_of(cut: Any) -> tuple[str, ...]:
    """The mesh axes of one dimension in a PartitionSpec."""
    return () if cut is None else (cut,) if isinstance(cut, str) else tuple(cut)


def is_in_shard_map(x: Array) -> bool:
    return bool(jax.typeof(x).sharding.mesh.manual_axes)


def varying(x: Array) -> frozenset[str]:
    """The mesh axes of shard_map over which x varies."""
    found: Any = jax.typeof(x)
    # jax renamed it.
    axes: frozenset[str] = found.vma if hasattr(found, "vma") else found.manual_axis_type.varying
    return axes
