"""The sweeps over pairs with the student's LM head, in plain XLA: for ROWS rows at a time their logits are made, and those of a
teacher with a head of its own, and swept by the functions over logits. Any platform.

Scratch is a few float32 arrays [ROWS, V], dhidden [N, H] and dhead, as large as the head, in float32, and of a head that is not
in the type which the products see a copy that is. Nothing is left to a backward, which makes all of it again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from tileloss.jax._devices import varying_alike
from tileloss.jax._rows.options import Options
from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec
from tileloss.jax._sweeps.pairs import Pair, PairSpec, State
from tileloss.jax._sweeps.xla import over_tiles, stored, tile
from tileloss.jax._sweeps.xla_head import as_seen, product

ROWS = 128  # of a step


class OfLogits(Protocol):
    """The module with the sweeps over logits."""

    def forward(
        self, pair: Pair, labels: Array, options: Options, spec: PairSpec, /
    ) -> tuple[dict[str, Array], State]: ...

    def value_and_grad(
        self, pair: Pair, labels: Array, weights: Array, options: Options, spec: PairSpec, /
    ) -> tuple[dict[str, Array], Operand]: ...


def forward(
    of_logits: OfLogits, pair: Pair, labels: Array, options: Options, spec: PairSpec
) -> tuple[dict[str, Array], State]:
    heads = _Heads(pair, spec.student)

    def step(outputs: dict[str, Array], start: Array | int, rows: int) -> dict[str, Array]:
        of_rows = tile(labels, start, rows, axis=0)
        found, _ = of_logits.forward(heads.logits(start, rows), of_rows, options, spec)
        return _stored_rows(outputs, found, start)

    outputs = over_tiles(labels.shape[0], ROWS, step, _no_outputs(labels, spec))
    return outputs, outputs[spec.outputs[0]]


def backward(
    of_logits: OfLogits,
    pair: Pair,
    labels: Array,
    weights: Array,
    state: State,
    options: Options,
    spec: PairSpec,
) -> Operand:
    return value_and_grad(of_logits, pair, labels, weights, options, spec)[1]


class _Carry(NamedTuple):
    outputs: dict[str, Array]
    sums: LmHead  # of the gradients, float32


def value_and_grad(
    of_logits: OfLogits,
    pair: Pair,
    labels: Array,
    weights: Array,
    options: Options,
    spec: PairSpec,
) -> tuple[dict[str, Array], Operand]:
    student = pair.student
    assert isinstance(student, LmHead) and student.hidden is not None
    part, used = spec.student, (labels >= 0)[:, None]
    layout = part.head_layout.lower()
    # 0 times the NaN of a row that is not used would be in dhead.
    hidden = jnp.where(used, student.hidden, 0)
    heads = _Heads(pair._replace(student=student._replace(hidden=hidden)), part)

    def step(carry: _Carry, start: Array | int, rows: int) -> _Carry:
        of_rows, weights_of_rows = (tile(x, start, rows, axis=0) for x in (labels, weights))
        found, gradient = of_logits.value_and_grad(
            heads.logits(start, rows), of_rows, weights_of_rows, options, spec
        )
        assert isinstance(gradient, Logits)
        dx = as_seen(gradient.logits, part)
        dhidden, dhead, dbias = carry.sums
        if dhidden is not None:
            of_tile = product(f"nv,{layout}->nh", dx, heads.student_head, part)
            dhidden = stored(dhidden, of_tile, start, axis=0)
        if dhead is not None:
            seen = as_seen(tile(hidden, start, rows, axis=0), part)
            dhead += product(f"nv,nh->{layout}", dx, seen, part)
        if dbias is not None:
            dbias += jnp.sum(gradient.logits, axis=0)
        outputs = _stored_rows(carry.outputs, found, start)
        return _Carry(outputs, LmHead(dhidden, dhead, dbias))

    sums = LmHead(
        *(
            jnp.zeros(x.shape, jnp.float32) if x is not None and wanted else None
            for x, wanted in zip(student, part.wanted, strict=True)
        )
    )
    sums, _ = varying_alike((sums, labels))
    carry = _Carry(_no_outputs(labels, spec), sums)
    outputs, sums = over_tiles(labels.shape[0], ROWS, step, carry)
    if sums.hidden is not None:
        # Where the head holds NaN or inf, 0 times it is in rows that are not used.
        sums = sums._replace(hidden=jnp.where(used, sums.hidden, 0.0))
    rounded = (
        None if x is None or total is None else total.astype(x.dtype)
        for x, total in zip(student, sums, strict=True)
    )
    return outputs, LmHead(*rounded)


class _Heads:
    """Both sides' logits, some rows at a time."""

    def __init__(self, pair: Pair, spec: Spec) -> None:
        student, beside = pair.student, dict(pair.beside)
        assert isinstance(student, LmHead) and student.hidden is not None
        assert student.head is not None
        self.spec = spec
        self.student_head = as_seen(student.head, spec)
        self.student = LmHead(student.hidden, self.student_head, student.bias)
        self.teacher: LmHead | None = None
        if "teacher_head" in beside:
            head = as_seen(beside.pop("teacher_head"), spec)
            self.teacher = LmHead(
                beside.pop("teacher_hidden"), head, beside.pop("teacher_bias", None)
            )
        self.of_columns = {n: beside.pop(n) for n in ("class_weights",) if n in beside}
        self.of_rows = beside

    def logits(self, start: Array | int, rows: int) -> Pair:
        beside = {name: tile(x, start, rows, axis=0) for name, x in self.of_rows.items()}
        beside |= self.of_columns
        if self.teacher is not None:
            beside["teacher_logits"] = self._logits(self.teacher, start, rows)
        return Pair(Logits(self._logits(self.student, start, rows)), beside)

    def _logits(self, side: LmHead, start: Array | int, rows: int) -> Array:
        hidden, head, bias = side
        assert hidden is not None and head is not None
        seen = as_seen(tile(hidden, start, rows, axis=0), self.spec)
        x = product(f"nh,{self.spec.head_layout.lower()}->nv", seen, head, self.spec)
        return x if bias is None else x + bias.astype(jnp.float32)


def _no_outputs(labels: Array, spec: PairSpec) -> dict[str, Array]:
    outputs = {
        name: jnp.zeros(labels.shape, jnp.bool_ if name == "agreement" else jnp.float32)
        for name in spec.outputs
    }
    outputs, _ = varying_alike((outputs, labels))
    return outputs


def _stored_rows(
    outputs: dict[str, Array], found: dict[str, Array], start: Array | int
) -> dict[str, Array]:
    return {name: stored(x, found[name], start, axis=0) for name, x in outputs.items()}
