"""The TPU kernels through libtpu's compiler, which needs no TPU.

As a program, `tpu_compiler.py CHIP`: compiles those from logits, for the account that LIBTPU_INIT_ARGS has the compiler leave.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tileloss.jax._rows.coefficients import RowCoefficients
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps import tpu
from tileloss.jax._sweeps.operands import BackwardRows, LmHead, Logits, Operand, Spec, Sums, Target
from tileloss.jax._sweeps.tpu import calls
from tileloss.jax._sweeps.transform import LogitTransform

# For libtpu, as it is loaded: there is no machine to ask, and several processes may compile at once.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ROWS, COLUMNS = 4096, 151936
LOSS = Spec(COLUMNS, has_prob_logp=False, has_uniform=False)
ALL = Spec(COLUMNS, sums=Sums(True, True, True, True))
VERSION = version("libtpu") if importlib.util.find_spec("libtpu") else ""
NOT_RUN = "" if VERSION else "NOT RUN: libtpu is not installed"


def shape(dtype: Any, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def devices(chip: str) -> list[Any]:
    """Four of these chips, to compile for."""
    os.environ.update(ENVIRONMENT)
    return list(topologies.get_topology_desc(TOPOLOGIES[chip], "tpu").devices)


def compiled(
    chip: str, function: Callable[..., Any], *arguments: Any, donated: tuple[int, ...] = ()
) -> Any:
    device = devices(chip)[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    with calls.using(device_kind=device.device_kind):
        traced = jax.jit(function, donate_argnums=donated).trace(*placed)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def _options(spec: Spec) -> tuple[Any, Any]:
    """With all sums, all else too: a traced temperature and class weights."""
    has_all = spec.sums.argmax
    return shape(jnp.float32) if has_all else None, shape(jnp.float32, COLUMNS) if has_all else None


def _target(labels: Any, temperature: Any, weights: Any) -> Target:
    given = {} if weights is None else {"class_weights": weights}
    if temperature is None:
        return Target(labels, given)
    return Target(labels, given, transform=LogitTransform(1.0, 30.0, temperature))


def forward(chip: str, operand: Operand, spec: Spec, rows: int = ROWS) -> Any:
    def run(x: Operand, labels: Any, temperature: Any, weights: Any) -> RowState:
        return tpu.forward(x, _target(labels, temperature, weights), spec)

    return compiled(chip, run, operand, shape(jnp.int32, rows), *_options(spec))


def backward(
    chip: str, operand: Operand, spec: Spec, rows: int = ROWS, donated: bool = False
) -> Any:
    def run(
        x: Operand, labels: Any, given: BackwardRows, temperature: Any, weights: Any
    ) -> Operand:
        return tpu.backward(x, _target(labels, temperature, weights), given, spec)

    floats = shape(jnp.float32, rows)
    given = BackwardRows(
        used=shape(jnp.bool_, rows),
        state=RowState(floats, floats, floats),
        log_sum=floats,
        coefficients=RowCoefficients(floats, floats, floats, floats),
        at_label=floats,
    )
    of_rows = (shape(jnp.int32, rows), given)
    return compiled(chip, run, operand, *of_rows, *_options(spec), donated=(0,) if donated else ())


def logits(dtype: Any = jnp.bfloat16) -> Logits:
    return Logits(shape(dtype, ROWS, COLUMNS))


def lm_head(hidden: int, layout: str, dtype: Any = jnp.bfloat16) -> LmHead:
    sizes = (COLUMNS, hidden) if layout == "VH" else (hidden, COLUMNS)
    return LmHead(shape(dtype, ROWS, hidden), shape(dtype, *sizes), None)


if __name__ == "__main__":
    chip = sys.argv[1]
    for spec in (LOSS, ALL):
        forward(chip, logits(), spec)
        backward(chip, logits(), spec)
