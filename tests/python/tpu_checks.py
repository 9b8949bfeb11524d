"""The TPU kernels without a TPU: in Pallas' strict interpreter, with blocks so small that every shape has whole ones and
ragged ones; and what they should give, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import jax_problems
from tileloss.jax import _implementations
from tileloss.jax._rows.coefficients import RowCoefficients
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps import tpu
from tileloss.jax._sweeps.operands import (
    UNUSED,
    BackwardRows,
    LmHead,
    Logits,
    Operand,
    Spec,
    Sums,
    Target,
)
from tileloss.jax._sweeps.tpu import calls, head, logits
from tileloss.jax._sweeps.tpu.blocks import Blocks
from tileloss.jax._sweeps.transform import IDENTITY, LogitTransform

BLOCKS = Blocks(16, 128)
ROWS, COLUMNS = 21, 300  # one whole block of rows and one of 5; two tiles of columns and one of 44
CORES = 2


@contextmanager
def strict(cores: int = CORES) -> Iterator[None]:
    """Reads and writes outside a block raise, so do races of cores; what nobody wrote is NaN."""
    interpret = pltpu.InterpretParams(
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        detect_races=True,
        num_cores_or_threads=cores,
    )
    try:
        with calls.using(interpret=interpret):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (logits, head):
        monkeypatch.setattr(module, "blocks_for", lambda call: BLOCKS)


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions run the TPU kernels here, on problems of COLUMNS columns."""
    use_small_blocks(monkeypatch)
    anywhere = _implementations.Implementation(
        "pallas_tpu", None, tpu.forward, tpu.backward, None, None, tpu.refusal
    )
    monkeypatch.setitem(_implementations.IMPLEMENTATIONS, "pallas_tpu", anywhere)
    monkeypatch.setattr(_implementations, "DEFAULT", ("pallas_tpu",))
    monkeypatch.setattr(jax_problems, "VOCABULARY", COLUMNS)


@dataclass
class SweepProblem:
    """A call of the two sweeps with coefficients drawn at random, and what comes of it by the definitions."""

    operand: Operand
    logits: np.ndarray  # float64 [N, V] of the operand
    labels: np.ndarray
    spec: Spec
    transform: LogitTransform = IDENTITY
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        random, rows = np.random.default_rng(1), self.labels.size
        self.used = self.labels != UNUSED
        draw = [random.normal(size=rows).astype(np.float32) for _ in range(5)]
        self.target, self.prob_plus_target, self.prob_logp, self.uniform, self.at_label = draw
        x, t = self.logits[:, : self.spec.columns], self.transform
        u = t.logit_scale * x
        capped = t.softcap * np.tanh(u / t.softcap) if t.softcap else u
        slope = 1 - np.tanh(u / t.softcap) ** 2 if t.softcap else np.ones_like(u)
        self.z = capped / t.temperature
        self.slope = slope * t.logit_scale / t.temperature
        self.c = np.ones(self.spec.columns) if self.weights is None else self.weights

    def state(self) -> RowState:
        """float64 [N]; rows that are not used are anything."""
        m = self.z.max(axis=1)
        shifted = self.z - m[:, None]
        e, rows = np.exp(shifted), np.arange(self.labels.size)
        sums, label = self.spec.sums, np.where(self.used, self.labels, 0)
        of_label = np.zeros(e.shape, bool)
        of_label[rows, label] = True
        return RowState(
            max=m,
            sum=np.where(of_label, 0, e).sum(axis=1),
            label_logit=self.z[rows, label],
            entropy_sum=(shifted * e).sum(axis=1) if sums.entropy_sum else None,
            collision_sum=(e * e).sum(axis=1) if sums.collision_sum else None,
            smoothing_sum=(self.c * shifted).sum(axis=1) if sums.smoothing_sum else None,
            argmax=self.z.argmax(axis=1) if sums.argmax else None,
            smoothing_weight=np.float64(self.c.sum()) if sums.smoothing_sum else None,
        )

    def rows(self) -> BackwardRows:
        state = self.state()
        log_sum = np.log(np.exp(self.z - self.z.max(axis=1)[:, None]).sum(axis=1))
        coefficients = (self.target, self.prob_plus_target, self.prob_logp, self.uniform)
        rows = BackwardRows(
            used=self.used,
            state=RowState(*(state[i].astype(np.float32) for i in range(3))),
            log_sum=log_sum.astype(np.float32),
            coefficients=RowCoefficients(*(np.where(self.used, c, 0) for c in coefficients)),
            at_label=self.at_label,
        )
        return jax.tree.map(jnp.asarray, rows)

    def dlogits(self) -> np.ndarray:
        """float64 [N, V]."""
        log_p = self.z - np.log(np.exp(self.z).sum(axis=1))[:, None]
        prob = np.float64(self.prob_plus_target) - self.target
        d = np.exp(log_p) * (
            prob[:, None] + (self.prob_logp[:, None] * log_p if self.spec.has_prob_logp else 0)
        )
        if self.spec.has_uniform:
            d += self.uniform[:, None] * self.c
        rows = np.flatnonzero(self.used)
        d[rows, self.labels[rows]] = self.at_label[rows]
        found = np.zeros(self.logits.shape)
        found[:, : self.spec.columns] = np.where(self.used[:, None], d * self.slope, 0)
        return found

    def held_against(self) -> Target:
        weights = {} if self.weights is None else {"class_weights": self.weights}
        arrays = {name: jnp.asarray(c, jnp.float32) for name, c in weights.items()}
        labels = jnp.asarray(self.labels, jnp.int32)
        return Target(labels, arrays, transform=self.transform)

    def run_forward(self) -> RowState:
        given = self.held_against()
        return jax.jit(lambda x: tpu.forward(x, given, self.spec))(self.operand)

    def run_backward(self) -> Operand:
        given, rows = self.held_against(), self.rows()
        return jax.jit(lambda x: tpu.backward(x, given, rows, self.spec))(self.operand)


def assert_forward_agrees(problem: SweepProblem, tolerance: float = 2e-6) -> None:
    """``tolerance``: of the largest z, for what is as large; of the numbers themselves."""
    ours, theirs = problem.run_forward(), problem.state()
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if b is None:
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if a.ndim:
            a, b = a[problem.used], b[problem.used]
        floor = tolerance * np.abs(problem.z[np.isfinite(problem.z)]).max()
        np.testing.assert_allclose(a, b, rtol=20 * tolerance, atol=floor, err_msg=name)


def assert_close(ours: object, theirs: np.ndarray, tolerance: float, what: str) -> None:
    """By the largest difference, over the largest number."""
    error = np.abs(np.asarray(ours, np.float64) - theirs).max() / np.abs(theirs).max()
    assert error <= tolerance, f"{what}: {error}"  # a NaN is no less than anything


def logits_problem(**changes: object) -> SweepProblem:
    """float32 logits with three rows that are not used and hold NaN."""
    random = np.random.default_rng(0)
    x = random.normal(0, 3, (ROWS, COLUMNS)).astype(np.float32)
    labels = random.integers(0, COLUMNS, ROWS)
    labels[[3, 16, 20]] = UNUSED
    exact = x.astype(np.float64)
    x[labels == UNUSED] = np.nan
    return SweepProblem(Logits(jnp.asarray(x)), exact, labels, Spec(COLUMNS), **changes)


def tied_problem() -> SweepProblem:
    """Rows with several maxima: everywhere, in one lane of every tile, in others; and with -inf in most lanes."""
    x = np.zeros((4, COLUMNS), np.float32)
    x[1, [5, 133, 261]] = x[2, [7, 130]] = 2
    x[3, 20:] = -np.inf
    spec = Spec(COLUMNS, sums=Sums(argmax=True))
    return SweepProblem(Logits(jnp.asarray(x)), x.astype(np.float64), np.arange(4), spec)


def assert_logits_agree(problem: SweepProblem) -> None:
    assert_forward_agrees(problem)
    found = problem.run_backward()
    assert isinstance(found, Logits)
    assert_close(found.logits, problem.dlogits(), 2e-6, "dlogits")
    assert (np.asarray(found.logits)[~problem.used] == 0).all()


def head_problem(
    layout: str,
    dtype: object,
    compute_dtype: object,
    *,
    has_bias: bool,
    padding: int = 0,
    weights: bool = False,
    spec: Spec | None = None,
    transform: LogitTransform = IDENTITY,
) -> SweepProblem:
    """Numbers of so few bits that the logits are exact in every type. Rows that are not used hold NaN, and so does the padding of
    the vocabulary."""
    random, hidden_size = np.random.default_rng(2), 33
    hidden = random.integers(-8, 9, (ROWS, hidden_size)) / 8
    matrix = random.integers(-8, 9, (COLUMNS, hidden_size)) / 16
    bias = random.integers(-8, 9, COLUMNS) / 8 if has_bias else None
    labels = random.integers(0, COLUMNS - padding, ROWS)
    labels[[3, 16, 20]] = UNUSED
    exact = hidden @ matrix.T + (0 if bias is None else bias)
    hidden[labels == UNUSED] = np.nan
    matrix[COLUMNS - padding :] = np.nan
    given = LmHead(
        jnp.asarray(hidden, dtype),
        jnp.asarray(matrix if layout == "VH" else matrix.T, dtype),
        None if bias is None else jnp.asarray(bias, dtype),
    )
    spec = (spec or Spec(0))._replace(
        columns=COLUMNS - padding,
        head_layout=layout,
        compute_dtype=jnp.dtype(compute_dtype),
        needs_grad=(True, True, has_bias),
    )
    c = random.integers(0, 9, COLUMNS - padding) / 4 if weights else None
    return SweepProblem(given, exact, labels, spec, transform, c)


def assert_head_agrees(problem: SweepProblem) -> None:
    assert_forward_agrees(problem)
    found, d = problem.run_backward(), problem.dlogits()
    given, layout = problem.operand, problem.spec.head_layout
    assert isinstance(found, LmHead) and isinstance(given, LmHead)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(given)]
    hidden = np.nan_to_num(np.asarray(given.hidden, np.float64))
    matrix = np.nan_to_num(np.asarray(given.head, np.float64))
    matrix = matrix if layout == "VH" else matrix.T
    dhead = d.T @ hidden
    # dlogits are rounded to the compute dtype, and the results to their own.
    is_half = jnp.bfloat16 in (problem.spec.compute_dtype, given.hidden.dtype)
    tolerance = 2.0**-8 if is_half else 4e-6
    assert_close(found.hidden, d @ matrix, tolerance, "dhidden")
    assert_close(found.head, dhead if layout == "VH" else dhead.T, tolerance, "dhead")
    assert (np.asarray(found.hidden)[~problem.used] == 0).all()
    if given.bias is not None:
        assert_close(found.bias, d.sum(axis=0), tolerance, "dbias")
