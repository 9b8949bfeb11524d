"""For which platforms a program is: known no sooner than it is lowered, and an error in words there."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_Tree = TypeVar("_Tree")


def only_on(platforms: tuple[str, ...], name: str, arrays: _Tree) -> _Tree:
    """The arrays, in programs that are for ``platforms`` alone.

    Raises:
        ValueError: as the program is lowered: it is for another one as well. ``name``: of the implementation.
    """
    found: _Tree = jax.tree.map(
        lambda x: _only_on_p.bind(x, platforms=platforms, name=name),  # type: ignore[no-untyped-call]
        arrays,
    )
    return found


def _check(found: tuple[str, ...], platforms: tuple[str, ...], name: str) -> None:
    if not {*found} <= {*platforms}:
        others = "" if len(found) == 1 else ' ("xla" is for several at once)'
        raise ValueError(
            f"implementation: {name} runs on {', '.join(platforms)}, the program is for {', '.join(found)}{others}"
        )


def _run(x: Array, *, platforms: tuple[str, ...], name: str) -> Array:
    """Outside of jit."""
    found = {"gpu": "cuda"}.get(platform := next(iter(x.devices())).platform, platform)
    _check((found,), platforms, name)
    return x


def _lower(ctx: Any, x: Any, *, platforms: tuple[str, ...], name: str) -> Any:
    _check(tuple(ctx.platforms or ctx.module_context.platforms), platforms, name)
    return [x]


_only_on_p = Primitive("tileloss_only_on")
_only_on_p.def_impl(_run)  # type: ignore[no-untyped-call]
_only_on_p.def_abstract_eval(lambda x, **_: x)  # type: ignore[no-untyped-call]
mlir.register_lowering(_only_on_p, _lower)
batching.defvectorized(_only_on_p)  # type: ignore[no-untyped-call]
