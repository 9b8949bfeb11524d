"""From a public function's arguments to sweeps and row stage, with a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from tileloss.jax._arguments import SHOWN, Call, Inputs, prepare
from tileloss.jax._devices import on_auto_axes
from tileloss.jax._rows.coefficients import target_gradient
from tileloss.jax._rows.cross_entropy import cross_entropy
from tileloss.jax._rows.distillation import WeightedRows, row_weights
from tileloss.jax._rows.inputs import Rows, read, read_labels, read_rows, without_columns
from tileloss.jax._rows.logprobs import logprobs, logprobs_coefficients
from tileloss.jax._rows.policy.loss import policy_loss
from tileloss.jax._rows.policy.metrics import applicable
from tileloss.jax._rows.slots import Slots, columns_of, slots_of
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.allowed import opened
from tileloss.jax._sweeps.operands import (
    ELSEWHERE,
    UNUSED,
    BackwardRows,
    Operand,
    SlotGradients,
    Swept,
    Target,
    TargetRows,
)
from tileloss.jax._sweeps.slots import slot_logits
from tileloss.jax._sweeps.transform import make_transform

Results = dict[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])


@jax.tree_util.register_static
class NeedsGrad(tuple[bool, ...]):
    """Which of the operand's arrays are differentiated."""


def _with_results_checked(function: _Function) -> _Function:
    """The function under `jax.debug_nans`: outside of jit it would raise for NaN that stands for "not given" or "does not apply",
    and never gets into what it returns. That is checked."""

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if not jax.config.jax_debug_nans:  # type: ignore[attr-defined]
            return function(*arguments, **named)
        with jax.debug_nans(False):
            found = function(*arguments, **named)
        jax.tree.map(jnp.copy, found)
        return found

    return cast(_Function, checked)


@_with_results_checked
def apply(loss: str, operand: Operand, **arguments: Any) -> Results:
    """The results by their names in tileloss_args: "loss", of the rows' shape unless it is reduced; "metrics" that apply, by
    name; row outputs, of the rows' shape.

    ``loss``: a function of the library, from logits. ``arguments``: what else a public function was given, tensors by their names
    in tileloss_args.
    """
    x, inputs, leading, call = prepare(loss, operand, arguments)

    @jax.custom_vjp
    def run(x: Operand, o: Inputs) -> Results:
        return _stage(*_forward(x, o, call), call)[0]

    def forward(x: Operand, o: Inputs) -> tuple[Results, Any]:
        needs_grad, x, o = _primals(x, o)
        if not any(needs_grad):
            return run(x, o), None
        if call.grad_in_forward:
            return call.choice.run_whole(
                partial(_by_sweeps, call, needs_grad), partial(_in_one_pass, call, needs_grad), x, o
            )
        state, o = _forward(x, o, call)
        return _stage(state, o, call)[0], (x, o, state, needs_grad)

    def backward(saved: Any, gradients: Results) -> tuple[Operand | None, None]:
        given = {n: g for n, g in gradients.items() if n in call.differentiable}
        given = {n: g for n, g in given.items() if not isinstance(g, SymbolicZero)}
        if saved is None or not given:
            return None, None
        if call.shards:
            of = saved if call.grad_in_forward else saved[0]
            given = {n: call.shards.upstream(of, g) for n, g in given.items()}
        if call.grad_in_forward:  # what is saved is the gradient for an upstream of 1
            return jax.tree.map(lambda g: (g * given["loss"]).astype(g.dtype), saved), None
        x, o, state, needs_grad = saved
        upstream = {f"{name}_grad": g for name, g in given.items()}
        coefficients = _stage(state, o, call, upstream)[1]
        return _backward(x, o, call, state, coefficients, needs_grad, upstream), None

    run.defvjp(forward, _with_results_checked(backward), symbolic_zeros=True)
    by_rows = {name: name != "metrics" for name in call.outputs}
    if call.options.function.is_loss:
        by_rows["loss"] = call.options.is_per_row
    found: Results = on_auto_axes(run, x, inputs, rows=x[0], by_rows=by_rows)
    if call.labels_per_row in (0, 1) and "logp" in found:
        found["logp"] = found["logp"][:, None][:, : call.labels_per_row]
    found = {name: leading.shaped(x) if by_rows[name] else x for name, x in found.items()}
    if "metrics" in found:
        named = dict(zip(call.options.function.metrics, found["metrics"], strict=True))
        names = applicable(call.options, "ref_logp" in inputs.vectors)
        found["metrics"] = {name: named[name] for name in names}
    return found


def _primals(x: Any, o: Any) -> tuple[NeedsGrad, Operand, Inputs]:
    """The arguments of a forward rule with symbolic zeros: which are differentiated, and their values.

    Raises:
        ValueError: one that has no gradient is to be differentiated: its gradient would be 0 in silence.
    """

    def is_primal(leaf: Any) -> bool:
        return isinstance(leaf, CustomVJPPrimal)

    needs_grad = NeedsGrad(leaf is not None and leaf.perturbed for leaf in x)
    for path, leaf in jax.tree_util.tree_leaves_with_path(o, is_leaf=is_primal):
        name = getattr(path[-1], "key", "")
        is_float = jnp.issubdtype(leaf.value.dtype, jnp.floating)
        # A teacher is a constant whatever it is made of.
        if leaf.perturbed and is_float and not name.startswith("teacher_"):
            shown = SHOWN.get(name, name)
            raise ValueError(
                f"{shown}: expected an array without gradient, as it is not differentiated (jax.lax.stop_gradient), got one "
                "that is to be differentiated"
            )
    x, o = jax.tree.map(lambda leaf: leaf.value, (x, o), is_leaf=is_primal)
    return needs_grad, x, o


def _by_sweeps(call: Call, needs_grad: NeedsGrad, x: Operand, o: Inputs) -> tuple[Results, Operand]:
    state, o = _forward(x, o, call)
    results, coefficients = _stage(state, o, call)
    return results, _backward(x, o, call, state, coefficients, needs_grad)


def _in_one_pass(
    call: Call, needs_grad: NeedsGrad, value_and_grad: Any, x: Operand, o: Inputs
) -> tuple[Results, Operand]:
    options, spec = call.options_of(o), call.spec._replace(needs_grad=tuple(needs_grad))
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
    outputs, gradient = value_and_grad(x, _target(o, call), rows.factors, spec)
    return rows.results(options, outputs, call.outputs, is_weighted=True), gradient


def _target(o: Inputs, call: Call) -> Target:
    """As the sweeps take it."""
    options, mask = call.options_of(o), o.vectors.get("mask")
    labels, used, wrong = read_labels(o.labels, options, call.classes, mask)
    transform = make_transform(options)
    none = ELSEWHERE if call.is_of_labels else 0  # of such rows the weights are NaN
    columns = jnp.where(used, jnp.where(wrong, none, labels), UNUSED).astype(jnp.int32)
    if call.is_of_labels:
        return Target(columns, o.target, transform=transform)
    return Target(columns, without_columns(o.target, used & ~wrong), options, transform)


def _sweep(call: Call, sweep: str, x: Operand, *arguments: Any) -> Any:
    """``sweep``: "forward" or "backward", with its arguments; over all shards of the vocabulary."""
    if call.shards is None:
        return call.choice.run(sweep, x, *arguments)
    return getattr(call.shards, sweep)(call.choice.run, x, *arguments)


def _forward(x: Operand, o: Inputs, call: Call) -> tuple[Any, Inputs]:
    """The state, and the inputs with the label of each row that it knows."""
    if call.spec.has_slots:
        options = call.options_of(o)
        columns, _ = columns_of(o.labels, options, call.classes)
        of = slot_logits if call.shards is None else call.shards.slot_logits
        z = of(x, columns, Target(o.labels, o.target, transform=make_transform(options)), call.spec)
        labels, slots = slots_of(o.labels, z, options, call.classes)
        o = o._replace(labels=labels, slots=slots)
    return _sweep(call, "forward", x, _target(o, call), call.spec), o


def _backward(
    x: Operand,
    o: Inputs,
    call: Call,
    state: Any,
    coefficients: Any,
    needs_grad: NeedsGrad,
    upstream: Mapping[str, Array] | None = None,
) -> Operand:
    """``state``, ``o``, ``coefficients``: as `_forward` and `_stage` gave them; ``upstream``: as `_stage` got it."""
    options, weights = call.options_of(o), o.target.get("class_weights")
    rows: BackwardRows | TargetRows
    if call.is_of_labels:
        mask = o.vectors.get("mask")
        known = read_rows(state, o.labels, options, classes=call.classes, mask=mask)
        of_label = 1.0 if weights is None else weights[jnp.where(known.wrong, 0, known.labels)]
        at_label = target_gradient(known.stats, coefficients, of_label)
        slots = None
        if o.slots is not None:
            slots = _slot_gradients(o.slots, known, upstream or {})
        rows = BackwardRows(known.used, state, known.stats.log_sum, coefficients, at_label, slots)
    else:
        # The gradient, which may lie over the logits, has to wait for the forward. Rows where that is NaN are NaN anyway.
        first = state.outputs[call.spec.outputs[0]]
        rows = TargetRows(jnp.where(jnp.isnan(first), jnp.nan, coefficients), state.state)
    spec = call.spec._replace(needs_grad=tuple(needs_grad))
    target = _target(o, call)
    if target.allowed is not None and o.allowed is not None and call.is_of_labels:
        target = target.replaced(allowed=opened(target.allowed, o.allowed == 0))
    gradient: Operand = _sweep(call, "backward", x, target, rows, spec)
    return gradient


def _slot_gradients(slots: Slots, rows: Rows, upstream: Mapping[str, Array]) -> SlotGradients:
    of_logp = slots.upstream(upstream.get("logp_grad"), rows.logp_divisor)
    of_logp = jnp.where(rows.wrong[:, None] & slots.used, jnp.nan, of_logp)
    others = {name: read(x, rows.used) for name, x in upstream.items() if name != "logp_grad"}
    return SlotGradients(jnp.where(slots.used, slots.columns, UNUSED), of_logp, others)


# ------------------------------------------------------------------------------------------------ the row stage, by loss


def _stage(
    state: Any, o: Inputs, call: Call, upstream: Mapping[str, Array] | None = None
) -> tuple[Results, Any]:
    """The results, and what a backward sweep is to be told of each row. ``upstream``: gradients by their names in
    tileloss_args; None: a loss's is 1."""
    return _STAGES[call.options.function.loss](state, o, call, upstream or {})


def _stage_of_logprobs(
    state: RowState, o: Inputs, call: Call, upstream: Mapping[str, Array]
) -> tuple[Results, Any]:
    options, coefficients = call.options_of(o), None
    of_rows: dict[str, Any] = {"classes": call.classes, "allowed": o.allowed, "slots": o.slots}
    found = logprobs(state, o.labels, options, **of_rows)._asdict()
    if upstream:
        of_rows |= upstream
        coefficients = logprobs_coefficients(state, o.labels, options, **of_rows)
    return {name: found[name] for name in call.outputs}, coefficients


def _stage_of_cross_entropy(
    state: RowState, o: Inputs, call: Call, upstream: Mapping[str, Array]
) -> tuple[Results, Any]:
    result = cross_entropy(
        state,
        o.labels,
        call.options_of(o),
        classes=call.classes,
        allowed=o.allowed,
        class_weights=o.target.get("class_weights"),
        **o.vectors,
        **upstream,
    )
    return {"loss": result.loss}, result.coefficients


def _stage_of_policy(
    state: RowState, o: Inputs, call: Call, upstream: Mapping[str, Array]
) -> tuple[Results, Any]:
    result, metrics = policy_loss(
        state,
        o.labels,
        options=call.options_of(o),
        classes=call.classes,
        sequence_length=call.sequence_length,
        places=o.places,
        wants_metrics="metrics" in call.outputs,
        **o.vectors,
        **upstream,
    )
    named = {} if metrics is None else {"metrics": metrics}
    return {"loss": result.loss, **named}, result.coefficients


def _stage_of_target(
    swept: Swept, o: Inputs, call: Call, upstream: Mapping[str, Array]
) -> tuple[Results, Any]:
    """Of a target that is not labels."""
    rows = _weighted_rows(o, call)
    factors = rows.factors * upstream["loss_grad"] if upstream else rows.factors
    return rows.results(call.options_of(o), swept.outputs, call.outputs), factors


def _weighted_rows(o: Inputs, call: Call) -> WeightedRows:
    options, mask = call.options_of(o), o.vectors.get("mask")
    _, used, wrong = read_labels(o.labels, options, call.classes, mask)
    return WeightedRows(used, wrong, row_weights(options, used, o.vectors.get("token_weights")))


_STAGES: dict[str, Callable[..., tuple[Results, Any]]] = {
    "cross_entropy": _stage_of_cross_entropy,
    "distillation": _stage_of_target,
    "logprobs": _stage_of_logprobs,
    "policy_loss": _stage_of_policy,
    "soft_cross_entropy": _stage_of_target,
    "sparse_distillation": _stage_of_target,
}
