"""The JAX row stage on a Problem, and its comparison with the witness."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_problems import STATE, Arrays, Problem, Witness, gradient, transformed, witness
from tileloss._core.functions import FUNCTIONS
from tileloss.jax._rows import coefficients, logprobs, options
from tileloss.jax._rows.cross_entropy import cross_entropy
from tileloss.jax._rows.inputs import read_rows
from tileloss.jax._rows.policy import loss as policy
from tileloss.jax._rows.state import RowState


def to_state(arrays: Arrays) -> RowState:
    """The library's row states for the row stage."""
    found = {name: jnp.asarray(arrays[name]) for name in STATE}
    found["argmax"] = found["argmax"].astype(jnp.int32)
    return RowState(**found)


def resolved(problem: Problem) -> options.Options:
    """The options, checked as a front end would."""
    given = options.resolve(problem.function, problem.options, problem.preset)
    rows, columns = problem.logits.shape
    vectors = {n: a.size for n, a in problem.tensors.items() if not n.endswith("_grad")}
    options.check(
        given,
        rows=rows,
        columns=columns,
        vectors=vectors,
        sequence_length=problem.sequence_length,
    )
    return given


def run(problem: Problem, state: RowState, given: options.Options | None = None) -> Witness:
    """What the row stage makes of the library's row states."""
    given = given or resolved(problem)
    tensors = {name: jnp.asarray(array) for name, array in problem.tensors.items()}
    labels, classes = jnp.asarray(problem.labels), problem.classes
    loss = metrics = None
    rows = read_rows(state, labels, given, classes=classes, mask=tensors.get("mask"))
    outputs = logprobs.row_outputs(
        rows.stats, rows.used, labels, classes=classes, logp_divisor=rows.logp_divisor
    )
    if "loss_grad" in tensors and not problem.is_per_row:
        tensors["loss_grad"] = tensors["loss_grad"].reshape(())
    if problem.function == "logprobs":
        found = logprobs.logprobs_coefficients(state, labels, given, classes=classes, **tensors)
    else:
        if problem.function == "cross_entropy":
            result = cross_entropy(state, labels, given, classes=classes, **tensors)
        else:
            result, metrics = policy.policy_loss(
                state,
                labels,
                tensors.pop("advantages"),
                given,
                classes=classes,
                sequence_length=problem.sequence_length,
                **tensors,
            )
        loss, found = np.atleast_1d(result.loss), result.coefficients
    at_labels = coefficients.target_gradient(rows.stats, found, _label_weights(problem))
    dlogits = gradient(problem, rows.stats, found, np.asarray(rows.used), np.asarray(at_labels))
    values = {n: np.asarray(v) for n, v in outputs._asdict().items() if v is not None}
    return Witness({}, values, loss, metrics, dlogits)


def _label_weights(problem: Problem) -> Any:
    if "class_weights" not in problem.tensors:
        return 1.0
    weights = problem.tensors["class_weights"]
    return jnp.asarray(weights[np.clip(problem.labels, 0, weights.size - 1)])


RELATIVE = 1e-5


def rounding(problem: Problem, state: Arrays) -> Arrays:
    """How far float32 may put a row's logp, and its lse or mean logit, off: two roundings, 2^-24 each, of a number as large as
    z_y - m or log V, and as |z|. An offset common to a row costs its logp nothing."""
    z, _ = transformed(problem)
    with np.errstate(all="ignore"):
        distance = np.abs(state["label_logit"] - state["max"])
        largest = np.abs(np.where(np.isfinite(z), z, 0)).max(axis=1, initial=1)
    distance = np.where(np.isfinite(distance), distance, 0)
    of_logp = 2.0**-23 * np.maximum(distance, np.log(problem.classes)) + product_rounding(problem)
    return {"logp": of_logp, "lse": 2.0**-23 * largest + of_logp}


def product_rounding(problem: Problem) -> np.ndarray:
    """How far the sum that makes a logit may be off: a rounding, 2^-24, of each factor's length, on either side."""
    if problem.head is None:
        return np.zeros(problem.logits.shape[0])
    length = np.linalg.norm(np.nan_to_num(problem.head.hidden), axis=1)
    largest = np.linalg.norm(problem.head.weight, axis=1).max()
    bias = 0 if problem.head.bias is None else np.abs(problem.head.bias).max()
    return 2.0**-23 * (length * largest + bias)


def differences(problem: Problem, ours: Witness, theirs: Witness) -> dict[str, float]:
    """By quantity: the largest difference over what is allowed: RELATIVE of the number and a floor; inf where one is NaN or
    infinite and the other is not.

    The floor is what `rounding` of every logp does to the quantity: to row outputs just that; to a loss by its gradient, sum over
    the rows of abs(dloss/dlogp), and dloss/dlogp itself moves by no more than the problem's largest gradient times it.
    """
    floors = rounding(problem, theirs.state)
    delta = float(floors["logp"].max(initial=0))
    finite = theirs.dlogits[np.isfinite(theirs.dlogits)]
    steepest = float(np.abs(finite).max(initial=0))
    upstream = float(np.abs(problem.tensors.get("loss_grad", np.ones(1))).min())
    found = {}
    if ours.dlogits is not None:
        found["dlogits"] = _worst(ours.dlogits, theirs.dlogits, 2 * delta * steepest)
    for name, array in theirs.outputs.items():
        floor = floors["lse" if name in ("lse", "mean_logit") else "logp"]
        found[name] = _worst(ours.outputs[name], array, floor)
    if theirs.loss is not None:
        # The largest gradient of a row is that of its label, up to a factor that p near 1 makes; 1e-7 for what has none left.
        rows = np.abs(np.where(np.isfinite(theirs.dlogits), theirs.dlogits, 0)).max(
            axis=1, initial=0
        )
        slope = rows.max(initial=0) if problem.is_per_row else rows.sum()
        found["loss"] = _worst(ours.loss, theirs.loss, 4 * delta * slope / upstream + 1e-7)
    if theirs.metrics is not None:
        for i, name in enumerate(FUNCTIONS[problem.function].metrics):
            found[f"metric {name}"] = _worst(ours.metrics[i], theirs.metrics[i], delta)
    return found


def _worst(ours: Any, theirs: Any, floor: Any) -> float:
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert a.shape == b.shape
    with np.errstate(all="ignore"):
        error = np.abs(a - b) / (RELATIVE * np.abs(b) + floor)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    error = np.where(same, 0, np.where(np.isfinite(a) & np.isfinite(b), error, np.inf))
    return float(error.max(initial=0))


def compare(problem: Problem, given: options.Options | None = None) -> dict[str, float]:
    theirs = witness(problem)
    return differences(problem, run(problem, to_state(theirs.state), given), theirs)


def assert_agrees(problem: Problem, given: options.Options | None = None) -> float:
    found = compare(problem, given)
    wrong = {name: worst for name, worst in found.items() if not worst <= 1}
    assert not wrong, f"{problem.preset} {dict(problem.options)}: {wrong}"
    return max(found.values())
