"""From a public function's arguments to sweeps and row stage, with a gradient of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from tileloss._core.slots import DIFFERENTIABLE, ROW_OUTPUTS, SLOTS
from tileloss.jax._arguments import checked_labels, flat, flat_vectors, spoiled_unless
from tileloss.jax._devices import Leading, axes_of_rows, on_auto_axes, varying_alike
from tileloss.jax._differentiated import Wanted, instantiated, primals, with_results_checked
from tileloss.jax._implementations import Choice, check_names, choose
from tileloss.jax._rows.coefficients import RowCoefficients, target_gradient
from tileloss.jax._rows.cross_entropy import cross_entropy
from tileloss.jax._rows.inputs import is_used, read_rows
from tileloss.jax._rows.logprobs import logprobs, logprobs_coefficients
from tileloss.jax._rows.options import Options, check, resolve
from tileloss.jax._rows.policy.loss import policy_loss
from tileloss.jax._rows.state import RowState
from tileloss.jax._rows.stats import RowOutputs
from tileloss.jax._shards import Shards
from tileloss.jax._sweeps.operands import (
    ELSEWHERE,
    UNUSED,
    BackwardRows,
    LmHead,
    Operand,
    Spec,
    Sums,
)
from tileloss.jax._sweeps.transform import make_transform

# The optional arrays of a row state by their bits (tileloss_state_array in tileloss.h).
_OPTIONAL = {3: "entropy_sum", 4: "collision_sum", 5: "smoothing_sum", 6: "argmax"}


class _Call(NamedTuple):
    """What is known of a call while it is traced."""

    options: Options
    spec: Spec
    choice: Choice
    classes: int  # of the whole vocabulary, padding excluded
    sequence_length: int = 0
    shards: Shards | None = None

    def run(self, sweep: str, x: Operand, *arguments: Any) -> Any:
        """``sweep``: "forward" or "backward", with its arguments; over all shards of the vocabulary."""
        if self.shards is None:
            return self.choice.run(sweep, x, *arguments)
        return getattr(self.shards, sweep)(self.choice.run, x, *arguments)

    def with_arrays(self, arrays: dict[str, Array]) -> Options:
        return self.options._replace(arrays=arrays)


class _Inputs(NamedTuple):
    """Everything that may be traced besides the operand."""

    labels: Array
    vectors: dict[str, Array]  # by their names in tileloss_args
    arrays: dict[str, Array]  # options that are arrays
    places: Array | None  # of the rows among the labels, where their order is another


@partial(with_results_checked, results=itemgetter(0))  # metrics may be NaN
def loss_of(
    function: str,
    operand: Operand,
    labels: Array,
    vectors: Mapping[str, Array | None],
    given: Mapping[str, Any],
    *,
    head: Spec | None = None,
    implementation: str | Iterable[str] | None = None,
    vocab_axis: str | None = None,
    preset: str = "",
    wants_metrics: bool = False,
    grad_in_forward: bool | None = None,
) -> tuple[Array, Array | None]:
    """The loss, of the labels' shape unless it is reduced, and the metrics [M] if wanted.

    ``operand``: logits [..., V], or hidden states [..., H] with their head. ``head``: its head_layout and compute_dtype.
    """
    options = resolve(function, given, preset)
    if grad_in_forward and options.is_per_row:
        raise ValueError(
            "grad_in_forward: expected False for a loss per row (reduction or aggregation 'none'), whose upstream gradient "
            "has to be known, got True"
        )
    outputs = ("entropy",) if wants_metrics else ()
    x, inputs, leading, call = _prepare(
        options, operand, labels, vectors, outputs, head, implementation, vocab_axis
    )
    if grad_in_forward is None:
        grad_in_forward = not options.is_per_row and _saves_a_product(x, call)

    def stage(
        state: RowState, o: _Inputs, loss_grad: Array | None = None
    ) -> tuple[Array, Array | None, RowCoefficients]:
        tensors = {**o.vectors, "loss_grad": loss_grad}
        resolved = call.with_arrays(o.arrays)
        if "advantages" not in tensors:
            result = cross_entropy(state, o.labels, resolved, classes=call.classes, **tensors)
            return result.loss, None, result.coefficients
        advantages = tensors.pop("advantages")
        assert advantages is not None
        result, metrics = policy_loss(
            state,
            o.labels,
            advantages,
            resolved,
            classes=call.classes,
            sequence_length=call.sequence_length,
            places=o.places,
            **tensors,
        )
        return result.loss, metrics if wants_metrics else None, result.coefficients

    @jax.custom_vjp
    def run(x: Operand, o: _Inputs) -> tuple[Array, Array | None]:
        loss, metrics, _ = stage(_forward(x, o, call), o)
        return loss, metrics

    def forward(x: Operand, o: _Inputs) -> tuple[tuple[Array, Array | None], Any]:
        wanted, x, o = primals(x, o)
        if grad_in_forward:
            loss, metrics, gradient = call.choice.run_whole(
                partial(by_sweeps, wanted), partial(in_one_pass, wanted), x, o
            )
            return (loss, metrics), gradient
        state = _forward(x, o, call)
        loss, metrics, _ = stage(state, o)
        return (loss, metrics), (x, o, state, wanted)

    def by_sweeps(wanted: Wanted, x: Operand, o: _Inputs) -> tuple[Array, Array | None, Operand]:
        state = _forward(x, o, call)
        loss, metrics, coefficients = stage(state, o)
        return loss, metrics, _backward(x, o, call, state, coefficients, wanted)

    def in_one_pass(wanted: Wanted, run: Any, x: Operand, o: _Inputs) -> Any:
        return run(
            call.with_arrays(o.arrays),
            x,
            _columns_of_labels(o, call),
            {name: vector for name, vector in o.vectors.items() if name != "mask"},
            call.spec._replace(wanted=tuple(wanted)),
            sequence_length=call.sequence_length,
            wants_metrics=wants_metrics,
        )

    def backward(saved: Any, gradients: tuple[Array | SymbolicZero, Any]) -> tuple[Operand, None]:
        upstream = instantiated(gradients[0])
        if call.shards:
            upstream = call.shards.upstream(saved if grad_in_forward else saved[0], upstream)
        if grad_in_forward:  # what is saved is the gradient for an upstream of 1
            return jax.tree.map(lambda g: (g * upstream).astype(g.dtype), saved), None
        x, o, state, wanted = saved
        return _backward(x, o, call, state, stage(state, o, upstream)[2], wanted), None

    run.defvjp(forward, with_results_checked(backward), symbolic_zeros=True)
    loss, metrics = on_auto_axes(run, x, inputs, rows=x[0], by_rows=(options.is_per_row, False))
    return (leading.shaped(loss) if loss.ndim else loss), metrics


def _saves_a_product(x: Operand, call: _Call) -> bool:
    """Whether a gradient in the forward is less work: with the LM head in C++. One in float16 would be rounded before a loss
    scale multiplies it."""
    narrow = any(tensor is not None and tensor.dtype == jnp.float16 for tensor in x)
    return isinstance(x, LmHead) and not narrow and call.choice.has_one_pass(jax.default_backend())


@with_results_checked
def rows_of(
    function: str,
    operand: Operand,
    labels: Array,
    outputs: Iterable[str],
    given: Mapping[str, Any],
    *,
    head: Spec | None = None,
    implementation: str | Iterable[str] | None = None,
    vocab_axis: str | None = None,
) -> RowOutputs:
    """The row outputs by name, of the labels' shape."""
    asked_for = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if unknown := [name for name in asked_for if name not in ROW_OUTPUTS]:
        raise ValueError(
            f"outputs: expected names among {', '.join(ROW_OUTPUTS)}, got {', '.join(unknown)}"
        )
    options = resolve(function, given)
    x, inputs, leading, call = _prepare(
        options, operand, labels, {}, asked_for, head, implementation, vocab_axis
    )
    differentiable = [name for name in asked_for if name in DIFFERENTIABLE]

    def stage(state: RowState, o: _Inputs) -> dict[str, Array]:
        resolved = call.with_arrays(o.arrays)
        found = logprobs(state, o.labels, resolved, classes=call.classes)._asdict()
        return {name: found[name] for name in asked_for}

    @jax.custom_vjp
    def run(x: Operand, o: _Inputs) -> dict[str, Array]:
        return stage(_forward(x, o, call), o)

    def forward(x: Operand, o: _Inputs) -> tuple[dict[str, Array], Any]:
        wanted, x, o = primals(x, o)
        state = _forward(x, o, call)
        return stage(state, o), (x, o, state, wanted)

    def backward(saved: Any, gradients: dict[str, Any]) -> tuple[Operand, None]:
        x, o, state, wanted = saved
        given = {name: gradients[name] for name in differentiable}
        upstream = {
            f"{name}_grad": call.shards.upstream(x, g) if call.shards else g
            for name, g in given.items()
            if not isinstance(g, SymbolicZero)
        }
        resolved = call.with_arrays(o.arrays)
        coefficients, _ = logprobs_coefficients(
            state, o.labels, resolved, classes=call.classes, **upstream
        )
        return _backward(x, o, call, state, coefficients, wanted), None

    run.defvjp(forward, with_results_checked(backward), symbolic_zeros=True)
    found = on_auto_axes(run, x, inputs, rows=x[0], by_rows=True)
    return RowOutputs(**{name: leading.shaped(value) for name, value in found.items()})


def _prepare(
    options: Options,
    operand: Operand,
    labels: Array,
    vectors: Mapping[str, Array | None],
    outputs: Iterable[str],
    head: Spec | None,
    implementation: str | Iterable[str] | None,
    vocab_axis: str | None,
) -> tuple[Operand, _Inputs, Leading, _Call]:
    """Checks the arguments and flattens the leading dimensions."""
    names = check_names(implementation)
    labels = checked_labels(labels)
    operand, leading, width, spec = flat(operand, labels, head or Spec(0))
    rows = operand[0]
    assert rows is not None
    shards = 1 if vocab_axis is None else _axis_size(vocab_axis)
    vocab = shards * width
    options, are_right = options.within_ranges()
    inputs, of_inputs = flat_vectors(vectors, leading, vocab, options)
    labels = spoiled_unless(are_right + of_inputs, labels, options)
    length = 0
    if "advantages" in vectors and "sequence_offsets" not in inputs:
        if labels.ndim != 2:
            raise ValueError(
                f"labels: expected [B, T] without sequence_offsets, got shape {list(labels.shape)}"
            )
        length = labels.shape[1]
    check(
        options,
        rows=labels.size,
        columns=vocab,
        vectors={n: v.size for n, v in inputs.items()},
        sequence_length=length,
    )
    valid = options.integer("valid_vocab")
    classes = vocab if valid < 0 else valid
    if "class_weights" in inputs:
        inputs["class_weights"] = inputs["class_weights"][:classes].astype(jnp.float32)
    sums, is_loss = _sums(options, outputs), options.function.is_loss
    spec = spec._replace(
        columns=classes,
        sums=sums,
        # What is differentiated through the sums of row outputs has a gradient of that kind.
        has_prob_logp=_may_be_on(options, "entropy_coef") if is_loss else sums.entropy_sum,
        has_uniform=_may_be_on(options, "label_smoothing") if is_loss else sums.smoothing_sum,
        row_axes=axes_of_rows(rows),
    )
    choice = choose(names, operand, spec, "class_weights" in inputs)
    if vocab_axis is not None:
        choice = choice._replace(may_be_whole=False)
    places = None
    if "advantages" in vectors and leading.is_cut_within:
        places = leading.flat(jnp.arange(labels.size, dtype=jnp.int32))
    others = _Inputs(leading.flat(labels), inputs, options.arrays, places)
    operand, others = varying_alike((operand, others), but=vocab_axis)
    cut = None if vocab_axis is None else Shards(vocab_axis, shards, width, classes)
    return operand, others, leading, _Call(options, spec, choice, classes, length, cut)


def _axis_size(axis: str) -> int:
    try:
        return int(lax.axis_size(axis))
    except NameError as error:
        raise ValueError(
            f"vocab_axis: expected the name of a mesh axis inside shard_map, got {axis!r}"
        ) from error


def _may_be_on(options: Options, name: str) -> bool:
    return name in options.function.options and options.may_differ(name, 0)


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


def _forward(x: Operand, o: _Inputs, call: _Call) -> RowState:
    state: RowState = call.run(
        "forward",
        x,
        _columns_of_labels(o, call),
        make_transform(call.with_arrays(o.arrays)),
        call.spec,
        o.vectors.get("class_weights"),
    )
    return state


def _columns_of_labels(o: _Inputs, call: _Call) -> Array:
    labels = o.labels.astype(jnp.int32) if o.labels.dtype.itemsize < 4 else o.labels
    used = is_used(o.labels, call.with_arrays(o.arrays), o.vectors.get("mask"))
    is_class = (labels >= 0) & (labels < call.classes)
    return jnp.where(used, jnp.where(is_class, labels, ELSEWHERE), UNUSED).astype(jnp.int32)


def _backward(
    x: Operand,
    o: _Inputs,
    call: _Call,
    state: RowState,
    coefficients: RowCoefficients,
    wanted: Wanted,
) -> Operand:
    options, weights = call.with_arrays(o.arrays), o.vectors.get("class_weights")
    rows = read_rows(state, o.labels, options, classes=call.classes, mask=o.vectors.get("mask"))
    of_label = 1.0 if weights is None else weights[jnp.where(rows.wrong, 0, rows.labels)]
    gradient: Operand = call.run(
        "backward",
        x,
        BackwardRows(
            labels=_columns_of_labels(o, call),
            used=rows.used,
            state=state,
            log_sum=rows.stats.log_sum,
            coefficients=coefficients,
            at_label=target_gradient(rows.stats, coefficients, of_label),
        ),
        make_transform(options),
        call.spec._replace(wanted=tuple(wanted)),
        weights,
    )
    return gradient
