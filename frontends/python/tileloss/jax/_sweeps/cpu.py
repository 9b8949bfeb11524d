"""The sweeps as XLA FFI calls of the C++ library (frontends/xla/handler.cpp): "cpu".

A call goes by names: those of tensors, options and row-state arrays in tileloss.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tileloss._core.library import library_path
from tileloss._core.structs import BACKWARD, BFLOAT16, FLOAT32, FORWARD
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.operands import (
    ELSEWHERE,
    UNUSED,
    BackwardRows,
    LmHead,
    Logits,
    Operand,
    Spec,
)
from tileloss.jax._sweeps.transform import LogitTransform

_TARGET = "tileloss_call"
_FILE = "libtileloss_xla.so"


def handler_path() -> Path:
    """Where the handler is if this build has it: beside the library."""
    return library_path().parent / _FILE


@cache
def is_built() -> bool:
    return handler_path().is_file()


@cache
def _register() -> None:
    handler = ctypes.CDLL(str(handler_path())).tileloss_xla_call
    capsule = jax.ffi.pycapsule(handler)  # type: ignore[no-untyped-call]
    jax.ffi.register_ffi_target(_TARGET, capsule, platform="cpu")


def refusal(operand: Operand, spec: Spec, has_class_weights: bool) -> str:
    if not is_built():
        return f"is not in this build ({_FILE} is missing beside libtileloss.so)"
    if has_class_weights and spec.sums.smoothing_sum:
        return "has no class weights together with label_smoothing"
    return ""


def forward(
    operand: Operand,
    labels: Array,
    transform: LogitTransform,
    spec: Spec,
    class_weights: Array | None,
) -> RowState:
    assert class_weights is None or not spec.sums.smoothing_sum
    call = _Call(operand, labels, transform, spec)
    names = ("max", "sum", "target", *(n for n, wanted in spec.sums._asdict().items() if wanted))
    results = {
        f"state:{name}": _like(labels, labels.shape, jnp.int32 if name == "argmax" else jnp.float32)
        for name in names
    }
    found = dict(zip(names, call.run(FORWARD, results, first=spec.first), strict=True))
    weight = jnp.float32(spec.columns) if spec.sums.smoothing_sum else None
    return RowState(**found, smoothing_weight=weight)


def backward(
    operand: Operand,
    rows: BackwardRows,
    transform: LogitTransform,
    spec: Spec,
    class_weights: Array | None,
) -> Operand:
    call = _Call(operand, rows.labels, transform, spec)
    c, state = rows.coefficients, rows.state
    call.operands |= {f"state:{n}": getattr(state, n) for n in ("max", "sum", "target")}
    lse_grad = c.prob_plus_target
    if state.entropy_sum is not None:
        # The library makes -g_H H of the entropy by itself.
        total = state.sum + jnp.exp(state.target - state.max)
        entropy = rows.log_sum - state.entropy_sum / total
        lse_grad = lse_grad - jnp.where(c.prob_logp == 0, 0.0, c.prob_logp * entropy)
        call.operands |= {"state:entropy_sum": state.entropy_sum, "entropy_grad": -c.prob_logp}
    call.operands |= {"logp_grad": c.target, "lse_grad": lse_grad}
    if spec.sums.smoothing_sum:
        # The library's mean is over the columns and the class that stands for all other shards.
        call.operands["mean_logit_grad"] = c.uniform * (spec.columns + 1)
    if isinstance(operand, Logits):
        logits = operand.logits
        results = {"dlogits": _like(logits, logits.shape, logits.dtype)}
        return Logits(*call.run(BACKWARD, results, aliases={0: 0}))
    results = {
        f"d{name}".replace("dT:", "T:d"): _like(tensor, tensor.shape, tensor.dtype)
        for (name, tensor), wanted in zip(
            _head_operands(operand, spec).items(), spec.wanted, strict=False
        )
        if wanted
    }
    gradients = iter(call.run(BACKWARD, results))
    return LmHead(*(next(gradients) if wanted else None for wanted in spec.wanted))


class _Call:
    """One call of the library while it is put together: the operands by their words in the handler's attributes."""

    def __init__(self, operand: Operand, labels: Array, transform: LogitTransform, spec: Spec):
        self.spec, self.is_head = spec, isinstance(operand, LmHead)
        if isinstance(operand, Logits):
            self.operands: dict[str, Array] = {"logits": operand.logits}
        else:
            self.operands = _head_operands(operand, spec)
        # A label that is no column here is one of another shard, behind our columns.
        self.operands["labels"] = jnp.where(labels == ELSEWHERE, spec.columns, labels)
        self.options: dict[str, Any] = {
            "logit_scale": transform.logit_scale,
            "softcap": transform.softcap,
            "ignore_index": UNUSED,
            "vocab_total": spec.columns + 1,
        }
        if self.is_head:
            narrow = (
                spec.compute_dtype is not None and jnp.dtype(spec.compute_dtype) == jnp.bfloat16
            )
            self.options["compute_dtype"] = BFLOAT16 if narrow else FLOAT32
        if isinstance(transform.temperature, Array):
            self.operands["option:temperature"] = transform.temperature
        else:
            self.options["temperature"] = transform.temperature

    def run(
        self,
        call_pass: int,
        results: dict[str, Any],
        *,
        first: int = 0,
        aliases: dict[int, int] | None = None,
    ) -> Sequence[Array]:
        _register()
        columns = self.spec.columns
        if call_pass == BACKWARD:  # the gradient has all columns, 0 in the padding
            self.options["valid_vocab"], columns = columns, -1
        found: Sequence[Array] = jax.ffi.ffi_call(
            _TARGET,
            list(results.values()),
            vmap_method="sequential",
            input_output_aliases=aliases,
        )(
            *self.operands.values(),
            function="linear_logprobs" if self.is_head else "logprobs",
            call_pass=np.int32(call_pass),
            operands=" ".join(self.operands),
            results=" ".join(results),
            options=" ".join(f"{name}={float(value)!r}" for name, value in self.options.items()),
            first=np.int64(first),
            columns=np.int64(columns),
        )
        return found


def _head_operands(operand: LmHead, spec: Spec) -> dict[str, Array]:
    """The three tensors by their words; [H, V] is the library's [V, H] transposed."""
    assert operand.hidden is not None and operand.head is not None
    head = "T:head" if spec.head_layout == "HV" else "head"
    tensors = {"hidden": operand.hidden, head: operand.head}
    if operand.bias is not None:
        tensors["bias"] = operand.bias
    return tensors


def _like(x: Array, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
