"""The sweeps as Pallas kernels for TPUs, "pallas_tpu".

tiles.py   the vector work on one tile
rows.py    what the kernels are told of rows and classes, and what XLA makes of what they give
logits.py  the kernels from logits
head.py    the kernels from hidden states and head
blocks.py  how large their blocks are; store.py  what tuning.py, `tileloss.jax.tune`, found
calls.py   pallas_call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.by_rows import map_by_rows
from tileloss.jax._sweeps.operands import BackwardRows, LmHead, Logits, Operand, Spec, Target

try:
    from tileloss.jax._sweeps.tpu import head, logits
except ImportError as error:  # jax 0.9's Pallas needs absl-py, which jax does not bring along
    _MISSING = f"has no Pallas: {error}"
else:
    _MISSING = ""


def forward(operand: Operand, target: Target, spec: Spec) -> RowState:
    """The row states of the columns that ``spec`` names."""

    def sweep(operand: Operand, target: Target, rows: None) -> RowState:
        of: Any = logits.forward if isinstance(operand, Logits) else head.forward
        state: RowState = of(operand, target, spec)
        return state._replace(smoothing_weight=None)

    found: Any = RowState(**dict.fromkeys(spec.sums.arrays, True))  # type: ignore[arg-type]
    state: RowState = _by_rows(sweep, (operand, target, None), found, spec)
    return state._replace(smoothing_weight=target.smoothing_weight(spec))


def backward(operand: Operand, target: Target, rows: BackwardRows, spec: Spec) -> Operand:
    """dL/dlogits, in their memory where nobody reads them later; or dhidden, dhead, dbias as ``spec.needs_grad`` names them."""

    def sweep(operand: Operand, target: Target, rows: BackwardRows) -> Operand:
        of: Any = logits.backward if isinstance(operand, Logits) else head.backward
        gradient: Operand = of(operand, target, rows, spec)
        return gradient

    kind: Any = type(operand)
    found = kind(*(i == 0 for i in range(len(operand))))
    if isinstance(operand, LmHead):
        parts = zip(operand, spec.needs_grad, found, strict=False)
        found = LmHead(*(cut if x is not None and asked else None for x, asked, cut in parts))
    gradient: Any = _by_rows(sweep, (operand, target, rows), found, spec)
    if spec.row_axes is not None:  # a sum over devices is rounded once it is made
        pairs: Any = zip(gradient, operand, strict=True)
        gradient = kind(*(None if g is None else g.astype(x.dtype) for g, x in pairs))
    result: Operand = gradient
    return result


def _by_rows(sweep: Callable[..., Any], arguments: tuple[Any, ...], found: Any, spec: Spec) -> Any:
    """sweep(*arguments), on every device of a mesh for its rows. ``found``: a tree as the result's, whether an array has rows."""
    if spec.row_axes is None:
        return sweep(*arguments)
    operand, target, rows = arguments
    of_columns = target.arrays, target.transform
    arrays, tree = jax.tree.flatten((operand, (target.labels, rows), of_columns))
    has_rows = [x.ndim > 0 for x in jax.tree.leaves((target.labels, rows))]
    of_operand = [True, *[False] * (len(jax.tree.leaves(operand)) - 1)]
    others = [False] * (len(arrays) - len(of_operand) - len(has_rows))

    def call(*arrays: Array) -> Sequence[Array]:
        operand, (labels, rows), (given, transform) = jax.tree.unflatten(tree, arrays)
        target = Target(labels, given, transform=transform)
        return jax.tree.leaves(sweep(operand, target, rows))

    flags, tree_of_found = jax.tree.flatten(found)
    mapped = map_by_rows(call, spec.row_axes, [*of_operand, *has_rows, *others], flags)
    return jax.tree.unflatten(tree_of_found, mapped(*arrays))


def refusal(operand: Operand, spec: Spec) -> str:
    """What stands in the way of a call, in words that end a sentence; "": nothing."""
    if _MISSING:
        return _MISSING
    if spec.has_allowed:
        return "has no allowed"
    if spec.has_slots:
        return "takes one label a row"
    if spec.has_low_rank:
        return "has no low_rank"
    half = [name for name, x in operand._asdict().items() if _is_half(x)]
    if half:
        return f"has no float16 ({', '.join(half)})"
    if isinstance(operand, LmHead) and not head.fits(operand, spec):
        return "has no room for this hidden size in VMEM"
    return ""


def _is_half(x: Any) -> bool:
    return x is not None and x.dtype == jnp.float16
