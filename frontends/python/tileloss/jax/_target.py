"""What a call's rows are compared with, by the names in tileloss_args: checked, with one leading dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from tileloss._core.functions import Function
from tileloss.jax._arguments import compute_dtype, floats
from tileloss.jax._devices import Leading
from tileloss.jax._rows.inputs import wide
from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec

Arrays = dict[str, Array]


def target_arrays(
    function: Function, given: Mapping[str, Any], student: Operand, rows: Leading, spec: Spec
) -> tuple[Arrays, Spec]:
    """Of a target that is not labels alone; and the spec of both sides.

    ``given``: the arguments of a public function. ``student``: flat; ``rows``: the leading dimensions that it had.

    Raises:
        TypeError, ValueError: a dtype or a shape, by the public functions' names.
    """
    if "teacher_hidden" in function.tensors:
        return _teacher_head(given, student, rows, spec)
    if "teacher_logits" in function.tensors:
        return _teacher_logits(given["teacher"], student, rows), spec
    if "teacher_ids" in function.tensors:
        return _teacher_columns(given["teacher_ids"], given["teacher_logprobs"], rows), spec
    if "target_probs" in function.tensors:
        return _probabilities(given["target_probs"], rows, vocab_of(student, spec)), spec
    return {}, spec


def are_columns(arrays: Arrays, columns: int) -> list[Array]:
    """bool [N], of some of a teacher's columns, of which only the program knows: whether none of a row is beyond ``columns`` or
    there twice, nor has a log q above 0 by more than rounding."""
    if "teacher_ids" not in arrays:
        return []
    ids, log_q = wide(arrays["teacher_ids"]), arrays["teacher_logprobs"]
    ordered = jnp.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    wrong = jnp.any(twice, axis=1) | (ordered[:, -1] >= columns)
    return [~(wrong | jnp.any((ids >= 0) & (log_q > 0.001), axis=1))]


def without_columns(arrays: Arrays, has_columns: Array) -> Arrays:
    """The arrays with a teacher's columns in the rows alone that ``has_columns`` [N] names, as the sweeps take them."""
    if "teacher_ids" not in arrays:
        return arrays
    ids = wide(arrays["teacher_ids"])
    is_there = (ids >= 0) & has_columns[:, None]
    return arrays | {"teacher_ids": jnp.where(is_there, ids, -1).astype(jnp.int32)}


def vocab_of(operand: Operand, spec: Spec) -> int:
    if isinstance(operand, Logits):
        return operand.logits.shape[-1]
    assert operand.head is not None
    return operand.head.shape[spec.head_layout.index("V")]


def _teacher_logits(teacher: Any, student: Operand, rows: Leading) -> Arrays:
    assert isinstance(student, Logits)
    array, logits = floats("teacher", teacher), student.logits
    if array.dtype != logits.dtype:
        raise TypeError(f"teacher: expected logits' dtype {logits.dtype}, got {array.dtype}")
    if array.shape != (*rows.shape, logits.shape[-1]):
        raise ValueError(
            f"teacher: expected logits' shape {[*rows.shape, logits.shape[-1]]}, got {list(array.shape)}"
        )
    return {"teacher_logits": rows.flat(array, array.shape[-1])}


def _teacher_head(
    given: Mapping[str, Any], student: Operand, rows: Leading, spec: Spec
) -> tuple[Arrays, Spec]:
    assert isinstance(student, LmHead) and student.hidden is not None and student.head is not None
    names = ("teacher_hidden", "teacher_head", "teacher_bias")
    hidden, head, bias = (None if given[n] is None else floats(n, given[n]) for n in names)
    assert hidden is not None and head is not None
    if hidden.ndim == 0 or hidden.shape[:-1] != rows.shape or hidden.shape[-1] == 0:
        raise ValueError(
            f"teacher_hidden: expected shape {_shape(rows, 'G')}, got {list(hidden.shape)}"
        )
    vocab, size = vocab_of(student, spec), hidden.shape[-1]
    expected = [size, vocab] if spec.head_layout == "HV" else [vocab, size]
    if list(head.shape) != expected:
        raise ValueError(
            f"teacher_head: expected shape {expected} of head_layout {spec.head_layout!r}, got {list(head.shape)}"
        )
    found = {"teacher_hidden": rows.flat(hidden, size), "teacher_head": head}
    if bias is not None:
        found["teacher_bias"] = bias
        if bias.shape != (vocab,):
            raise ValueError(f"teacher_bias: expected shape [{vocab}], got {list(bias.shape)}")
    # What the products of both sides see: bfloat16 where all four are that.
    both = compute_dtype(given["compute_dtype"], student.hidden, student.head, hidden, head)
    return found, spec._replace(compute_dtype=both)


def _teacher_columns(ids: Any, logprobs: Any, rows: Leading) -> Arrays:
    of_columns, log_q = jnp.asarray(ids), floats("teacher_logprobs", logprobs)
    if not jnp.issubdtype(of_columns.dtype, jnp.integer):
        raise TypeError(f"teacher_ids: expected integers, got {of_columns.dtype}")
    if of_columns.ndim == 0 or of_columns.shape[:-1] != rows.shape or of_columns.shape[-1] == 0:
        raise ValueError(
            f"teacher_ids: expected shape {_shape(rows, 'K')}, got {list(of_columns.shape)}"
        )
    if log_q.shape != of_columns.shape:
        raise ValueError(
            f"teacher_logprobs: expected teacher_ids' shape {list(of_columns.shape)}, got {list(log_q.shape)}"
        )
    pairs = {"teacher_ids": of_columns, "teacher_logprobs": log_q}
    return {name: rows.flat(x, x.shape[-1]) for name, x in pairs.items()}


def _probabilities(probs: Any, rows: Leading, vocab: int) -> Arrays:
    """Of a float type that the library does not take as float32."""
    array, shape = jnp.asarray(probs), [*rows.shape, vocab]
    if list(array.shape) != shape:
        raise ValueError(
            f"labels: expected class probabilities of the logits' shape {shape}, got {list(array.shape)}"
        )
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        array = array.astype(jnp.float32)
    return {"target_probs": rows.flat(array, vocab)}


def _shape(rows: Leading, last: str) -> str:
    return f"[{', '.join(map(str, [*rows.shape, last]))}]"
