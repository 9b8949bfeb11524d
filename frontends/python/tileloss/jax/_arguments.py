"""What the losses are made of, logits or hidden states with their head: checked, and flat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import prod
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from tileloss._core.slots import SLOTS
from tileloss.jax._devices import Leading
from tileloss.jax._rows.inputs import is_used, wide
from tileloss.jax._rows.options import Options
from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec

_LAYOUTS = ("HV", "VH")


def flat(operand: Operand, labels: Array | None, spec: Spec) -> tuple[Operand, Leading, int, Spec]:
    """The operand with one leading dimension, those that it had, the size of its vocabulary, and ``spec`` with a head's
    compute_dtype.

    ``labels``: of the operand's leading dimensions; None: there are none to hold against them.

    Raises:
        TypeError, ValueError: a dtype or a shape, by the public functions' names.
    """
    if isinstance(operand, Logits):
        logits = floats("logits", operand.logits)
        _check_leading("logits", "V", logits, labels)
        rows, vocab = Leading(logits), logits.shape[-1]
        return Logits(rows.flat(logits, vocab)), rows, vocab, spec
    return _flat_head(operand, labels, spec)


def checked_labels(labels: Any) -> Array:
    array = jnp.asarray(labels)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"labels: expected integers, got {array.dtype}")
    return array


def flat_vectors(
    vectors: Mapping[str, Any], rows: Leading, columns: int, options: Options
) -> tuple[dict[str, Array], list[Array]]:
    """What is given besides labels, by the names in tileloss_args, with one dimension; and, as bool [], whether what only the
    program knows of them is right.

    ``rows``: the operand's. ``columns``: of the whole vocabulary, padding included.

    Raises:
        TypeError, ValueError: a dtype or a shape, or offsets that are known and cannot be.
    """
    found: dict[str, Array] = {}
    shape, count = rows.shape, prod(rows.shape)
    are_right: list[Array] = []
    for name, given in vectors.items():
        if given is None:
            continue
        x = jnp.asarray(given)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"{name}: expected numbers, got {x.dtype}")
        if SLOTS[name].shape == "C":
            _check_vector("weight", x)
            valid = options.integer("valid_vocab")
            x = x[:valid] if 0 < valid < columns == x.size else x
        elif SLOTS[name].shape == "B+1":
            x, is_right = _checked_offsets(name, given, count)
            are_right += is_right
        elif SLOTS[name].shape == "B|N" and options.choice("advantage_level") != "token":
            if x.ndim != 1 and (x.ndim != 2 or x.shape[1] != 1):
                raise ValueError(
                    f"{name}: expected [B] or [B, 1] of sequences, or labels' shape {list(shape)}, got {list(x.shape)}"
                )
        elif x.shape != (shape if x.ndim != 1 else (count,)):
            # Of another shape numbers would go to other rows than meant.
            raise ValueError(
                f"{name}: expected labels' shape {list(shape)}, or [{count}], got {list(x.shape)}"
            )
        else:
            x = rows.flat(x)
        found[name] = x.reshape(-1)
    return found, are_right


def _check_vector(name: str, x: Array) -> None:
    if x.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got {list(x.shape)}")


def _checked_offsets(name: str, given: Any, rows: int) -> tuple[Array, list[Array]]:
    """The offsets, and as bool [] whether they can be, where only the program knows: of those that cannot the library is given
    others."""
    offsets, steps = jnp.asarray(given), f"{name}[{{}}]: expected {{}}, got {{}}"
    _check_vector(name, offsets)
    if not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {offsets.dtype}")
    last = offsets.size - 1
    if last < 0:  # the library's to refuse
        return offsets, []
    if isinstance(given, jax.core.Tracer) or not getattr(given, "is_fully_addressable", True):
        is_right = (offsets[0] == 0) & (offsets[-1] == rows) & jnp.all(offsets[1:] >= offsets[:-1])
        others = jnp.where(jnp.arange(last + 1) == last, rows, 0)
        return jnp.where(is_right, offsets, others), [is_right]
    # In the library's words.
    known = np.asarray(given).tolist()
    if known[0] != 0:
        raise ValueError(steps.format(0, 0, known[0]))
    for i in range(1, len(known)):
        if known[i] < known[i - 1]:
            message = f">= the one before it, {known[i - 1]}"
            raise ValueError(steps.format(i, message, known[i]))
    if known[-1] != rows:
        raise ValueError(steps.format(last, f"the number of rows, {rows}", known[-1]))
    return offsets, []


def wrong_unless(are_right: list[Array], labels: Array, options: Options) -> Array:
    """The labels [N]; one that is no class in place of each that counts where not all of ``are_right``, bool [] or [N], are."""
    if not are_right:
        return labels
    labels = wide(labels)
    limits, ignored = np.iinfo(labels.dtype), options.integer("ignore_index")
    wrong = next(x for x in (-1, -2, limits.max, limits.max - 1) if limits.min <= x != ignored)
    is_wrong = is_used(labels, options) & ~reduce(and_, are_right)
    return jnp.where(is_wrong, jnp.asarray(wrong, labels.dtype), labels)


def _flat_head(
    operand: LmHead, labels: Array | None, spec: Spec
) -> tuple[LmHead, Leading, int, Spec]:
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
    rows = Leading(hidden)
    flat_operand = LmHead(rows.flat(hidden, size), head, bias)
    return flat_operand, rows, vocab, spec._replace(compute_dtype=seen)


def floats(name: str, x: Any) -> Array:
    array = jnp.asarray(x)
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {array.dtype}")
    if not all(isinstance(n, int) for n in array.shape):
        raise ValueError(
            f"{name}: expected a shape of known sizes (jax.export: no symbolic ones), got [{', '.join(map(str, array.shape))}]"
        )
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
