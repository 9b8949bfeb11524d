"""What the losses are made of, logits or hidden states with their head: checked, and flat."""

from __future__ import annotations

from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec

_LAYOUTS = ("HV", "VH")


def flat(operand: Operand, labels: Array | None, spec: Spec) -> tuple[Operand, int, Spec]:
    """The operand with one leading dimension, the size of its vocabulary, and ``spec`` with a head's compute_dtype.

    ``labels``: of the operand's leading dimensions; None: there are none to hold against them.

    Raises:
        TypeError, ValueError: a dtype or a shape, by the public functions' names.
    """
    if isinstance(operand, Logits):
        logits = floats("logits", operand.logits)
        _check_leading("logits", "V", logits, labels)
        return Logits(by_rows(logits)), logits.shape[-1], spec
    return _flat_head(operand, labels, spec)


def by_rows(x: Array) -> Array:
    """[..., C] with one leading dimension."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def checked_labels(labels: Any) -> Array:
    array = jnp.asarray(labels)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"labels: expected integers, got {array.dtype}")
    return array


def _flat_head(operand: LmHead, labels: Array | None, spec: Spec) -> tuple[LmHead, int, Spec]:
    hidden, head = floats("hidden", operand.hidden), floats("head", operand.head)
    if spec.head_layout not in _LAYOUTS:
        raise ValueError(
            f"head_layout: expected one of {', '.join(_LAYOUTS)}, got {spec.head_layout!r}"
        )
    _check_leading("hidden", "H", hidden, labels)
    size = hidden.shape[-1]
    if size == 0:
        raise ValueError(
            f"hidden: expected a last dimension of at least 1, got shape {list(hidden.shape)}"
        )
    if head.ndim != 2 or head.shape[spec.head_layout.index("H")] != size:
        expected = f"[{size}, V]" if spec.head_layout == "HV" else f"[V, {size}]"
        raise ValueError(
            f"head: expected shape {expected} of head_layout {spec.head_layout!r}, got {list(head.shape)}"
        )
    vocab = head.shape[spec.head_layout.index("V")]
    bias = None if operand.bias is None else floats("bias", operand.bias)
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias: expected shape [{vocab}], got {list(bias.shape)}")
    seen = compute_dtype(spec.compute_dtype, hidden, head)
    return LmHead(by_rows(hidden), head, bias), vocab, spec._replace(compute_dtype=seen)


def floats(name: str, x: Any) -> Array:
    array = jnp.asarray(x)
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {array.dtype}")
    return array


def _check_leading(name: str, last: str, x: Array, labels: Array | None) -> None:
    if labels is None:
        if x.ndim == 0:
            raise ValueError(f"{name}: expected [..., {last}], got shape []")
    elif x.ndim == 0 or x.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels: expected {name}'{'' if name.endswith('s') else 's'} leading dimensions {list(x.shape[:-1])}, "
            f"got {list(labels.shape)}"
        )


def compute_dtype(given: DTypeLike | None, *tensors: Array) -> DTypeLike:
    """What the products of ``tensors`` see."""
    if given is None:
        all_narrow = all(x.dtype == jnp.bfloat16 for x in tensors)
        return jnp.bfloat16 if all_narrow else jnp.float32
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"compute_dtype: expected float32 or bfloat16, got {given}")
    return dtype
