"""Class probabilities in place of labels, as optax and `torch.nn.functional.cross_entropy` take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from tileloss.jax._apply_pair import pair_loss_of
from tileloss.jax._beside import target_probs
from tileloss.jax._sweeps.operands import LmHead, Operand, Spec


def is_probabilities(labels: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(labels).dtype, jnp.floating))


def soft_cross_entropy(
    operand: Operand,
    probs: Array,
    vectors: Mapping[str, Array | None],
    given: Mapping[str, Any],
    *,
    head: Spec | None = None,
    grad_in_forward: bool | None,
    implementation: str | Iterable[str] | None,
    vocab_axis: str | None,
) -> Array:
    """The loss; arguments as `_apply.loss_of`'s, of cross_entropy."""
    if vocab_axis is not None:
        raise ValueError(f"vocab_axis: expected None with class probabilities, got {vocab_axis!r}")
    if given["z_loss"] != 0:
        raise ValueError(f"z_loss: expected 0 with class probabilities, got {given['z_loss']}")
    loss, _ = pair_loss_of(
        "linear_soft_cross_entropy" if isinstance(operand, LmHead) else "soft_cross_entropy",
        operand,
        partial(target_probs, probs),
        None,
        vectors,
        {name: value for name, value in given.items() if name != "z_loss"},
        (),
        head=head,
        grad_in_forward=grad_in_forward,
        implementation=implementation,
    )
    return loss
