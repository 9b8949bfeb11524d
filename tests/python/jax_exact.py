"""The losses of arrays of JAX in float64, by torch's autograd of definitions.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tileloss.jax
from checks import solve


def as_torch(x: Any) -> Any:
    if not isinstance(x, jax.Array | np.ndarray):
        return x
    is_integer = np.issubdtype(x.dtype, np.integer) or x.dtype == bool
    return torch.from_numpy(np.array(x, np.int64 if is_integer else np.float64))


def exact(name: str, leaves: Any, *args: Any, **options: Any) -> tuple[Any, list[Any]]:
    """The outputs by name, and the gradients of the leaves: as `checks.solve`, of and as arrays; a head is [V, H]."""
    options = {name: as_torch(x) for name, x in options.items()}
    found = solve(name, [as_torch(x) for x in leaves], *map(as_torch, args), **options)
    outputs = {name: x.numpy() for name, x in found.outputs.items()}
    return outputs, [None if x is None else x.numpy() for x in found.gradients]


def relative(got: Any, right: Any) -> float:
    error = np.asarray(got, np.float64) - right
    return float(np.linalg.norm(error) / np.linalg.norm(right))


def check(
    name: str,
    leaves: Any,
    *args: Any,
    upstream: Any = None,
    rtol: float,
    atol: float = 0.0,
    limit: float,
    **options: Any,
) -> tuple[dict[str, Any], Any]:
    """What the compiled function gives, with the leaves' gradients, once its outputs were compared with `exact`'s, and each
    gradient's relative error with `limit`. Heads are as JAX has them."""
    is_turned = name.startswith("linear_") and options.get("head_layout") != "VH"

    def turned(arrays: Any, has_head: bool = is_turned) -> list[Any]:
        return [x.T if has_head and i == 1 else x for i, x in enumerate(arrays)]

    given = turned(args, is_turned and name == "linear_distillation")
    what = {n: x for n, x in options.items() if n not in ("head_layout", "implementation")}
    wanted, slopes = exact(name, turned(leaves), *given, upstream=upstream, **what)

    def ours(*leaves: Any) -> Any:
        bias = {"bias": leaves[2]} if leaves[2:] else {}
        found = getattr(tileloss.jax, name)(*leaves[:2], *args, **bias, **options)
        loss, rows = found if "outputs" in options else (found, None)
        total = loss if upstream is None else (loss * jnp.asarray(upstream, jnp.float32)).sum()
        return total, {"loss": loss} | ({} if rows is None else rows._asdict())

    step = jax.value_and_grad(ours, range(len(leaves)), has_aux=True)
    (_, found), gradients = jax.jit(step)(*leaves)
    for output, right in wanted.items():
        np.testing.assert_allclose(found[output], right, rtol, atol)
    for x, got, right in zip(leaves, gradients, turned(slopes), strict=True):
        assert got.dtype == x.dtype
        assert relative(got, right) < limit
    return found, gradients
