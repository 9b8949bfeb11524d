"""Arrays that lie on several devices: what JAX's types tell of them, and what has to be done for them."""

from __future__ import annotations

from collections.abc import Callable
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
    told = () if cut is None else (cut,) if isinstance(cut, str) else tuple(cut)
    axes: list[str] = []
    rows = x.shape[0]
    for axis in (*told, *mesh.auto_axes):
        if rows % mesh.shape[axis] == 0:
            axes.append(axis)
            rows //= mesh.shape[axis]
    return tuple(axes)


def is_in_shard_map(x: Array) -> bool:
    return bool(jax.typeof(x).sharding.mesh.manual_axes)


def varying(x: Array) -> frozenset[str]:
    """The mesh axes of shard_map over which x varies."""
    found: Any = jax.typeof(x)
    # jax renamed it.
    axes: frozenset[str] = found.vma if hasattr(found, "vma") else found.manual_axis_type.varying
    return axes
