"""Calls that XLA does not partition by itself, cut by rows: each device sweeps the rows that it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from tileloss.jax._devices import axes_of

_Call = Callable[..., Sequence[Array]]


def cut_by_rows(
    call: _Call, operand_has_rows: Sequence[bool], result_has_rows: Sequence[bool]
) -> _Call:
    """``call`` of arrays, whose first dimension is the rows where the flags say so; the first operand has them.

    Operands without rows are replicated; results without are sums over the rows, and summed over the devices in float32.
    Rows that the devices cannot have in equal parts are gathered.
    """

    def partition(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        rows, spec = operands[0].shape[0], operands[0].sharding.spec
        axes = axes_of(spec[0]) if len(spec) else ()
        count = 1
        for axis in axes:
            count *= mesh.shape[axis]
        if rows % count:
            axes = ()

        def shardings(arrays: Sequence[Any], has_rows: Sequence[bool]) -> tuple[Any, ...]:
            specs = (
                (axes or None, *([None] * (len(x.shape) - 1))) if cut else ()
                for x, cut in zip(arrays, has_rows, strict=True)
            )
            return tuple(
                NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]
                for spec in specs
            )

        def on_each_device(*parts: Array) -> tuple[Array, ...]:
            found = call(*parts)
            return tuple(
                x if cut or not axes else _sum_over(axes, x)
                for x, cut in zip(found, result_has_rows, strict=True)
            )

        return (
            mesh,
            on_each_device,
            shardings(results, result_has_rows),
            shardings(operands, operand_has_rows),
        )

    def rule(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        del mesh
        factors: list[str] = []

        def joined_factors(types: Sequence[Any], has_rows: Sequence[bool]) -> str:
            return ", ".join(
                _factors(t.rank, cut, factors) for t, cut in zip(types, has_rows, strict=True)
            )

        text = f"{joined_factors(operands, operand_has_rows)} -> {joined_factors(results, result_has_rows)}"
        return text, {"need_replication_factors": tuple(factors)}

    partitioned = custom_partitioning(lambda *operands: tuple(call(*operands)))  # type: ignore[no-untyped-call]
    partitioned.def_partition(partition, sharding_rule=rule)  # type: ignore[no-untyped-call]
    # custom_partitioning has no rule for vmap.
    mapped: _Call = sequential_vmap(lambda *operands: partitioned(*operands))  # type: ignore[no-untyped-call]
    return mapped


def map_by_rows(
    call: _Call,
    axes: tuple[str, ...],
    operand_has_rows: Sequence[bool],
    result_has_rows: Sequence[bool],
) -> _Call:
    """The same for calls that XLA cannot even be told how to partition, as libtpu's: the rows are cut over ``axes`` of the first
    operand's mesh, wherever they lay before."""

    def specs(has_rows: Sequence[bool]) -> tuple[PartitionSpec, ...]:
        rows, whole = PartitionSpec(axes or None), PartitionSpec()  # type: ignore[no-untyped-call]
        return tuple(rows if cut else whole for cut in has_rows)

    def on_each_device(*parts: Array) -> tuple[Array, ...]:
        found = zip(call(*parts), result_has_rows, strict=True)
        return tuple(x if cut or not axes else _sum_over(axes, x) for x, cut in found)

    def mapped(*operands: Array) -> Sequence[Array]:
        found: Sequence[Array] = jax.shard_map(
            on_each_device,
            mesh=jax.typeof(operands[0]).sharding.mesh,
            in_specs=specs(operand_has_rows),
            out_specs=specs(result_has_rows),
            check_vma=False,
        )(*operands)
        return found

    return mapped


def _factors(rank: int, has_rows: bool, whole: list[str]) -> str:
    """An array's dimensions in a sharding rule; those that must be whole are added to ``whole``."""
    names = ["n"] if has_rows else []
    while len(names) < rank:
        names.append(f"w{len(whole)}")
        whole.append(names[-1])
    return " ".join(names)


def _sum_over(axes: tuple[str, ...], x: Array) -> Array:
    total: Array = lax.psum(x.astype(jnp.float32), axes)  # type: ignore[no-untyped-call]
    return total.astype(x.dtype)
