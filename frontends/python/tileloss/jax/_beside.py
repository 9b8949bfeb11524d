"""What a loss is told of a row beside its label: checked, with one leading dimension, by the names in tileloss_args."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tileloss.jax._arguments import compute_dtype, floats
from tileloss.jax._devices import Leading
from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec

# Each function here has what it checks first, then the student that it is held against, flat, the leading dimensions
# that it had, and its spec; and gives the arrays and the spec of both.
Beside = tuple[dict[str, Array], Spec]


def teacher_logits(teacher: Any, student: Operand, rows: Leading, spec: Spec) -> Beside:
    assert isinstance(student, Logits)
    array, logits = floats("teacher", teacher), student.logits
    if array.dtype != logits.dtype:
        raise TypeError(f"teacher: expected logits' dtype {logits.dtype}, got {array.dtype}")
    if array.shape != (*rows.shape, logits.shape[-1]):
        raise ValueError(
            f"teacher: expected logits' shape {[*rows.shape, logits.shape[-1]]}, got {list(array.shape)}"
        )
    return {"teacher_logits": rows.flat(array, array.shape[-1])}, spec


def teacher_head(
    hidden: Any,
    head: Any,
    bias: Any,
    seen: DTypeLike | None,
    student: Operand,
    rows: Leading,
    spec: Spec,
) -> Beside:
    """``seen``: what the products of both sides are to see; None: bfloat16 where all four are that."""
    assert isinstance(student, LmHead) and student.hidden is not None and student.head is not None
    hidden, head = floats("teacher_hidden", hidden), floats("teacher_head", head)
    if hidden.ndim == 0 or hidden.shape[:-1] != rows.shape or hidden.shape[-1] == 0:
        shape = ", ".join(str(n) for n in [*rows.shape, "G"])
        raise ValueError(f"teacher_hidden: expected shape [{shape}], got {list(hidden.shape)}")
    vocab, size = _vocab(student, spec), hidden.shape[-1]
    expected = [size, vocab] if spec.head_layout == "HV" else [vocab, size]
    if list(head.shape) != expected:
        raise ValueError(
            f"teacher_head: expected shape {expected} of head_layout {spec.head_layout!r}, got {list(head.shape)}"
        )
    found = {"teacher_hidden": rows.flat(hidden, hidden.shape[-1]), "teacher_head": head}
    if bias is not None:
        found["teacher_bias"] = bias = floats("teacher_bias", bias)
        if bias.shape != (vocab,):
            raise ValueError(f"teacher_bias: expected shape [{vocab}], got {list(bias.shape)}")
    both = compute_dtype(seen, student.hidden, student.head, hidden, head)
    return found, spec._replace(compute_dtype=both)


def target_probs(probs: Any, student: Operand, rows: Leading, spec: Spec) -> Beside:
    """Class probabilities; of a float type that the library does not take as float32."""
    array, shape = jnp.asarray(probs), [*rows.shape, _vocab(student, spec)]
    if list(array.shape) != shape:
        raise ValueError(
            f"labels: expected class probabilities of the logits' shape {shape}, got {list(array.shape)}"
        )
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        array = array.astype(jnp.float32)
    return {"target_probs": rows.flat(array, array.shape[-1])}, spec


def teacher_columns(ids: Any, logprobs: Any, student: Operand, rows: Leading, spec: Spec) -> Beside:
    """Some columns of a teacher. What ids hold only the call knows: `_apply_pair` looks at them."""
    of_columns, log_q = jnp.asarray(ids), floats("teacher_logprobs", logprobs)
    if not jnp.issubdtype(of_columns.dtype, jnp.integer):
        raise TypeError(f"teacher_ids: expected integers, got {of_columns.dtype}")
    if of_columns.ndim == 0 or of_columns.shape[:-1] != rows.shape or of_columns.shape[-1] == 0:
        shape = ", ".join(str(n) for n in [*rows.shape, "K"])
        raise ValueError(f"teacher_ids: expected shape [{shape}], got {list(of_columns.shape)}")
    if log_q.shape != of_columns.shape:
        raise ValueError(
            f"teacher_logprobs: expected teacher_ids' shape {list(of_columns.shape)}, got {list(log_q.shape)}"
        )
    return {
        "teacher_ids": rows.flat(of_columns, of_columns.shape[-1]),
        "teacher_logprobs": rows.flat(log_q, log_q.shape[-1]),
    }, spec


def _vocab(student: Operand, spec: Spec) -> int:
    if isinstance(student, Logits):
        return student.logits.shape[-1]
    assert student.head is not None
    return student.head.shape[spec.head_layout.index("V")]
