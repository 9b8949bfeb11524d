"""One way to call Pallas, and how the kernels run elsewhere than on a TPU: in the interpreter, or compiled for a chip by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from tileloss.jax._devices import varying, varying_alike

Index = Callable[..., tuple[Any, Any]]  # which block of an array a grid step sees
# A grid's dimension: on any core, or one after the other.
Order = Literal["parallel", "arbitrary"]
PARALLEL: Final = "parallel"
IN_ORDER: Final = "arbitrary"


class Settings(NamedTuple):
    interpret: Any = False  # pltpu.InterpretParams: run in the interpreter
    device_kind: str | None = None  # compile for this one; None: for the device that there is


_settings = Settings()


def settings() -> Settings:
    return _settings


@contextmanager
def using(**changes: Any) -> Iterator[None]:
    """For checks: what is traced meanwhile is traced with these `Settings`."""
    global _settings
    before, _settings = _settings, _settings._replace(**changes)
    try:
        yield
    finally:
        _settings = before


def shaped(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Of an output."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


class Blocked(NamedTuple):
    """An operand or output, a tree of arrays or shapes, with its block and which block grid step (i, j) sees."""

    tree: Any
    block: tuple[int, int] | None = None  # None: a few scalars, in SMEM
    at: Index | None = None

    @property
    def specs(self) -> Any:
        spec = pl.BlockSpec(self.block, self.at)
        if self.block is None:
            spec = pl.BlockSpec(memory_space=pltpu.SMEM)
        return jax.tree.map(lambda _: spec, self.tree)


def _map_blocked(function: Callable[[Blocked], Any], tree: Any) -> Any:
    return jax.tree.map(function, tree, is_leaf=lambda x: isinstance(x, Blocked))


def call(
    kernel: partial[None],
    operands: Any,
    outputs: tuple[Blocked, ...],
    *,
    grid: tuple[int, int],
    order: tuple[Order, Order],
    vmem_limit: int,
    scratch: tuple[Any, ...] = (),
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """pallas_call: the kernel gets the operands', the outputs' and the scratch's references, trees as they were. ``operands``: a
    tuple of trees of Blocked.

    ``aliases``: the operand in whose memory an output lies. The interpreter cannot do that with an array that is no whole number
    of blocks.
    """
    if _settings.interpret:
        aliases = None
    # Within shard_map all operands of a kernel must differ between the shards of the same mesh axes, and its outputs do.
    arrays = varying_alike(_map_blocked(lambda operand: operand.tree, operands))
    axes = varying(jax.tree.leaves(arrays)[0])
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=_map_blocked(lambda operand: operand.specs, operands),
        out_specs=tuple(output.specs for output in outputs),
        out_shape=tuple(
            jax.tree.map(partial(_varying_over, axes=axes), output.tree) for output in outputs
        ),
        scratch_shapes=scratch,
        input_output_aliases=dict(aliases or {}),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=order, vmem_limit_bytes=vmem_limit
        ),
        interpret=_settings.interpret,
        name=f"tileloss_{kernel.func.__name__.strip('_')}",
    )(*arrays)


def _varying_over(shape: Any, axes: frozenset[str]) -> Any:
    if not axes:
        return shape
    kind: dict[str, Any] = {"vma": axes}
    if hasattr(jax.sharding, "ManualAxisType"):  # jax 0.12's name for it
        kind = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, **kind)  # type: ignore[no-untyped-call]
