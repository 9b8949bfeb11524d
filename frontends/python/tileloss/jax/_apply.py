"""From a public function's arguments to sweeps and row stage, with a gradient of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from tileloss.jax._devices import on_auto_axes
from tileloss.jax._differentiated import Wanted, primals, with_results_checked
from tileloss.jax._prepare import Call, Inputs, has_gradient_in_forward, prepare
from tileloss.jax._rows.coefficients import target_gradient
from tileloss.jax._rows.cross_entropy import cross_entropy
from tileloss.jax._rows.distillation import WeightedRows, row_weights
from tileloss.jax._rows.inputs import read_labels, read_rows
from tileloss.jax._rows.logprobs import logprobs, logprobs_coefficients
from tileloss.jax._rows.policy.loss import policy_loss
from tileloss.jax._rows.policy.metrics import applicable
from tileloss.jax._sweeps.operands import (
    ELSEWHERE,
    UNUSED,
    BackwardRows,
    Operand,
    Target,
    TargetRows,
)
from tileloss.jax._sweeps.transform import make_transform
from tileloss.jax._target import without_columns

Results = dict[str, Any]


@with_results_checked
def apply(loss: str, arguments: Mapping[str, Any]) -> Results:
    """The results by their names in tileloss_args: "loss", of the rows' shape unless it is reduced; "metrics" that apply, by
    name; row outputs, of the rows' shape.

    ``loss``: a function of the library, from logits. ``arguments``: of a public function, by name; of the LM head where
    "hidden" is among them.
    """
    x, inputs, leading, call = prepare(loss, arguments)
    grad_in_forward = has_gradient_in_forward(arguments.get("grad_in_forward"), x, call)

    @jax.custom_vjp
    def run(x: Operand, o: Inputs) -> Results:
        return _stage(_forward(x, o, call), o, call)[0]

    def forward(x: Operand, o: Inputs) -> tuple[Results, Any]:
        wanted, x, o = primals(x, o)
        if not any(wanted):
            return run(x, o), None
        if grad_in_forward:
            return call.choice.run_whole(
                partial(_by_sweeps, call, wanted), partial(_in_one_pass, call, wanted), x, o
            )
        state = _forward(x, o, call)
        return _stage(state, o, call)[0], (x, o, state, wanted)

    def backward(saved: Any, gradients: Results) -> tuple[Operand | None, None]:
        given = {n: g for n, g in gradients.items() if n in call.differentiable}
        given = {n: g for n, g in given.items() if not isinstance(g, SymbolicZero)}
        if saved is None or not given:
            return None, None
        if call.shards:
            of = saved if grad_in_forward else saved[0]
            given = {n: call.shards.upstream(of, g) for n, g in given.items()}
        if grad_in_forward:  # what is saved is the gradient for an upstream of 1
            return jax.tree.map(lambda g: (g * given["loss"]).astype(g.dtype), saved), None
        x, o, state, wanted = saved
        upstream = {f"{name}_grad": g for name, g in given.items()}
        return _backward(x, o, call, state, _stage(state, o, call, upstream)[1], wanted), None

    run.defvjp(forward, with_results_checked(backward), symbolic_zeros=True)
    by_rows = {name: name != "metrics" for name in call.outputs}
    if call.options.function.is_loss:
        by_rows["loss"] = call.options.is_per_row
    found: Results = on_auto_axes(run, x, inputs, rows=x[0], by_rows=by_rows)
    found = {name: leading.shaped(x) if by_rows[name] else x for name, x in found.items()}
    if "metrics" in found:
        named = dict(zip(call.options.function.metrics, found["metrics"], strict=True))
        names = applicable(call.options, "ref_logp" in inputs.vectors)
        found["metrics"] = {name: named[name] for name in names}
    return found


def _by_sweeps(call: Call, wanted: Wanted, x: Operand, o: Inputs) -> tuple[Results, Operand]:
    state = _forward(x, o, call)
    results, coefficients = _stage(state, o, call)
    return results, _backward(x, o, call, state, coefficients, wanted)


def _in_one_pass(
    call: Call, wanted: Wanted, value_and_grad: Any, x: Operand, o: Inputs
) -> tuple[Results, Operand]:
    options, spec = call.options_of(o), call.spec._replace(wanted=tuple(wanted))
    if call.is_of_labels:
        found: tuple[Results, Operand] = value_and_grad(
            options,
            x,
            _target(o, call),
            {name: vector for name, vector in o.vectors.items() if name != "mask"},
            spec,
            sequence_length=call.sequence_length,
            wants_metrics="metrics" in call.outputs,
        )
        return found
    rows = _weighted_rows(o, call)
    outputs, gradient = value_and_grad(
        x, _target(o, call), rows.factors, make_transform(options), spec
    )
    return rows.results(options, outputs, call.outputs, is_weighted=True), gradient


def _target(o: Inputs, call: Call) -> Target:
    """As the sweeps take it."""
    options, mask = call.options_of(o), o.vectors.get("mask")
    labels, used, wrong = read_labels(o.labels, options, call.classes, mask)
    none = ELSEWHERE if call.is_of_labels else 0  # of such rows the weights are NaN
    columns = jnp.where(used, jnp.where(wrong, none, labels), UNUSED).astype(jnp.int32)
    if call.is_of_labels:
        return Target(columns, o.target)
    return Target(columns, without_columns(o.target, used & ~wrong), options)


def _forward(x: Operand, o: Inputs, call: Call) -> Any:
    return call.run("forward", x, _target(o, call), make_transform(call.options_of(o)), call.spec)


def _stage(
    state: Any, o: Inputs, call: Call, upstream: Mapping[str, Array] | None = None
) -> tuple[Results, Any]:
    """The results, and what a backward sweep is to be told of each row. ``upstream``: gradients by their names in
    tileloss_args; None: a loss's is 1."""
    options, upstream = call.options_of(o), upstream or {}
    if not call.is_of_labels:
        rows = _weighted_rows(o, call)
        factors = rows.factors * upstream["loss_grad"] if upstream else rows.factors
        return rows.results(options, state.outputs, call.outputs), factors
    if not options.function.is_loss:
        found = logprobs(state, o.labels, options, classes=call.classes)._asdict()
        coefficients = None
        if upstream:
            coefficients = logprobs_coefficients(
                state, o.labels, options, classes=call.classes, **upstream
            )
        return {name: found[name] for name in call.outputs}, coefficients
    tensors = {**o.vectors, **upstream}
    if "advantages" not in tensors:
        of_classes = o.target.get("class_weights")
        result = cross_entropy(
            state, o.labels, options, classes=call.classes, class_weights=of_classes, **tensors
        )
        return {"loss": result.loss}, result.coefficients
    result, metrics = policy_loss(
        state,
        o.labels,
        tensors.pop("advantages"),
        options,
        classes=call.classes,
        sequence_length=call.sequence_length,
        places=o.places,
        wants_metrics="metrics" in call.outputs,
        **tensors,
    )
    named = {} if metrics is None else {"metrics": metrics}
    return {"loss": result.loss, **named}, result.coefficients


def _weighted_rows(o: Inputs, call: Call) -> WeightedRows:
    options, mask = call.options_of(o), o.vectors.get("mask")
    _, used, wrong = read_labels(o.labels, options, call.classes, mask)
    return WeightedRows(used, wrong, row_weights(options, used, o.vectors.get("token_weights")))


def _backward(
    x: Operand, o: Inputs, call: Call, state: Any, coefficients: Any, wanted: Wanted
) -> Operand:
    """``state``, ``coefficients``: as `_forward` and `_stage` gave them."""
    options, weights = call.options_of(o), o.target.get("class_weights")
    rows: BackwardRows | TargetRows
    if call.is_of_labels:
        mask = o.vectors.get("mask")
        read = read_rows(state, o.labels, options, classes=call.classes, mask=mask)
        of_label = 1.0 if weights is None else weights[jnp.where(read.wrong, 0, read.labels)]
        at_label = target_gradient(read.stats, coefficients, of_label)
        rows = BackwardRows(read.used, state, read.stats.log_sum, coefficients, at_label)
    else:
        # The gradient, which may lie over the logits, has to wait for the forward. Rows where that is NaN are NaN anyway.
        first = state.outputs[call.spec.outputs[0]]
        rows = TargetRows(jnp.where(jnp.isnan(first), jnp.nan, coefficients), state.state)
    spec = call.spec._replace(wanted=tuple(wanted))
    gradient: Operand = call.run(
        "backward", x, _target(o, call), rows, make_transform(options), spec
    )
    return gradient
