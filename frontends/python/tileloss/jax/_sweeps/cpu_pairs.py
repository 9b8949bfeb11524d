"""The sweeps over pairs as XLA FFI calls of the C++ library: "cpu". A call makes a row's sums and its gradient while both sides
are in cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from tileloss._core.structs import BACKWARD, FORWARD, VALUE_AND_GRAD
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps import cpu
from tileloss.jax._sweeps.operands import UNUSED, Operand
from tileloss.jax._sweeps.pairs import Pair, PairSpec, PairState, State
from tileloss.jax._sweeps.transform import make_label_transform, make_teacher_transform


def refusal(pair: Pair) -> str:
    return cpu.missing()


def forward(
    pair: Pair, labels: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], State]:
    found = _call(pair, labels, options, spec).run(FORWARD, _outputs(labels, spec))
    outputs = dict(zip(spec.outputs, found, strict=True))
    if options.function.name != "distillation":
        return outputs, found[0]
    nothing = jnp.zeros_like(labels, jnp.float32)
    side = RowState(nothing, nothing, nothing)
    at_label = side if make_label_transform(options) else None
    return outputs, PairState(side, side, at_label, outputs["divergence"], nothing)


def backward(
    pair: Pair, labels: Array, weights: Array, state: State, options: Options, spec: PairSpec
) -> Operand:
    call = _call(pair, labels, options, spec)
    # Such rows are NaN anyway. But this call, which may write over the logits, now has to wait for the forward.
    value = state.divergence if isinstance(state, PairState) else state
    call.operands["token_weights"] = jnp.where(jnp.isnan(value), jnp.nan, weights)
    gradients = cpu.gradients(pair.student, spec.student)
    found = call.run(BACKWARD, gradients, aliases=cpu.in_place(pair.student, 0))
    return cpu.operand_of(pair.student, spec.student, found)


def value_and_grad(
    pair: Pair, labels: Array, weights: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], Operand]:
    call = _call(pair, labels, options, spec)
    call.operands["token_weights"] = weights
    gradients = cpu.gradients(pair.student, spec.student)
    results = gradients | _outputs(labels, spec)
    found = call.run(VALUE_AND_GRAD, results, aliases=cpu.in_place(pair.student, 0))
    outputs = dict(zip(spec.outputs, found[len(gradients) :], strict=True))
    return outputs, cpu.operand_of(pair.student, spec.student, found)


def _call(pair: Pair, labels: Array, options: Options, spec: PairSpec) -> cpu.Call:
    call = cpu.Call(options.function.name, pair.student, spec.student)
    words = {"teacher_head": "T:teacher_head"} if spec.student.head_layout == "HV" else {}
    call.operands |= {words.get(name, name): x for name, x in pair.beside.items()}
    call.operands["labels"] = labels
    # The weights have the reduction in them.
    given = {name: x for name, x in options.arrays.items() if name != "num_items"}
    # The library takes a NaN behind a pointer for a number.
    if "teacher_temperature" in given:
        given["teacher_temperature"] = jnp.asarray(make_teacher_transform(options).temperature)
    if "label_temperature" in given and (label := make_label_transform(options)):
        given["label_temperature"] = jnp.asarray(label.temperature)
    call.operands |= {f"option:{name}": x for name, x in given.items()}
    numbers = {name: x for name, x in options.numbers().items() if name != "num_items"}
    per_row = options.function.choice("reduction", "none")
    call.options |= numbers | {"reduction": per_row, "ignore_index": UNUSED}
    return call


def _outputs(labels: Array, spec: PairSpec) -> dict[str, Any]:
    return {
        name: cpu.like(labels.shape, jnp.bool_ if name == "agreement" else jnp.float32)
        for name in spec.outputs
    }
