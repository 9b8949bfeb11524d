"""The sweeps as XLA FFI calls of the C++ library (frontends/xla/handler.cpp): "cpu", and on CUDA devices "cuda".

A call goes by names: those of tensors, options and row-state arrays in tileloss.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tileloss._core.library import library_path
from tileloss._core.slots import SLOTS
from tileloss._core.structs import BACKWARD, BFLOAT16, FLOAT32, FORWARD, VALUE_AND_GRAD
from tileloss.jax._devices import is_in_shard_map, type_like
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.by_rows import cut_by_rows
from tileloss.jax._sweeps.operands import (
    UNUSED,
    BackwardRows,
    LmHead,
    Logits,
    Operand,
    SlotGradients,
    Spec,
    Swept,
    Target,
    TargetRows,
    TeacherState,
    output_dtype,
)
from tileloss.jax._sweeps.transform import make_label_transform

_TARGET = "tileloss_call"
_FILE, CUDA_FILE = "libtileloss_xla.so", "libtileloss_cuda.so"


@cache
def is_built(file: str = _FILE) -> bool:
    """Whether the handlers, or the kernels that they call on CUDA, are there: beside the library."""
    return (library_path().parent / file).is_file()


@cache
def _register() -> None:
    handlers = ctypes.CDLL(str(library_path().parent / _FILE))

    def capsule(name: str) -> Any:
        return jax.ffi.pycapsule(getattr(handlers, name))  # type: ignore[no-untyped-call]

    jax.ffi.register_ffi_target(_TARGET, capsule("tileloss_xla_call_on_cpu"), platform="cpu")
    jax.ffi.register_ffi_target(_TARGET, capsule("tileloss_xla_call_on_cuda"), platform="CUDA")


def missing(*others: str) -> str:
    """What is missing of this implementation as a whole, as a refusal says it. ``others``: what it needs beside the handlers."""
    for file in (_FILE, *others):
        if not is_built(file):
            return f"is not in this build ({file} is missing beside libtileloss.so)"
    return ""


def refusal(operand: Operand, spec: Spec, *others: str) -> str:
    """``others``: as `missing` has them."""
    if words := missing(*others):
        return words
    if spec.has_slots and spec.is_shard:  # it does not know whether it has the likeliest
        return "takes several labels a row of a whole vocabulary alone"
    return ""


def refusal_on_cuda(operand: Operand, spec: Spec) -> str:
    return refusal(operand, spec, CUDA_FILE)


def forward(operand: Operand, target: Target, spec: Spec) -> RowState | Swept:
    if target.options is not None:
        results = _outputs(target, spec)
        found = _target_call(operand, target, spec).run(FORWARD, results)
        return Swept(dict(zip(results, found, strict=True)), _no_state(target))
    call, shape = _sweep(operand, target, spec), target.labels.shape
    names = spec.sums.arrays
    results = {f"state:{name}": like(shape, jnp.float32) for name in names}
    if (
        "argmax" in names
    ):  # int64, which JAX has only when it is told to: two halves, of which the first says it all
        results["state:argmax"] = like((*shape, 2), jnp.int32)
    found = list(call.run(FORWARD, results, first=spec.first, columns=spec.columns))
    if "argmax" in names:
        found[names.index("argmax")] = found[names.index("argmax")][:, 0]
    weight = target.smoothing_weight(spec)
    return RowState(**dict(zip(names, found, strict=True)), smoothing_weight=weight)


def backward(
    operand: Operand, target: Target, rows: BackwardRows | TargetRows, spec: Spec
) -> Operand:
    if isinstance(rows, TargetRows):
        call = _target_call(operand, target, spec)
        call.operands["token_weights"] = rows.weights
    else:
        call = _sweep(operand, target, spec, rows.slots)
        call.options["valid_vocab"] = spec.columns  # the gradient has all columns, 0 in the padding
        arrays = ("max", "sum", "label_logit", *["entropy_sum"] * spec.sums.entropy_sum)
        call.operands |= {f"state:{n}": getattr(rows.state, n) for n in arrays}
        call.operands |= _of_rows(rows, spec)
    found = call.run(BACKWARD, gradients(operand, spec), aliases=in_place(operand, 0))
    return operand_of(operand, spec, found)


def _of_rows(rows: BackwardRows, spec: Spec) -> dict[str, Array]:
    """What the library makes a gradient of, besides the row state."""
    if rows.slots is not None:
        return rows.slots.others | {"logp_grad": rows.slots.logp_grad}
    c = rows.coefficients
    found = {"target_coef": c.target, "prob_plus_target_coef": c.prob_plus_target}
    if spec.has_prob_logp:
        found["prob_logp_coef"] = c.prob_logp
    if spec.has_uniform:
        found["uniform_coef"] = c.uniform
    return found


def rows_and_grad(
    operand: Operand, target: Target, weights: Array, spec: Spec
) -> tuple[dict[str, Array], Operand]:
    """Of a target that is not labels: the rows' outputs, "loss" times its weight, and the gradient."""
    call = _target_call(operand, target, spec)
    call.operands["token_weights"] = weights
    of_operand, outputs = gradients(operand, spec), _outputs(target, spec)
    found = call.run(VALUE_AND_GRAD, of_operand | outputs, aliases=in_place(operand, 0))
    named = dict(zip(outputs, found[len(of_operand) :], strict=True))
    return named, operand_of(operand, spec, found)


def value_and_grad(
    options: Options,
    operand: Operand,
    target: Target,
    tensors: dict[str, Array],
    spec: Spec,
    *,
    sequence_length: int,
    wants_metrics: bool,
) -> tuple[dict[str, Array], Operand]:
    """A scalar loss, its metrics if asked for, and its gradient in one pass, with the row stage in C++.

    ``target``: a label that is ELSEWHERE is out of range, which makes all results NaN. ``tensors``: the other inputs by their
    names in tileloss_args.
    """
    function = options.function
    call = Call(function.name, operand, spec)
    call.operands["labels"] = target.labels  # before allowed, which may be one row for all of its
    others = target.arrays | tensors
    call.operands |= {name: _accepted(name, tensor) for name, tensor in others.items()}
    call.operands |= {f"option:{name}": number for name, number in options.arrays.items()}
    call.options |= options.numbers() | {"ignore_index": UNUSED}
    results = {"loss": like((), jnp.float32)}
    if wants_metrics:
        results["metrics"] = like((len(function.metrics),), jnp.float32)
    found = call.run(
        VALUE_AND_GRAD,
        results | gradients(operand, spec),
        aliases=in_place(operand, len(results)),
        sequence_length=sequence_length,
    )
    count = len(results)
    return dict(zip(results, found, strict=False)), operand_of(operand, spec, found[count:])


class Call:
    """One call of the library while it is put together: the operands by their words in the handler's attributes."""

    def __init__(self, function: str, operand: Operand, spec: Spec):
        self.function = function
        self.operands: dict[str, Array] = {}
        self.options: dict[str, float] = {}
        if isinstance(operand, Logits):
            self.operands["logits"] = operand.logits
            return
        for word, tensor in zip(_head_words(spec), operand, strict=True):
            if tensor is not None:
                self.operands[word] = tensor
        narrow = spec.compute_dtype is not None and jnp.dtype(spec.compute_dtype) == jnp.bfloat16
        self.options["compute_dtype"] = BFLOAT16 if narrow else FLOAT32

    def run(
        self,
        call_pass: int,
        results: dict[str, Any],
        *,
        first: int = 0,
        columns: int = -1,
        sequence_length: int = 0,
        aliases: dict[int, int] | None = None,
    ) -> Sequence[Array]:
        _register()
        # JAX keeps the function, which is to keep no tracers: not self.
        attributes = {
            "function": self.function,
            "call_pass": np.int32(call_pass),
            "operands": " ".join(self.operands),
            "results": " ".join(results),
            "options": " ".join(f"{name}={float(v)!r}" for name, v in self.options.items()),
            "first": np.int64(first),
            "columns": np.int64(columns),
            "sequence_length": np.int64(sequence_length),
        }

        def call(*operands: Array) -> Sequence[Array]:
            rows = operands[0].shape[0]
            shapes = (
                (rows, *r.shape[1:]) if _has_rows(w, r) else r.shape for w, r in results.items()
            )
            types = [
                type_like(operands[0], shape, r.dtype)
                for shape, r in zip(shapes, results.values(), strict=True)
            ]
            found: Sequence[Array] = jax.ffi.ffi_call(
                _TARGET, types, vmap_method="sequential", input_output_aliases=aliases
            )(*operands, **attributes)
            return found

        operands = list(self.operands.values())
        # A scalar loss needs all rows in one place.
        is_reduced = "loss" in results and not results["loss"].shape
        if not is_reduced and not is_in_shard_map(operands[0]):
            of_operands = starmap(_has_rows, self.operands.items())
            call = cut_by_rows(call, [*of_operands], [*starmap(_has_rows, results.items())])
        return call(*operands)


def _sweep(
    operand: Operand, target: Target, spec: Spec, slots: SlotGradients | None = None
) -> Call:
    """A label that is ELSEWHERE is no column, and so to the library as well. ``slots``: of a backward of several labels a row,
    which the library's sweeps do not take, but its logprobs."""
    name, transform = "sweep" if slots is None else "logprobs", target.transform
    call = Call(f"linear_{name}" if isinstance(operand, LmHead) else name, operand, spec)
    call.operands["labels"] = target.labels if slots is None else slots.columns
    if spec.sums.smoothing_sum and target.class_weights is not None:
        call.operands["class_weights"] = target.class_weights
    if target.allowed is not None:
        call.operands["allowed"] = target.allowed
    call.options |= {
        "logit_scale": transform.logit_scale,
        "softcap": transform.softcap,
        "ignore_index": UNUSED,
    }
    if isinstance(transform.temperature, Array):
        call.operands["option:temperature"] = transform.temperature
    else:
        call.options["temperature"] = transform.temperature
    return call


def _target_call(operand: Operand, target: Target, spec: Spec) -> Call:
    """A loss whose target is not labels: its row outputs and gradient. A call makes a row's sums and its gradient while both
    sides are in cache."""
    options = target.options
    assert options is not None
    call = Call(options.function.name, operand, spec)
    words = {"teacher_head": "T:teacher_head"} if spec.head_layout == "HV" else {}
    call.operands["labels"] = target.labels
    call.operands |= {words.get(name, name): x for name, x in target.arrays.items()}
    # The weights have the reduction in them.
    given = {name: x for name, x in options.arrays.items() if name != "num_items"}
    call.operands |= {f"option:{name}": x for name, x in given.items()}
    numbers = {name: x for name, x in options.numbers().items() if name != "num_items"}
    per_row = options.function.choice("reduction", "none")
    call.options |= numbers | {"reduction": per_row, "ignore_index": UNUSED}
    return call


def _outputs(target: Target, spec: Spec) -> dict[str, Any]:
    return {name: like(target.labels.shape, output_dtype(name)) for name in spec.outputs}


def _no_state(target: Target) -> TeacherState | tuple[()]:
    assert target.options is not None
    if target.options.function.name != "distillation":  # from logits
        return ()
    nothing = jnp.zeros_like(target.labels, jnp.float32)
    side = RowState(nothing, nothing, nothing)
    label = side if make_label_transform(target.options) else None
    return TeacherState(side, side, label, nothing, nothing)


def _has_rows(word: str, x: Any) -> bool:
    """Whether the first dimension of a sweep's operand, or of any result, is the rows."""
    has_none = ("head", "head_r", "bias", "class_weights", "metrics")
    return bool(x.shape) and not word.endswith(has_none) and (word != "allowed" or x.shape[0] > 1)


def _head_words(spec: Spec) -> tuple[str, ...]:
    """Of an LmHead's arrays; a head [H, V] is the library's [V, H] transposed."""
    turned = "T:" if spec.head_layout == "HV" else ""
    return "hidden", f"{turned}head", "bias", "hidden_r", f"{turned}head_r"


def gradients(operand: Operand, spec: Spec) -> dict[str, Any]:
    """The gradients that are needed, by their words."""
    if isinstance(operand, Logits):
        return {"dlogits": like(operand.logits.shape, operand.logits.dtype)}
    found = {}
    for word, x, needs in zip(_head_words(spec), operand, spec.needs_grad, strict=True):
        if x is not None and needs:
            dtype = spec.dhidden_dtype if word.startswith("hidden") else None
            turned, name = word[: word.find(":") + 1], word.rpartition(":")[2]
            found[f"{turned}d{name}"] = like(x.shape, dtype or x.dtype)
    return found


def operand_of(operand: Operand, spec: Spec, gradients: Sequence[Array]) -> Operand:
    """An operand of the gradients that were needed."""
    if isinstance(operand, Logits):
        return Logits(gradients[0])
    rest = iter(gradients)
    return LmHead(*(next(rest) if needs else None for needs in spec.needs_grad))


def in_place(operand: Operand, result: int) -> dict[int, int] | None:
    """dlogits over the logits, which XLA copies first where somebody else reads them."""
    return {0: result} if isinstance(operand, Logits) else None


def _accepted(name: str, tensor: Array) -> Array:
    """The tensor in a type that the library takes for it."""
    return tensor.astype(jnp.float32 if SLOTS[name].dtypes[0] == FLOAT32 else jnp.int32)


def like(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
