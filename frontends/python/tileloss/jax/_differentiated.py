"""Which of a call's arrays are differentiated, as a custom gradient with symbolic zeros is told."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from tileloss.jax._sweeps.operands import Operand

_Inputs = TypeVar("_Inputs")


@jax.tree_util.register_static
class Wanted(tuple[bool, ...]):
    """Which of the operand's arrays are differentiated."""


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, CustomVJPPrimal)


def primals(x: Any, o: _Inputs) -> tuple[Wanted, Operand, _Inputs]:
    """The arguments of a forward rule with symbolic zeros: which are differentiated, and their values."""
    wanted = Wanted(leaf is not None and leaf.perturbed for leaf in x)
    x, o = jax.tree.map(lambda leaf: leaf.value, (x, o), is_leaf=_is_primal)
    return wanted, x, o


def instantiated(gradient: Array | SymbolicZero) -> Array:
    if isinstance(gradient, SymbolicZero):
        return jnp.zeros(gradient.shape, gradient.dtype)
    return gradient
