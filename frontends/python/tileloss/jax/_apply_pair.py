"""From a public function of a student and what it is held against to sweeps and row stage, with a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from tileloss.jax._arguments import all_of, checked_labels, flat, flat_vectors
from tileloss.jax._beside import Beside
from tileloss.jax._devices import Leading, on_auto_axes, varying_alike
from tileloss.jax._differentiated import Wanted, instantiated, primals, with_results_checked
from tileloss.jax._implementations import Choice, check_names, choose_for_pair
from tileloss.jax._rows.distillation import DistillationRows, RowWeights, row_losses, row_weights
from tileloss.jax._rows.inputs import is_used
from tileloss.jax._rows.options import Options, check, resolve
from tileloss.jax._sweeps.operands import UNUSED, Operand, Spec
from tileloss.jax._sweeps.pairs import Pair, PairSpec


class _Inputs(NamedTuple):
    """Everything that may be traced besides the student."""

    beside: dict[str, Array]  # what it is held against, by the names in tileloss_args
    labels: Array | None
    vectors: dict[str, Array]  # by the same: mask and token_weights
    arrays: dict[str, Array]  # options that are arrays
    is_right: Array | None  # bool []: whether those are in their ranges; None: there are none


class _Rows(NamedTuple):
    """The rows of a call, [N]."""

    used: Array
    wrong: Array  # used, with a label that is no class, or with a teacher's columns that cannot be
    columns: Array  # what the sweeps take for labels
    weights: RowWeights
    beside: dict[str, Array]  # as the sweeps take it


class _Call(NamedTuple):
    """What is known of a call while it is traced."""

    options: Options
    spec: PairSpec
    choice: Choice
    outputs: tuple[str, ...]  # those that the caller wants

    def options_of(self, o: _Inputs) -> Options:
        return self.options._replace(arrays=o.arrays)

    def run(
        self, sweep: str, x: Operand, o: _Inputs, rows: _Rows, wanted: Wanted, *arguments: Any
    ) -> Any:
        student = self.spec.student._replace(wanted=tuple(wanted))
        spec, pair = self.spec._replace(student=student), Pair(x, rows.beside)
        return self.choice.run(sweep, pair, rows.columns, *arguments, self.options_of(o), spec)


_NOTHING = Wanted()


@with_results_checked
def pair_loss_of(
    function: str,
    operand: Operand,
    beside: Callable[[Operand, Leading, Spec], Beside],
    labels: Array | None,
    vectors: Mapping[str, Array | None],
    given: Mapping[str, Any],
    outputs: Iterable[str],
    *,
    head: Spec | None = None,
    grad_in_forward: bool | None,
    implementation: str | Iterable[str] | None,
) -> tuple[Array, dict[str, Array]]:
    """The loss, of the rows' shape unless it is reduced, and the row outputs by name, of the rows' shape.

    ``operand``: the student's logits [..., V], or hidden states [..., H] with their head. ``beside``: checks what it is held
    against, once the student is; of _beside.py. ``head``: its head_layout and compute_dtype.
    """
    options = resolve(function, given)
    per_row = options.is_per_row
    if grad_in_forward and per_row:
        raise ValueError(
            "grad_in_forward: expected False for a loss per row (reduction 'none'), whose upstream gradient has to be known, "
            "got True"
        )
    x, inputs, leading, call = _prepare(
        options, operand, beside, labels, vectors, outputs, head, implementation
    )
    if grad_in_forward is None:
        # One in float16 would be rounded before a loss scale multiplies it.
        is_narrow = any(tensor is not None and tensor.dtype == jnp.float16 for tensor in x)
        grad_in_forward = not per_row and not is_narrow

    def results(
        found: dict[str, Array], o: _Inputs, rows: _Rows, is_weighted: bool = False
    ) -> tuple[Array, dict[str, Array]]:
        if "loss" in found:
            weighted = found["loss"] if is_weighted else rows.weights.of_rows * found["loss"]
            loss = jnp.where(rows.weights.factor == 0, 0.0, weighted)
        else:
            resolved, divergence = call.options_of(o), found["divergence"]
            loss = row_losses(resolved, divergence, found.get("logp"), rows.weights)
        loss = _of_used(loss, rows)
        named = {name: _of_used(found[name], rows) for name in call.outputs}
        return loss if per_row else jnp.sum(loss), named

    @jax.custom_vjp
    def run(x: Operand, o: _Inputs) -> tuple[Array, dict[str, Array]]:
        rows = _rows(call, x, o)
        return results(call.run("forward", x, o, rows, _NOTHING)[0], o, rows)

    def forward(x: Operand, o: _Inputs) -> tuple[tuple[Array, dict[str, Array]], Any]:
        wanted, x, o = primals(x, o)
        if not any(wanted):
            return run(x, o), None
        rows = _rows(call, x, o)
        if grad_in_forward:
            found, gradient = call.run("value_and_grad", x, o, rows, wanted, _row_factors(rows))
            return results(found, o, rows, is_weighted=True), gradient
        found, state = call.run("forward", x, o, rows, wanted)
        return results(found, o, rows), (x, o, state, wanted)

    def backward(
        saved: Any, gradients: tuple[Array | SymbolicZero, Any]
    ) -> tuple[Operand | None, None]:
        if saved is None:
            return None, None
        upstream = instantiated(gradients[0])
        if grad_in_forward:  # what is saved is the gradient for an upstream of 1
            return jax.tree.map(lambda g: (g * upstream).astype(g.dtype), saved), None
        x, o, state, wanted = saved
        rows = _rows(call, x, o)
        return call.run("backward", x, o, rows, wanted, _row_factors(rows) * upstream, state), None

    run.defvjp(forward, with_results_checked(backward), symbolic_zeros=True)
    loss, found = on_auto_axes(run, x, inputs, rows=x[0], by_rows=(per_row, True))
    return (leading.shaped(loss) if per_row else loss), {
        name: leading.shaped(value) for name, value in found.items()
    }


def _prepare(
    options: Options,
    operand: Operand,
    beside: Callable[[Operand, Leading, Spec], Beside],
    labels: Array | None,
    vectors: Mapping[str, Array | None],
    outputs: Iterable[str],
    head: Spec | None,
    implementation: str | Iterable[str] | None,
) -> tuple[Operand, _Inputs, Leading, _Call]:
    """Checks the arguments and flattens the leading dimensions."""
    names = check_names(implementation)
    wanted = _wanted(outputs)
    if labels is not None:
        labels = checked_labels(labels)
    operand, leading, columns, student = flat(operand, labels, head or Spec(0))
    arrays, student = beside(operand, leading, student)
    labels = None if labels is None else leading.flat(labels)
    options, are_right = options.within_ranges()
    given, _ = flat_vectors(vectors, leading, columns, options)
    check(
        options,
        rows=prod(leading.shape),
        columns=columns,
        vectors={n: v.size for n, v in given.items()},
        beside={n: x.shape for n, x in arrays.items()},
        has_labels=labels is not None,
        outputs=wanted,
    )
    valid = options.integer("valid_vocab")
    columns = columns if valid < 0 else valid
    if "class_weights" in given:
        arrays["class_weights"] = given.pop("class_weights")[:columns].astype(jnp.float32)
    spec = PairSpec(student._replace(columns=columns), _outputs(options, wanted))
    choice = choose_for_pair(names, options.function, Pair(operand, arrays))
    is_right = all_of(are_right) if are_right else None
    inputs = _Inputs(arrays, labels, given, options.arrays, is_right)
    x, inputs = varying_alike((operand, inputs))
    return x, inputs, leading, _Call(options, spec, choice, wanted)


def _outputs(options: Options, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """What the sweeps are to give of each row."""
    if "alpha" not in options.function.options:
        return ("loss",)
    alpha = options.number("alpha")
    if isinstance(alpha, float) and alpha > 1:
        # The library looks at it in the call alone.
        raise ValueError(f"alpha: expected a number >= 0 and <= 1, got {alpha:g}")
    needed = {"divergence"} | ({"logp"} if options.may_differ("alpha", 0) else set())
    return tuple(name for name in DistillationRows._fields if name in {*wanted, *needed})


def _wanted(outputs: Iterable[str]) -> tuple[str, ...]:
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if unknown := [name for name in names if name not in DistillationRows._fields]:
        raise ValueError(
            f"outputs: expected names among {', '.join(DistillationRows._fields)}, got {', '.join(unknown)}"
        )
    return tuple(dict.fromkeys(names))


def _rows(call: _Call, x: Operand, o: _Inputs) -> _Rows:
    options, mask = call.options_of(o), o.vectors.get("mask")
    if o.labels is None:
        # alpha is 0 then: any column may be the one that is computed to more digits.
        assert x[0] is not None
        labels = jnp.zeros_like(x[0], jnp.int32, shape=x[0].shape[:1])
        used = labels == 0 if mask is None else mask != 0
    else:
        labels, used = o.labels, is_used(o.labels, options, mask)
        if labels.dtype.itemsize < 4:
            labels = labels.astype(jnp.int32)  # which holds the number of classes
    wrong, beside = (labels < 0) | (labels >= call.spec.columns), o.beside
    if "teacher_ids" in beside:
        ids, of_ids = _checked_ids(
            beside["teacher_ids"], beside["teacher_logprobs"], used, call.spec.columns
        )
        wrong, beside = wrong | of_ids, beside | {"teacher_ids": ids}
    if o.is_right is not None:
        wrong |= ~o.is_right
    wrong &= used
    columns = jnp.where(used, jnp.where(wrong, 0, labels), UNUSED).astype(jnp.int32)
    weights = row_weights(options, used, o.vectors.get("token_weights"))
    return _Rows(used, wrong, columns, weights, beside)


def _checked_ids(ids: Array, log_q: Array, used: Array, columns: int) -> tuple[Array, Array]:
    """The ids in int32, and which rows have one that is no column, or one twice, or of a log q that is above 0 by more than
    rounding: none of theirs is left, nor of unused rows."""
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)  # which holds the number of classes
    ordered = jnp.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    wrong = jnp.any(twice, axis=1) | (ordered[:, -1] >= columns)
    wrong |= jnp.any((ids >= 0) & (log_q > 0.001), axis=1)
    is_there = (ids >= 0) & (used & ~wrong)[:, None]
    return jnp.where(is_there, ids, -1).astype(jnp.int32), wrong


def _row_factors(rows: _Rows) -> Array:
    """What the sweeps are to multiply each row's gradient by."""
    return jnp.where(rows.wrong, jnp.nan, rows.weights.of_rows)


def _of_used(x: Array, rows: _Rows) -> Array:
    """0 where a row does not count, NaN where its label is wrong."""
    if x.dtype == jnp.bool_:
        return x & rows.used & ~rows.wrong
    return jnp.where(rows.used, jnp.where(rows.wrong, jnp.nan, x), 0.0)
