"""Which of a call's arrays are differentiated, as a custom gradient with symbolic zeros is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal

from tileloss.jax._sweeps.operands import Operand

_Inputs = TypeVar("_Inputs")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@jax.tree_util.register_static
class NeedsGrad(tuple[bool, ...]):
    """Which of the operand's arrays are differentiated."""


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, CustomVJPPrimal)


# By their names in tileloss_args, as the public functions have them.
SHOWN = {"class_weights": "weight", "target_probs": "labels", "teacher_logits": "teacher"}


def primals(x: Any, o: _Inputs) -> tuple[NeedsGrad, Operand, _Inputs]:
    """The arguments of a forward rule with symbolic zeros: which are differentiated, and their values.

    Raises:
        ValueError: one that has no gradient is to be differentiated: its gradient would be 0 in silence.
    """
    needs_grad = NeedsGrad(leaf is not None and leaf.perturbed for leaf in x)
    for path, leaf in jax.tree_util.tree_leaves_with_path(o, is_leaf=_is_primal):
        name = getattr(path[-1], "key", "")
        is_float = jnp.issubdtype(leaf.value.dtype, jnp.floating)
        # A teacher is a constant whatever it is made of.
        if leaf.perturbed and is_float and not name.startswith("teacher_"):
            shown = SHOWN.get(name, name)
            raise ValueError(
                f"{shown}: expected an array without gradient, as it is not differentiated (jax.lax.stop_gradient), got one "
                "that is to be differentiated"
            )
    x, o = jax.tree.map(lambda leaf: leaf.value, (x, o), is_leaf=_is_primal)
    return needs_grad, x, o


def with_results_checked(function: _Function) -> _Function:
    """The function under `jax.debug_nans`: outside of jit it would raise for NaN that stands for "not given" or "does not apply",
    and never gets into what it returns. That is checked."""

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if not jax.config.jax_debug_nans:  # type: ignore[attr-defined]
            return function(*arguments, **named)
        with jax.debug_nans(False):
            found = function(*arguments, **named)
        jax.tree.map(jnp.copy, found)
        return found

    return cast(_Function, checked)
