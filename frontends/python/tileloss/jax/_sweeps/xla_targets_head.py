"""The sweeps of the targets that are not labels with the student's LM head, in plain XLA: for ROWS rows at a time their logits
are made, and those of a teacher with a head of its own, and swept by the functions over logits. Any platform.

Scratch is a few float32 arrays [ROWS, V], dhidden [N, H] and dhead, as large as the head, in float32, and of a head that is not
in the type which the products see a copy that is. Nothing is left to a backward, which makes all of it again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tileloss.jax._devices import varying_alike
from tileloss.jax._sweeps import xla_targets
from tileloss.jax._sweeps.operands import (
    LmHead,
    Logits,
    Spec,
    Swept,
    Target,
    TargetRows,
    output_dtype,
)
from tileloss.jax._sweeps.xla import (
    as_seen,
    hidden_as_seen,
    logits_of,
    only_used,
    over_tiles,
    product,
    rounded,
    stored,
    tile,
)

ROWS = 128  # of a step
Outputs = dict[str, Array]


def forward(operand: LmHead, target: Target, spec: Spec) -> Swept:
    heads = _Heads(operand, target, spec)

    def step(outputs: Outputs, start: Array | int, rows: int) -> Outputs:
        swept = xla_targets.forward(*heads.rows(start, rows), spec)
        return _stored_rows(outputs, swept.outputs, start)

    labels = target.labels
    return Swept(over_tiles(labels.shape[0], ROWS, step, _no_outputs(labels, spec)), ())


def backward(operand: LmHead, target: Target, rows: TargetRows, spec: Spec) -> LmHead:
    return rows_and_grad(operand, target, rows.weights, spec)[1]


class _Carry(NamedTuple):
    outputs: Outputs
    sums: LmHead  # of the gradients, float32


def rows_and_grad(
    operand: LmHead, target: Target, weights: Array, spec: Spec
) -> tuple[Outputs, LmHead]:
    assert operand.hidden is not None
    labels, layout = target.labels, spec.head_layout.lower()
    used = (labels >= 0)[:, None]
    # 0 times the NaN of a row that is not used would be in dhead.
    heads = _Heads(only_used(operand, used), target, spec)

    def step(carry: _Carry, start: Array | int, rows: int) -> _Carry:
        of_rows = tile(weights, start, rows, axis=0)
        found, (gradient,) = xla_targets.rows_and_grad(*heads.rows(start, rows), of_rows, spec)
        dx = as_seen(gradient, spec)
        here, sums = heads.student_rows(start, rows), carry.sums._asdict()
        for name in ("", "_r"):
            hidden, head = f"hidden{name}", f"head{name}"
            if sums[hidden] is not None:
                of_tile = product(f"nv,{layout}->nh", dx, getattr(here, head), spec)
                sums[hidden] = stored(sums[hidden], of_tile, start, axis=0)
            if sums[head] is not None:
                sums[head] += product(f"nv,nh->{layout}", dx, getattr(here, hidden), spec)
        if sums["bias"] is not None:
            sums["bias"] += jnp.sum(gradient, axis=0)
        return _Carry(_stored_rows(carry.outputs, found, start), LmHead(**sums))

    sums = LmHead(
        *(
            jnp.zeros(x.shape, jnp.float32) if x is not None and needs else None
            for x, needs in zip(operand, spec.needs_grad, strict=True)
        )
    )
    sums, _ = varying_alike((sums, labels))
    carry = _Carry(_no_outputs(labels, spec), sums)
    outputs, sums = over_tiles(labels.shape[0], ROWS, step, carry)
    return outputs, rounded(sums, operand, used, spec)


class _Heads:
    """Both sides' logits, some rows at a time."""

    def __init__(self, operand: LmHead, target: Target, spec: Spec) -> None:
        arrays = dict(target.arrays)
        self.spec, self.target = spec, target
        self.student = operand.mapped("head", lambda x: as_seen(x, spec))
        self.teacher = None
        if "teacher_head" in arrays:
            hidden, head = arrays.pop("teacher_hidden"), as_seen(arrays.pop("teacher_head"), spec)
            self.teacher = LmHead(hidden, head, arrays.pop("teacher_bias", None))
        of_all_rows = [n for n, x in arrays.items() if n == "class_weights" or x.shape[0] == 1]
        self.column_arrays = {name: arrays.pop(name) for name in of_all_rows}
        self.row_arrays = arrays

    def rows(self, start: Array | int, rows: int) -> tuple[Logits, Target]:
        def part(x: Array) -> Array:
            return tile(x, start, rows, axis=0)

        arrays = jax.tree.map(part, self.row_arrays) | self.column_arrays
        if self.teacher is not None:
            teacher = self._side_rows(self.teacher, start, rows)
            arrays["teacher_logits"] = logits_of(teacher, self.spec)
        target = self.target._replace(labels=part(self.target.labels), arrays=arrays)
        return Logits(logits_of(self.student_rows(start, rows), self.spec)), target

    def student_rows(self, start: Array | int, rows: int) -> LmHead:
        """Matrices as the products see them."""
        return self._side_rows(self.student, start, rows)

    def _side_rows(self, side: LmHead, start: Array | int, rows: int) -> LmHead:
        some = side.mapped("hidden", lambda x: tile(x, start, rows, axis=0))
        return hidden_as_seen(some, self.spec)


def _no_outputs(labels: Array, spec: Spec) -> Outputs:
    outputs = {name: jnp.zeros(labels.shape, output_dtype(name)) for name in spec.outputs}
    outputs, _ = varying_alike((outputs, labels))
    return outputs


def _stored_rows(outputs: Outputs, found: Outputs, start: Array | int) -> Outputs:
    return {name: stored(x, found[name], start, axis=0) for name, x in outputs.items()}
