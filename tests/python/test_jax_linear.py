"""The functions of tileloss.jax that are fused with the LM head, against the C library's; and bugs that must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_calls import ONLY_XLA, assert_agrees, operands_of, run, tiles_of
from jax_cases import preset_options, with_weights
from jax_heads import distances, even_problem, with_head
from jax_problems import VOCABULARY, plain_problem, policy_problem, witness
from test_jax_shards import over
from tileloss.jax import linear_cross_entropy, linear_distillation, linear_logprobs
from tileloss.jax._sweeps import transform, xla

pytestmark = pytest.mark.usefixtures("implementation")
RAGGED = 8  # columns of a tile: three whole ones and a tail of 5
SEEN = ("float32", "bfloat16")
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.1}
assert VOCABULARY % RAGGED != 0
small_tiles = tiles_of(RAGGED)


# ------------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("options", "layout", "bias", "compute_dtype", "rank"),
    [
        ({}, "HV", False, "float32", 0),
        ({}, "VH", True, "bfloat16", 0),
        ({"softcap": 5.0, "reduction": "sum"}, "VH", True, "float32", 0),
        ({"softcap": 5.0, "valid_vocab": 23}, "HV", False, "bfloat16", 0),
        ({"valid_vocab": 24, **SMOOTHED}, "VH", False, "float32", 0),
        ({"reduction": "none", **SMOOTHED}, "HV", True, "bfloat16", 0),
        ({"temperature": 1.7}, "HV", True, "float32", 0),
        ({"temperature": 1.7, "temperature_on": "logprob"}, "VH", True, "bfloat16", 0),
        pytest.param(
            {"softcap": 5.0, "valid_vocab": 23}, "HV", True, "bfloat16", 7, id="low_rank, HV"
        ),
        pytest.param(
            {"reduction": "none", **SMOOTHED}, "VH", False, "float32", 1, id="low_rank, VH"
        ),
    ],
    ids=str,
)
def test_cross_entropy_agrees(
    options: dict[str, Any], layout: str, bias: bool, compute_dtype: str, rank: int
) -> None:
    """``rank``: of a low-rank part, which the last columns of hidden states and head are taken for."""
    problem = with_weights(plain_problem("cross_entropy", **options), 3)
    assert_agrees(with_head(problem, compute_dtype, bias), layout, rank=rank)


@pytest.mark.parametrize(
    ("layout", "compute_dtype", "rank"),
    [("HV", "float32", 0), ("VH", "bfloat16", 0), ("HV", "bfloat16", 5), ("VH", "float32", 8)],
    ids=["HV", "VH", "low_rank, HV", "low_rank, VH"],
)
def test_logprobs_and_the_gradients_of_logp_lse_and_entropy_agree(
    layout: str, compute_dtype: str, rank: int
) -> None:
    problem = plain_problem("logprobs", temperature=0.8, logit_scale=0.9, valid_vocab=27)
    assert_agrees(with_head(problem, compute_dtype), layout, rank=rank)


@pytest.mark.parametrize(
    ("preset", "options", "batch", "rank"),
    [
        ("grpo", {"beta": 0.1}, True, 0),
        ("dapo", {"softcap": 9.0}, False, 0),
        ("gspo", {"valid_vocab": 23}, True, 0),
        ("cispo", {"entropy_coef": 0.1}, False, 0),
        ("", {"aggregation": "none", "entropy_quantile": 0.55}, True, 0),
        pytest.param("grpo", {"softcap": 9.0}, True, 4, id="low_rank"),
    ],
)
def test_policy_loss_agrees(preset: str, options: dict[str, Any], batch: bool, rank: int) -> None:
    options = {**preset_options(preset), **options}
    problem = policy_problem(seed=5, preset=preset, batch=batch, **options)
    assert_agrees(with_head(problem, SEEN[batch]), "VH" if batch else "HV", rank=rank)


# In one pass the C++ kernels round what is yet to be multiplied by the upstream gradient.
@ONLY_XLA
@pytest.mark.parametrize("layout", ["HV", "VH"])
def test_products_of_bfloat16_round_once(layout: str) -> None:
    problem = even_problem("bfloat16")
    found = distances(run(problem, layout).head_grads, witness(problem).head_grads)
    assert max(found.values()) < 1e-4, found


@ONLY_XLA
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("compute_dtype", SEEN)
def test_gradients_have_their_tensors_types_and_are_rounded_once(
    dtype: Any, compute_dtype: str
) -> None:
    operands = [x.astype(dtype) for x in operands_of(even_problem(compute_dtype))]
    labels = jnp.asarray(even_problem(compute_dtype).labels)

    def loss(hidden: Any, head: Any, bias: Any) -> Any:
        return linear_cross_entropy(hidden, head, labels, bias=bias, compute_dtype=compute_dtype)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    narrow, wide = gradients(*operands), gradients(*(x.astype(jnp.float32) for x in operands))
    for x, y in zip(narrow, wide, strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y.astype(dtype)))


def test_rows_that_do_not_count_have_no_part_whatever_they_or_the_head_hold() -> None:
    hidden, head, bias = operands_of(even_problem("float32"))
    labels = jnp.asarray(even_problem("float32").labels).at[5:9].set(-100)

    @jax.jit
    def gradients(hidden: Any, head: Any) -> Any:
        loss = lambda *x: linear_cross_entropy(x[0], x[1], labels, bias=x[2])  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(hidden, head, bias)

    expected = gradients(hidden.at[5:9].set(0), head)
    for value in (np.nan, np.inf):
        for x, y in zip(gradients(hidden.at[5:9].set(value), head), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    poisoned = gradients(hidden, head.at[0, 3].set(np.nan))[0]
    assert (poisoned[5:9] == 0).all() and np.isnan(poisoned[:5]).all()


def test_a_low_rank_part_is_a_wider_head_over_shards_too() -> None:
    """Under vmap and scan, over shards, of several labels and with a teacher."""
    hidden, head, _, *pair = operands_of(even_problem("float32"), rank=7)
    labels = jnp.asarray(even_problem("float32").labels).at[:2].set(-100)
    teacher = jnp.roll(hidden, 1, 0), head

    def of(labels: Any, h: Any, w: Any, x: Any, b: Any, **how: Any) -> Any:
        return linear_cross_entropy(h, w, labels, low_rank=(x, b), reduction="sum", **how)

    def mapped(h: Any, w: Any, x: Any, b: Any) -> Any:
        parts = [x.reshape(2, 32, *x.shape[1:]) for x in (labels, h, x)]
        return jax.vmap(lambda y, h, x: of(y, h, w, x, b))(*parts).sum()

    def scanned(h: Any, w: Any, x: Any, b: Any) -> Any:
        parts = [x.reshape(2, 32, *x.shape[1:]) for x in (labels, h, x)]
        return jax.lax.scan(lambda c, p: (c + of(*p[:2], w, p[2], b), None), 0.0, parts)[0]

    cut = P(None, "tp")
    sharded = over(3, lambda *x: of(labels, *x, vocab_axis="tp"), (P(), cut, P(), cut))

    def several(h: Any, w: Any, x: Any = None, b: Any = None) -> Any:
        low_rank, two = None if x is None else (x, b), jnp.stack([labels, labels[::-1]], 1)
        return linear_logprobs(h, w, two, low_rank=low_rank).logp.sum()

    def distilled(h: Any, w: Any, x: Any = None, b: Any = None) -> Any:
        low_rank = None if x is None else (x, b)
        return linear_distillation(h, w, *teacher, labels, low_rank=low_rank)

    def plain(h: Any, w: Any) -> Any:
        return linear_cross_entropy(h, w, labels, reduction="sum")

    given = (hidden, head, *pair)
    wide = jnp.concatenate([hidden, pair[0]], 1), jnp.concatenate([head, pair[1]])
    pairs = [(mapped, plain), (scanned, plain), (sharded, plain)]
    for ours, theirs in (*pairs, (several, several), (distilled, distilled)):
        found, gradients = jax.jit(jax.value_and_grad(ours, (0, 1, 2, 3)))(*given)
        right, (dh, dw) = jax.jit(jax.value_and_grad(theirs, (0, 1)))(*wide)
        np.testing.assert_allclose(found, right, rtol=1e-5)
        size = hidden.shape[1]
        for x, y in zip(gradients, (dh[:, :size], dw[:size], dh[:, size:], dw[size:]), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * float(abs(y).max()))


def test_a_label_out_of_range_is_nan_and_leaves_the_other_rows_alone() -> None:
    hidden, head, _ = operands_of(even_problem("float32"))
    labels = jnp.asarray(even_problem("float32").labels).at[0].set(75)
    per_row = jax.jit(lambda h, w: linear_cross_entropy(h, w, labels, reduction="none"))
    loss, pull = jax.vjp(per_row, hidden, head)
    dhidden, dhead = pull(jnp.ones_like(loss))
    assert np.isnan(loss[0]) and np.isnan(dhidden[0]).all() and np.isnan(dhead).all()
    assert np.isfinite(loss[1:]).all() and np.isfinite(dhidden[1:]).all()


# ---------------------------------------------------------------------------------------------------------- and their bugs


def without_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    over_tiles = xla.over_tiles
    monkeypatch.setattr(
        xla, "over_tiles", lambda columns, *rest: over_tiles(columns // 8 * 8, *rest)
    )


def without_the_slope_of_the_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = transform.LogitTransform._factor
    monkeypatch.setattr(
        transform.LogitTransform, "derivative", lambda self, x: factor.__get__(self)
    )


def with_a_bias_past_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = xla.tile

    def shifted(x: Any, start: Any, width: int, axis: int = 1) -> Any:
        return tile(jnp.roll(x, -1) if x.ndim == 1 else x, start, width, axis)

    monkeypatch.setattr(xla, "tile", shifted)


@ONLY_XLA
@pytest.mark.parametrize(
    "bug", [without_a_tail, without_the_slope_of_the_softcap, with_a_bias_past_its_tile]
)
def test_a_wrong_sweep_is_noticed(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    problem = with_head(plain_problem("cross_entropy", softcap=5.0))
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        assert_agrees(problem)


def to_bfloat16(x: Any) -> Any:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def never_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "as_seen", lambda x, spec: x.astype(jnp.float32))


def rounded_before_and_after_the_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = xla.tile_gradient
    monkeypatch.setattr(xla, "tile_gradient", lambda *x: to_bfloat16(gradient(*x)))


def with_sums_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    product = xla.product
    monkeypatch.setattr(
        xla,
        "product",
        lambda equation, *x: (
            to_bfloat16(product(equation, *x)) if "nv," in equation else product(equation, *x)
        ),
    )


@ONLY_XLA
@pytest.mark.parametrize(
    "bug", [never_rounded, rounded_before_and_after_the_slope, with_sums_in_bfloat16]
)
def test_a_rounding_too_few_or_too_many_is_noticed(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        test_products_of_bfloat16_round_once("HV")
