"""The losses of arrays of JAX in float64, by torch's autograd of definitions.py."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

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
