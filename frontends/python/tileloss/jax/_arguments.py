"""What the losses are made of, logits or hidden states with their head: checked, and flat."""

from __future__ import annotations

from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec
from tileloss.jax._sweeps.pairs import Pair

_LAYOUTS = ("HV", "VH")


def flat(operand: Operand, labels: Array, spec: Spec) -> tuple[Operand, int, Spec]:
    """The operand with one leading dimension, the size of its vocabulary, and ``spec`` with a head's compute_dtype.

    Raises:
        TypeError, ValueError: a dtype or a shape, by the public functions' names.
    """
    if isinstance(operand, Logits):
        logits = _floats("logits", operand.logits)
        check_leading("logits'", logits, labels)
        return Logits(logits.reshape(labels.size, logits.shape[-1])), logits.shape[-1], spec
    return _flat_head(operand, labels, spec)


def flat_pair(logits: Any, teacher: Any) -> Pair:
    """A student's and a teacher's logits with one leading dimension.

    Raises:
        TypeError, ValueError: a dtype or a shape.
    """
    student, of_teacher = _floats("logits", logits), _floats("teacher", teacher)
    if student.ndim == 0:
        raise ValueError("logits: expected [..., V], got shape []")
    if of_teacher.dtype != student.dtype:
        raise TypeError(f"teacher: expected logits' dtype {student.dtype}, got {of_teacher.dtype}")
    if of_teacher.shape != student.shape:
        raise ValueError(
            f"teacher: expected logits' shape {list(student.shape)}, got {list(of_teacher.shape)}"
        )
    flat_shape = (prod(student.shape[:-1]), student.shape[-1])
    return Pair(student.reshape(flat_shape), of_teacher.reshape(flat_shape))


def checked_labels(labels: Any) -> Array:
    array = jnp.asarray(labels)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"labels: expected integers, got {array.dtype}")
    return array


def _flat_head(operand: LmHead, labels: Array, spec: Spec) -> tuple[LmHead, int, Spec]:
    hidden, head = _floats("hidden", operand.hidden), _floats("head", operand.head)
    if spec.head_layout not in _LAYOUTS:
        raise ValueError(
            f"head_layout: expected one of {', '.join(_LAYOUTS)}, got {spec.head_layout!r}"
        )
    check_leading("hidden's", hidden, labels)
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
    bias = None if operand.bias is None else _floats("bias", operand.bias)
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias: expected shape [{vocab}], got {list(bias.shape)}")
    compute_dtype = _compute_dtype(spec.compute_dtype, hidden, head)
    operand = LmHead(hidden.reshape(labels.size, size), head, bias)
    return operand, vocab, spec._replace(compute_dtype=compute_dtype)


def _floats(name: str, x: Any) -> Array:
    array = jnp.asarray(x)
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {array.dtype}")
    return array


def check_leading(whose: str, x: Array, labels: Array) -> None:
    if x.ndim == 0 or x.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels: expected {whose} leading dimensions {list(x.shape[:-1])}, got {list(labels.shape)}"
        )


def _compute_dtype(given: DTypeLike | None, hidden: Array, head: Array) -> DTypeLike:
    """What the products see."""
    if given is None:
        both = hidden.dtype == head.dtype == jnp.bfloat16
        return jnp.bfloat16 if both else jnp.float32
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"compute_dtype: expected float32 or bfloat16, got {given}")
    return dtype
