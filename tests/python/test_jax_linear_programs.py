"""What JAX's users do with the functions fused with the LM head and with grad_in_forward; what the programs hold and compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_calls import ONLY_XLA, assert_agrees, tiles_of
from jax_heads import with_head
from jax_problems import plain_problem, policy_problem
from tileloss.jax import (
    cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
)
from tileloss.jax._sweeps import xla

pytestmark = [pytest.mark.usefixtures("implementation"), ONLY_XLA]
TOKENS, SIZE, VOCABULARY, TILE = 12, 5, 40, 8
small_tiles = tiles_of(TILE)


@pytest.fixture
def hidden() -> Any:
    return jax.random.normal(jax.random.key(0), (TOKENS, SIZE))


@pytest.fixture
def head() -> Any:
    return jax.random.normal(jax.random.key(1), (SIZE, VOCABULARY))


@pytest.fixture
def labels() -> Any:
    return jax.random.randint(jax.random.key(2), (TOKENS,), 0, VOCABULARY).at[3].set(-100)


def assert_close(ours: Any, theirs: Any) -> None:
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------------------------- transformations


def test_under_vmap_scan_and_checkpoint_it_is_the_same(hidden: Any, head: Any, labels: Any) -> None:
    # In bfloat16, whose sweeps have a way of their own on CPUs before jax 0.11.
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)

    def summed_loss(hidden: Any, head: Any, labels: Any) -> Any:
        return linear_cross_entropy(hidden, head, labels, reduction="sum")

    each = jax.value_and_grad(summed_loss, argnums=(0, 1))
    x, y = hidden.reshape(3, 4, SIZE), labels.reshape(3, 4)
    alone = [jax.jit(each)(x[i], head, y[i]) for i in range(3)]
    expected = jax.tree.map(lambda *parts: jnp.stack(parts), *alone)
    assert_close(jax.jit(jax.vmap(each, in_axes=(0, None, 0)))(x, head, y), expected)
    _, scanned = jax.lax.scan(lambda carry, one: (carry, each(one[0], head, one[1])), 0, (x, y))
    assert_close(scanned, expected)
    again = jax.jit(jax.grad(jax.checkpoint(lambda x: summed_loss(x, head, y))))(x)
    assert_close(again, expected[1][0])


def test_heads_may_be_mapped_over(hidden: Any, head: Any, labels: Any) -> None:
    heads = jnp.stack([head, 2 * head])
    mapped = jax.jit(jax.vmap(lambda w: linear_logprobs(hidden, w, labels).logp))(heads)
    assert_close(mapped[1], linear_logprobs(hidden, heads[1], labels).logp)


def test_numbers_that_change_may_be_traced(hidden: Any, head: Any, labels: Any) -> None:
    traces = []

    def fused(hidden: Any, temperature: Any) -> Any:
        traces.append(1)
        return linear_cross_entropy(hidden, head, labels, temperature=temperature)

    def plain(hidden: Any, temperature: Any) -> Any:
        return cross_entropy(hidden @ head / temperature, labels)

    ours, theirs = jax.jit(jax.value_and_grad(fused)), jax.jit(jax.value_and_grad(plain))
    for temperature in (jnp.float32(0.7), jnp.float32(1.6)):
        assert_close(ours(hidden, temperature), theirs(hidden, temperature))
    assert len(traces) == 1


# ------------------------------------------------------------------------------------------------------ products and memory


def products_of(jaxpr: Any) -> list[Any]:
    """The products of a program, those of its loops and of what it calls included."""
    found = [equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
    for equation in jaxpr.eqns:
        for inner in _programs_in(equation):
            found += products_of(inner)
    return found


def _programs_in(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


@pytest.mark.parametrize(
    ("asked_for", "products"), [((0, 1, 2), 4), ((0, 1), 4), (0, 3), (1, 3), (2, 2)], ids=str
)
@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_a_gradient_that_is_not_asked_for_is_no_product(
    hidden: Any, head: Any, labels: Any, asked_for: Any, products: int, grad_in_forward: bool
) -> None:
    """One product is the forward's, one makes the logits again."""

    def loss(hidden: Any, head: Any, bias: Any) -> Any:
        return linear_cross_entropy(
            hidden, head, labels, bias=bias, grad_in_forward=grad_in_forward
        )

    gradient = jax.grad(loss, argnums=asked_for)
    program = jax.make_jaxpr(gradient)(hidden, head, jnp.zeros(VOCABULARY))
    assert len(products_of(program.jaxpr)) == products


def test_a_stopped_gradient_is_none_that_is_asked_for(hidden: Any, head: Any, labels: Any) -> None:
    def loss(hidden: Any, head: Any) -> Any:
        return linear_cross_entropy(hidden, jax.lax.stop_gradient(head), labels)

    program = jax.make_jaxpr(jax.jit(jax.grad(loss, argnums=(0, 1))))(hidden, head)
    assert len(products_of(program.jaxpr)) == 3
    assert (jax.grad(loss, argnums=1)(hidden, head) == 0).all()


@pytest.mark.parametrize(
    ("dtype", "layout"), [(jnp.float32, "HV"), (jnp.bfloat16, "HV"), (jnp.bfloat16, "VH")]
)
def test_neither_logits_nor_a_copy_of_the_head_is_held(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, layout: str
) -> None:
    monkeypatch.setattr(xla, "TILE", 256)
    rows, size, vocabulary = 128, 64, 8192 + 100
    shape = (size, vocabulary) if layout == "HV" else (vocabulary, size)
    hidden, head = jax.ShapeDtypeStruct((rows, size), dtype), jax.ShapeDtypeStruct(shape, dtype)
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def loss(hidden: Any, head: Any, labels: Any) -> Any:
        return linear_cross_entropy(hidden, head, labels, head_layout=layout)

    def scratch(function: Callable[..., Any]) -> int:
        memory = jax.jit(function).lower(hidden, head, labels).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    tiles = 6 * 4 * rows * 256  # float32, of the head too where a CPU has no bfloat16
    bytes_of_head, bytes_of_logits = head.size * head.dtype.itemsize, 4 * rows * vocabulary
    assert tiles < min(bytes_of_head, bytes_of_logits)
    assert scratch(jax.grad(loss)) < tiles
    # Before jax 0.11 a copy of bfloat16's dhead, as integers.
    copied = bytes_of_head if dtype == jnp.bfloat16 else 0
    assert scratch(jax.grad(loss, argnums=(0, 1))) < tiles + copied


# ---------------------------------------------------------------------------------------------------------- grad_in_forward


@pytest.mark.parametrize("function", ["cross_entropy", "policy_loss"])
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "head"])
def test_a_gradient_of_the_forward_agrees(function: str, fused: bool) -> None:
    if function == "policy_loss":
        problem = policy_problem(seed=5, preset="gspo", batch=True)
    else:
        problem = plain_problem(function, label_smoothing=0.1)
    assert_agrees(with_head(problem) if fused else problem, grad_in_forward=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_gradient_of_the_forward_is_scaled_in_float32(
    hidden: Any, labels: Any, dtype: Any
) -> None:
    hidden, head = hidden.astype(dtype), jnp.ones((SIZE, VOCABULARY), dtype) / 8

    def gradients(scale: float) -> Any:
        def loss(*operands: Any) -> Any:
            return scale * linear_cross_entropy(*operands, labels, grad_in_forward=True)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, head)

    for one, scaled in zip(gradients(1.0), gradients(1.0 / 3), strict=True):
        expected = (one.astype(jnp.float32) * jnp.float32(1.0 / 3)).astype(dtype)
        np.testing.assert_array_equal(np.asarray(scaled), np.asarray(expected))
        assert scaled.dtype == dtype


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_where_the_upstream_gradient_is_1_nothing_is_scaled(
    hidden: Any, head: Any, labels: Any, dtype: str
) -> None:
    operands = [x.astype({"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]) for x in (hidden, head)]

    def passes(scales: bool) -> int:
        def loss(hidden: Any, head: Any, scale: Any) -> Any:
            value = linear_cross_entropy(hidden, head, labels, grad_in_forward=True)
            return scale * value if scales else value

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        text = step.lower(*operands, 0.5).compile().as_text()
        return len(re.findall(rf"\n[^\n]*multiply[^\n]* = {dtype}\[{SIZE},{VOCABULARY}\]", text))

    assert passes(scales=False) == 0 < passes(scales=True)


def test_a_gradient_of_the_forward_is_computed_for_none_who_does_not_ask(
    hidden: Any, head: Any, labels: Any
) -> None:
    program = jax.make_jaxpr(lambda h: linear_cross_entropy(h, head, labels, grad_in_forward=True))(
        hidden
    )
    assert len(products_of(program.jaxpr)) == 1


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((jnp.bfloat16, jnp.bfloat16), jnp.bfloat16),
        ((jnp.bfloat16, jnp.float32), jnp.float32),
        ((jnp.float16, jnp.float16), jnp.float32),
    ],
)
def test_what_products_see_by_default(dtypes: Any, expected: Any) -> None:
    hidden, head = jnp.ones((3, 4), dtypes[0]), jnp.ones((4, 5), dtypes[1])
    program = jax.make_jaxpr(linear_logprobs)(hidden, head, jnp.zeros(3, jnp.int32))
    products = products_of(program.jaxpr)
    assert [x.aval.dtype for x in products[0].invars] == [expected, expected]
    assert products[0].outvars[0].aval.dtype == jnp.float32
