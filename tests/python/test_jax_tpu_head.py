"""The TPU kernels of the LM head in the strict interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tileloss.jax._sweeps import tpu
from tileloss.jax._sweeps.operands import LmHead, Spec, Sums
from tileloss.jax._sweeps.transform import LogitTransform
from tpu_checks import SweepProblem, assert_head_agrees, head_problem, strict, use_small_blocks

ALL = Spec(0, sums=Sums(True, True, True, True))
LOSS = Spec(0, has_prob_logp=False, has_uniform=False)
PROBLEMS: dict[str, Callable[[], SweepProblem]] = {
    "all, float32, VH, padding": lambda: head_problem(
        "VH", jnp.float32, jnp.float32, has_bias=True, padding=130, weights=True, spec=ALL
    ),
    "loss, bfloat16, HV, softcap": lambda: head_problem(
        "HV",
        jnp.bfloat16,
        jnp.bfloat16,
        has_bias=False,
        spec=LOSS,
        transform=LogitTransform(0.5, 3.0, 1.25),
    ),
    "all, bfloat16 products of float32, HV, padding": lambda: head_problem(
        "HV", jnp.float32, jnp.bfloat16, has_bias=True, padding=3, spec=ALL
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)
    with strict():
        assert_head_agrees(PROBLEMS[name]())


@pytest.mark.parametrize(
    "needs_grad", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_what_needs_a_gradient_is_computed(needs_grad: tuple[bool, ...]) -> None:
    problem = head_problem("VH", jnp.float32, jnp.float32, has_bias=True)
    spec = problem.spec._replace(needs_grad=needs_grad)
    given, rows = problem.held_against(), problem.rows()
    shapes = jax.eval_shape(lambda x: tpu.backward(x, given, rows, spec), problem.operand)
    assert tuple(x is not None for x in shapes) == (*needs_grad, False, False)


def test_what_it_cannot_do_is_refused_in_words() -> None:
    def refusal(dtype: object, hidden: int = 8, **of: bool) -> str:
        given = LmHead(jnp.zeros((4, hidden), dtype), jnp.zeros((9, hidden), dtype), None)
        spec = Spec(9, head_layout="VH", compute_dtype=np.dtype("float32"), **of)
        return tpu.refusal(given, spec)

    assert refusal(jnp.float32) == ""
    assert refusal(jnp.float32, has_low_rank=True) == "has no low_rank"
    assert refusal(jnp.float16) == "has no float16 (hidden, head)"
    assert refusal(jnp.float32, 100_000) == "has no room for this hidden size in VMEM"
