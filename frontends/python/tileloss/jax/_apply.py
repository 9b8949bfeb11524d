"""From a public function's arguments to sweeps and row stage, with a gradient of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tileloss._core.slots import DIFFERENTIABLE, ROW_OUTPUTS, SLOTS
from tileloss.jax._rows.coefficients import RowCoefficients
from tileloss.jax._rows.cross_entropy import cross_entropy
from tileloss.jax._rows.inputs import Rows, read_rows
from tileloss.jax._rows.logprobs import logprobs, logprobs_coefficients
from tileloss.jax._rows.options import Options, check, resolve
from tileloss.jax._rows.policy.loss import policy_loss
from tileloss.jax._rows.state import RowState
from tileloss.jax._rows.stats import RowOutputs
from tileloss.jax._sweeps import Sums, backward_sweep, forward_sweep
from tileloss.jax._transform import make_transform

IMPLEMENTATIONS = ("xla",)
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
# The optional arrays of a row state by their bits (tileloss_state_array in tileloss.h).
_OPTIONAL = {3: "entropy_sum", 4: "collision_sum", 5: "smoothing_sum", 6: "argmax"}


class _Call(NamedTuple):
    """What is known of a call while it is traced."""

    options: Options
    columns: int
    sums: Sums
    sequence_length: int = 0

    def with_arrays(self, arrays: dict[str, Array]) -> Options:
        return self.options._replace(arrays=arrays)


class _Operands(NamedTuple):
    """Everything that may be traced but the logits."""

    labels: Array
    vectors: dict[str, Array]  # by their names in tileloss_args
    arrays: dict[str, Array]  # options that are arrays


def check_implementation(implementation: str | Iterable[str] | None) -> None:
    """Raises ValueError for a name, or names, of which none is there."""
    if implementation is None:
        return
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if not any(name in IMPLEMENTATIONS for name in names):
        there = ", ".join(IMPLEMENTATIONS)
        raise ValueError(
            f"implementation: expected one of {there}, got {', '.join(names) or 'none'}"
        )


def loss_of_logits(
    function: str,
    logits: Array,
    labels: Array,
    vectors: Mapping[str, Array | None],
    given: Mapping[str, Any],
    *,
    preset: str = "",
    wants_metrics: bool = False,
) -> tuple[Array, Array | None]:
    """The loss, of the labels' shape unless it is reduced, and the metrics [M] if wanted."""
    options = resolve(function, given, preset)
    extra = ("entropy",) if wants_metrics else ()
    x, operands, call = _prepare(options, logits, labels, vectors, extra)

    def stage(
        state: RowState, o: _Operands, loss_grad: Array | None
    ) -> tuple[Array, Array | None, RowCoefficients]:
        inputs = {**o.vectors, "loss_grad": loss_grad}
        resolved = call.with_arrays(o.arrays)
        if function == "cross_entropy":
            result = cross_entropy(state, o.labels, resolved, classes=call.columns, **inputs)
            return result.loss, None, result.coefficients
        advantages = inputs.pop("advantages")
        assert advantages is not None
        result, metrics = policy_loss(
            state,
            o.labels,
            advantages,
            resolved,
            classes=call.columns,
            sequence_length=call.sequence_length,
            **inputs,
        )
        return result.loss, metrics if wants_metrics else None, result.coefficients

    @jax.custom_vjp
    def run(x: Array, o: _Operands) -> tuple[Array, Array | None]:
        return forward(x, o)[0]

    def forward(x: Array, o: _Operands) -> tuple[tuple[Array, Array | None], Any]:
        state = _forward(x, o, call)
        loss, metrics, _ = stage(state, o, None)
        return (loss, metrics), (x, o, state)

    def backward(saved: Any, gradients: tuple[Array, Array | None]) -> tuple[Array, None]:
        x, o, state = saved
        return _backward(x, o, call, state, stage(state, o, gradients[0])[2]), None

    run.defvjp(forward, backward)
    loss, metrics = run(x, operands)
    return (loss.reshape(labels.shape) if loss.ndim else loss), metrics


def rows_of_logits(
    logits: Array, labels: Array, outputs: Iterable[str], given: Mapping[str, Any]
) -> RowOutputs:
    asked_for = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if unknown := [name for name in asked_for if name not in ROW_OUTPUTS]:
        raise ValueError(
            f"outputs: expected names among {', '.join(ROW_OUTPUTS)}, got {', '.join(unknown)}"
        )
    x, operands, call = _prepare(resolve("logprobs", given), logits, labels, {}, asked_for)
    differentiable = [name for name in asked_for if name in DIFFERENTIABLE]

    @jax.custom_vjp
    def run(x: Array, o: _Operands) -> dict[str, Array]:
        return forward(x, o)[0]

    def forward(x: Array, o: _Operands) -> tuple[dict[str, Array], Any]:
        state = _forward(x, o, call)
        options = call.with_arrays(o.arrays)
        found = logprobs(state, o.labels, options, classes=call.columns)._asdict()
        return {name: found[name] for name in asked_for}, (x, o, state)

    def backward(saved: Any, gradients: dict[str, Array]) -> tuple[Array, None]:
        x, o, state = saved
        upstream = {f"{name}_grad": gradients[name] for name in differentiable}
        options = call.with_arrays(o.arrays)
        coefficients, _ = logprobs_coefficients(
            state, o.labels, options, classes=call.columns, **upstream
        )
        return _backward(x, o, call, state, coefficients), None

    run.defvjp(forward, backward)
    found = run(x, operands)
    return RowOutputs(**{name: value.reshape(labels.shape) for name, value in found.items()})


def _prepare(
    options: Options,
    logits: Array,
    labels: Array,
    vectors: Mapping[str, Array | None],
    outputs: Iterable[str],
) -> tuple[Array, _Operands, _Call]:
    """Checks the arguments and flattens the leading dimensions."""
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if logits.dtype not in _FLOATS:
        raise TypeError(f"logits: expected float32, bfloat16 or float16, got {logits.dtype}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels: expected integers, got {labels.dtype}")
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels: expected logits' leading dimensions {list(logits.shape[:-1])}, got {list(labels.shape)}"
        )
    rows, vocab = labels.size, logits.shape[-1]
    flat = {n: jnp.asarray(v).reshape(-1) for n, v in vectors.items() if v is not None}
    length = 0
    if "advantages" in vectors and "sequence_offsets" not in flat:
        if labels.ndim != 2:
            raise ValueError(
                f"labels: expected [B, T] without sequence_offsets, got shape {list(labels.shape)}"
            )
        length = labels.shape[1]
    check(
        options,
        rows=rows,
        columns=vocab,
        vectors={n: v.size for n, v in flat.items()},
        sequence_length=length,
    )
    valid = options.integer("valid_vocab")
    columns = vocab if valid < 0 else valid
    if "class_weights" in flat:
        flat["class_weights"] = flat["class_weights"][:columns].astype(jnp.float32)
    call = _Call(options, columns, _sums(options, outputs), length)
    operands = _Operands(labels.reshape(-1), flat, options.arrays)
    return logits.reshape(rows, vocab), operands, call


def _sums(options: Options, outputs: Iterable[str]) -> Sums:
    """The optional arrays that row outputs, by name, and options need."""
    bits = 0
    for name in outputs:
        bits |= SLOTS[name].state_arrays
    for name, option in options.function.options.items():
        absent = np.isnan(option.default)
        if option.state_arrays and (
            options.is_given(name) if absent else options.may_differ(name, option.default)
        ):
            bits |= option.state_arrays
    sums = Sums(**{name: bool(bits >> bit & 1) for bit, name in _OPTIONAL.items()})
    # Its field tells of what a backward needs: here the forward needs it.
    if "label_smoothing" in options.function.options and options.plain("label_smoothing") > 0:
        sums = sums._replace(smoothing_sum=True)
    return sums


def _forward(x: Array, o: _Operands, call: _Call) -> RowState:
    return forward_sweep(
        x,
        o.labels,
        make_transform(call.with_arrays(o.arrays)),
        columns=call.columns,
        sums=call.sums,
        class_weights=o.vectors.get("class_weights"),
    )


def _rows(state: RowState, o: _Operands, call: _Call) -> Rows:
    return read_rows(
        state,
        o.labels,
        call.with_arrays(o.arrays),
        classes=call.columns,
        mask=o.vectors.get("mask"),
    )


def _backward(
    x: Array, o: _Operands, call: _Call, state: RowState, coefficients: RowCoefficients
) -> Array:
    return backward_sweep(
        x,
        _rows(state, o, call),
        coefficients,
        make_transform(call.with_arrays(o.arrays)),
        columns=call.columns,
        class_weights=o.vectors.get("class_weights"),
    )
