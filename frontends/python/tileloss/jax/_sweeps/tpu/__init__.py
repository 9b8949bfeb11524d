"""The sweeps as Pallas kernels for TPUs, "pallas_tpu".

tiles.py   the vector work on one tile
rows.py    what the kernels are told of rows and classes, and what XLA makes of what they give
logits.py  the kernels from logits
head.py    the kernels from hidden states and head
blocks.py  how large their blocks are; store.py  what tuning.py, `tileloss.jax.tune`, found
calls.py   pallas_call
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.operands import BackwardRows, LmHead, Logits, Operand, Spec
from tileloss.jax._sweeps.transform import LogitTransform

try:
    from tileloss.jax._sweeps.tpu import head, logits
except ImportError as error:  # jax 0.9's Pallas needs absl-py, which jax does not bring along
    _MISSING = f"has no Pallas: {error}"
else:
    _MISSING = ""


def forward(
    operand: Operand,
    labels: Array,
    transform: LogitTransform,
    spec: Spec,
    class_weights: Array | None,
) -> RowState:
    """The row states of the columns that ``spec`` names."""
    if isinstance(operand, Logits):
        return logits.forward(operand, labels, transform, spec, class_weights)
    return head.forward(operand, labels, transform, spec, class_weights)


def backward(
    operand: Operand,
    rows: BackwardRows,
    transform: LogitTransform,
    spec: Spec,
    class_weights: Array | None,
) -> Operand:
    """dL/dlogits, in their memory where nobody reads them later; or dhidden, dhead and dbias as ``spec.wanted`` names them."""
    if isinstance(operand, Logits):
        return logits.backward(operand, rows, transform, spec, class_weights)
    return head.backward(operand, rows, transform, spec, class_weights)


def refusal(operand: Operand, spec: Spec, has_class_weights: bool) -> str:
    """What stands in the way of a call, in words that end a sentence; "": nothing."""
    if _MISSING:
        return _MISSING
    half = [name for name, x in operand._asdict().items() if _is_half(x)]
    if half:
        return f"has no float16 ({', '.join(half)})"
    if isinstance(operand, LmHead) and not head.fits(operand, spec):
        return "has no room for this hidden size in VMEM"
    return ""


def _is_half(x: Any) -> bool:
    return x is not None and x.dtype == jnp.float16
