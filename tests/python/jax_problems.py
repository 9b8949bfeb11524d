"""Problems for the JAX row stage, and its witness: the C library called on numpy arrays. No framework but numpy.

Problem   logits, labels, the other tensors of a call, its options
witness   what the library makes of it: the row states, the row outputs, loss, metrics, gradient
gradient  dL/dlogits in float64 from a row stage's coefficients: the backward sweep's part
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tileloss._core import calls
from tileloss._core.functions import FUNCTIONS
from tileloss._core.slots import SLOTS
from tileloss._core.structs import (
    BACKWARD,
    FLOAT32,
    FORWARD,
    INT32,
    INT64,
    UINT8,
    VALUE_AND_GRAD,
    RowState,
)

Arrays = dict[str, np.ndarray]
_TYPES = {"float32": FLOAT32, "int32": INT32, "int64": INT64, "uint8": UINT8}
STATE = ("max", "sum", "label_logit", "entropy_sum", "collision_sum", "smoothing_sum", "argmax")
ROW_GRADS = ("logp_grad", "lse_grad", "entropy_grad", "mean_logit_grad")
OUTPUTS = ("logp", "lse", "entropy", "argmax", "correct", "log_sum_sq_probs", "mean_logit")


@dataclass(frozen=True)
class Head:
    """What makes a problem's logits, if that is hidden weight^T + bias. float32 arrays, whatever the products see."""

    hidden: np.ndarray  # [N, H]
    weight: np.ndarray  # [V, H]
    bias: np.ndarray | None  # [V]
    compute_dtype: str


@dataclass(frozen=True)
class Problem:
    function: str
    logits: np.ndarray  # float32 [N, V]
    labels: np.ndarray  # int64 [N]
    tensors: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # by their names in tileloss_args
    options: Mapping[str, Any] = field(default_factory=dict)
    preset: str = ""
    sequence_length: int = 0
    head: Head | None = None  # the functions are then linear_*

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    def option(self, name: str) -> Any:
        return self.options.get(name, FUNCTIONS[self.function].options[name].usual)

    @property
    def classes(self) -> int:
        padded = self.option("valid_vocab")
        return self.logits.shape[1] if padded < 0 else padded

    @property
    def is_per_row(self) -> bool:
        return "none" in (self.options.get("reduction"), self.options.get("aggregation"))


class _Call:
    def __init__(self, problem: Problem) -> None:
        name = f"linear_{problem.function}" if problem.head else problem.function
        self.function, self.args = FUNCTIONS[name], calls.new_args()
        self.alive: list[Any] = []
        self.options = self.function.new_options(problem.preset)
        for name, value in problem.options.items():
            self.function.set_value(self.options, name, self.function.number(name, value))
        self.operands(problem)
        for name, array in {"labels": problem.labels, **problem.tensors}.items():
            self.vector(name, array)
        self.args.sequence_length = problem.sequence_length

    def operands(self, problem: Problem) -> None:
        head = problem.head
        if head is None:
            self.matrix("logits", np.ascontiguousarray(problem.logits))
            return
        self.matrix("hidden", np.ascontiguousarray(head.hidden))
        self.matrix("head", np.ascontiguousarray(head.weight))
        if head.bias is not None:
            self.vector("bias", head.bias)
        compute = self.function.choice("compute_dtype", head.compute_dtype)
        self.function.set_value(self.options, "compute_dtype", compute)

    def matrix(self, slot: str, array: np.ndarray) -> np.ndarray:
        self.alive.append(array)
        strides = (max(array.shape[1], 1), 1)
        calls.set_matrix(self.args, slot, array.ctypes.data, FLOAT32, array.shape, strides)
        return array

    def vector(self, slot: str, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array)
        self.alive.append(array)
        dtype = _TYPES[array.dtype.name]
        calls.set_vector(self.args, slot, array.ctypes.data, dtype, array.size, 1)
        return array

    def row_state(self, rows: int) -> Arrays:
        arrays = {n: np.zeros(rows, np.int64 if n == "argmax" else np.float32) for n in STATE}
        places = [arrays[n].ctypes.data for n in STATE]
        state = RowState(ctypes.sizeof(RowState), rows, *places)
        self.args.row_state = ctypes.addressof(state)
        self.alive += [state, arrays]
        return arrays

    def run(self, call_pass: int) -> None:
        calls.call(self.function, call_pass, self.args, self.options, threads=1)


@dataclass
class Witness:
    state: Arrays
    outputs: Arrays
    loss: np.ndarray | None
    metrics: np.ndarray | None
    dlogits: np.ndarray | None  # None: a Head's gradients alone
    head_grads: Arrays = field(default_factory=dict)  # of a Head, by its members' names


def witness(problem: Problem) -> Witness:
    """Two calls: forward with every output there is, and value and gradient (or backward). Of a problem with a head dlogits is
    that of its logits, in float32."""
    rows, upstream = problem.logits.shape[0], {"loss_grad", *ROW_GRADS}
    function = FUNCTIONS[problem.function]
    forward = _Call(
        problem.but(tensors={k: v for k, v in problem.tensors.items() if k not in upstream})
    )
    state = forward.row_state(rows)
    outputs = {}
    for name in OUTPUTS:
        if name == "mean_logit" and "class_weights" in problem.tensors:
            continue
        dtype = {INT64: np.int64, UINT8: np.uint8, FLOAT32: np.float32}[SLOTS[name].dtypes[0]]
        outputs[name] = forward.vector(name, np.full(rows, 77, dtype))
    loss = metrics = None
    size = rows if problem.is_per_row else 1
    if function.is_loss:
        loss = forward.vector("loss", np.full(size, 77, np.float32))
    if function.metrics:
        metrics = forward.vector("metrics", np.full(len(function.metrics), 77, np.float32))
    forward.run(FORWARD)
    if problem.head is not None:
        dlogits = witness(problem.but(head=None)).dlogits
        return Witness(state, outputs, loss, metrics, dlogits, _head_gradients(problem))

    second = _Call(problem)
    dlogits = second.matrix("dlogits", np.full(problem.logits.shape, 77, np.float32))
    if function.is_loss:
        again = second.vector("loss", np.full(size, 77, np.float32))
        second.run(VALUE_AND_GRAD)
        if "loss_grad" not in problem.tensors:
            assert loss is not None
            np.testing.assert_allclose(again, loss, rtol=1e-6, atol=1e-7)
    else:
        second.run(BACKWARD)
    return Witness(state, outputs, loss, metrics, dlogits)


def _head_gradients(problem: Problem) -> Arrays:
    """By a backward, which computes the logits again: value_and_grad may keep them in 16 bits."""
    assert problem.head is not None
    call, head = _Call(problem), problem.head
    found = {"hidden": call.matrix("dhidden", np.full(head.hidden.shape, 77, np.float32))}
    found["weight"] = call.matrix("dhead", np.full(head.weight.shape, 77, np.float32))
    if head.bias is not None:
        found["bias"] = call.vector("dbias", np.full(head.bias.shape, 77, np.float32))
    call.run(BACKWARD)
    return found


def transformed(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """z and dz/dx in float64, of the columns that count."""
    x = problem.logits[:, : problem.classes].astype(np.float64)
    scale, cap = problem.option("logit_scale"), problem.option("softcap")
    on_logits = problem.option("temperature_on") == "logits"
    temperature = float(np.float32(problem.option("temperature"))) if on_logits else 1.0
    u = scale * x
    with np.errstate(all="ignore"):
        capped = cap * np.tanh(u / cap) if cap else u
        slope = 1 - np.tanh(u / cap) ** 2 if cap else np.ones_like(u)
    return capped / temperature, slope * scale / temperature


def gradient(
    problem: Problem, stats: Any, coefficients: Any, used: np.ndarray, at_labels: np.ndarray
) -> np.ndarray:
    """dL/dlogits in float64. ``stats``: a RowStats, ``at_labels``: dL/dz there, from the row stage."""
    z, slope = transformed(problem)
    c = {name: np.asarray(v, np.float64)[:, None] for name, v in coefficients._asdict().items()}
    with np.errstate(all="ignore"):
        shifted = z - np.asarray(stats.max, np.float64)[:, None]
        p = np.exp(shifted) / np.asarray(stats.sum, np.float64)[:, None]
        logp = shifted - np.asarray(stats.log_sum, np.float64)[:, None]
        plogp = np.where(p == 0, 0 * p, p * logp)
        of_p = c["prob_plus_target"] - c["target"]
        weights = problem.tensors.get("class_weights", np.ones(problem.classes))
        dz = p * of_p + np.where(c["prob_logp"] == 0, 0.0, plogp * c["prob_logp"])
        dz = dz + np.where(c["uniform"] == 0, 0.0, c["uniform"] * weights)
        rows = np.flatnonzero(used)
        dz[rows, problem.labels[rows]] = np.asarray(at_labels, np.float64)[rows]
        dx = np.zeros(problem.logits.shape)
        dx[:, : problem.classes] = np.where(used[:, None], dz * slope, 0.0)
    return dx


# ---------------------------------------------------------------------------------------------------- the problems themselves

ROWS, VOCABULARY = 21, 29
LENGTHS = (7, 0, 4, 6, 4)  # of the sequences: one is empty
IGNORED = -100


def plain_problem(function: str, seed: int = 0, **options: Any) -> Problem:
    """Random logits; some rows are ignored, and full of NaN."""
    random = np.random.default_rng(seed)
    logits = (3 * random.standard_normal((ROWS, VOCABULARY))).astype(np.float32)
    labels = random.integers(0, options.get("valid_vocab", VOCABULARY), ROWS)
    # Labels of all sorts: the likeliest class, and by a wide margin.
    labels[:6] = np.argmax(logits[:6, : options.get("valid_vocab", VOCABULARY)], axis=1)
    logits[np.arange(3), labels[:3]] += 12
    ignored = options.get("ignore_index", IGNORED)
    for row in (4, 15):
        if abs(ignored) < 2**31:  # JAX's labels are int32: none of them is any other
            labels[row], logits[row] = ignored, np.nan
    tensors = {}
    if function == "logprobs":
        for name in ROW_GRADS:
            tensors[name] = random.standard_normal(ROWS).astype(np.float32)
    else:
        size = ROWS if "none" in options.values() else 1
        tensors["loss_grad"] = -random.uniform(0.5, 2, size).astype(np.float32)
    return Problem(function, logits, labels, tensors, options)


def policy_problem(seed: int = 0, preset: str = "", batch: bool = False, **options: Any) -> Problem:
    """On top of it masked rows full of NaN, and policies that differ by some 0.3 a token. ``batch``: [3, 7], not offsets."""
    problem = plain_problem("policy_loss", seed, **options)
    random = np.random.default_rng(seed + 1000)
    mask = np.ones(ROWS, np.uint8)
    mask[[9, 18, 20]] = 0
    unused = (mask == 0) | (problem.labels == options.get("ignore_index", IGNORED))
    problem.logits[unused] = np.nan
    logits = np.where(unused[:, None], 0, problem.logits).astype(np.float32)
    labels = np.where(unused, 0, problem.labels)
    plain = Problem("logprobs", logits, labels, {}, _logit_options(options))
    logp = witness(plain)
    tensors = dict(problem.tensors)
    for name, spread in (("old_logp", 0.3), ("ref_logp", 0.5), ("sampler_logp", 0.3)):
        noise = random.normal(0, spread, ROWS)
        tensors[name] = np.where(unused, np.nan, logp.outputs["logp"] + noise).astype(np.float32)
    count = 3 if batch else len(LENGTHS)
    size = ROWS if options.get("advantage_level") == "token" else count
    signs = np.resize([1, -1, -1], size)
    tensors["advantages"] = (signs * random.uniform(0.3, 2, size)).astype(np.float32)
    tensors["mask"] = mask
    if not batch:
        tensors["sequence_offsets"] = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    return problem.but(tensors=tensors, preset=preset, sequence_length=7 if batch else 0)


def _logit_options(options: Mapping[str, Any]) -> dict[str, Any]:
    known = FUNCTIONS["logprobs"].options
    return {name: value for name, value in options.items() if name in known}
