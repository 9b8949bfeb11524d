"""Several labels a row in tileloss.jax: by each implementation against the definition in float64, shards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from jax_calls import ONLY_XLA, tiles_of
from jax_exact import as_torch, exact
from test_jax_shards import assert_same_on
from tileloss.jax import allowed_from, linear_logprobs, logprobs

B, T, V, H = 2, 3, 77, 24
ROWS = ("lse", "entropy", "mean_logit")
CASES = [
    (2, {}),
    (40, {"softcap": 5.0}),
    (3, {"temperature": 0.7, "valid_vocab": 50}),
    (5, {"temperature": 2.0, "temperature_on": "logprob"}),
    (4, {"allowed": "half"}),
    (40, {"allowed": "half", "softcap": 5.0, "valid_vocab": 50}),
]
pytestmark = pytest.mark.usefixtures("implementation")
small_tiles = tiles_of(32)


def random(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def labels_of(count: int, classes: int = V) -> Any:
    """One that is there several times, empty slots, and a row of these alone."""
    labels = np.array(jax.random.randint(jax.random.key(9), (B, T, count), 0, classes))
    labels[0, 1] = labels[0, 1, 0]
    labels[0, 2, 0] = labels[1, 1] = -100
    labels[1, 0, -1] = labels[1, 0, 0]
    return jnp.asarray(labels)


def operands(is_linear: bool, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    hidden, head = random(B, T, H).astype(dtype), random(H, V, seed=1).astype(dtype)
    # The first label of a row is nearly sure.
    x = (3 * random(B, T, V, seed=2)).at[0, 0, labels_of(4, 50)[0, 0, 0]].set(30)
    return (hidden, head, random(V, seed=3)) if is_linear else (x.astype(dtype),)


def sets() -> np.ndarray:
    """Of half of the columns each, bool [B, T, V]; in the last row of none of its labels' when there are four."""
    mask = np.array(jax.random.bernoulli(jax.random.key(5), 0.5, (B, T, V)))
    mask[-1, -1, np.asarray(labels_of(4, 50))[-1, -1]] = False
    return mask


def call(given: tuple[Any, ...], labels: Any, **how: Any) -> Any:
    if len(given) == 1:
        return logprobs(*given, labels, **how)
    return linear_logprobs(*given[:2], labels, bias=given[2], **how)


@pytest.mark.parametrize("is_linear", [False, True], ids=["logits", "head"])
@pytest.mark.parametrize(("count", "options"), CASES)
def test_values_and_gradients_are_the_definition(
    count: int, options: dict[str, Any], is_linear: bool
) -> None:
    labels, given = labels_of(count, 50), operands(is_linear)
    how: dict[str, Any] = {"outputs": ("logp", *ROWS), **options}
    if "allowed" in how:
        how["allowed"] = allowed_from(jnp.asarray(sets()))
    found, pull = jax.vjp(jax.jit(lambda x: call(x, labels, **how)), given)
    outputs = {n: getattr(found, n) for n in how["outputs"]}
    upstream = {n: random(*x.shape, seed=k) for k, (n, x) in enumerate(outputs.items())}
    leaves = (given[0], given[1].T, given[2]) if is_linear else given
    exactly = {"upstream": {n: as_torch(x) for n, x in upstream.items()}, **how}
    right, gradients = exact(
        "linear_logprobs" if is_linear else "logprobs", leaves, labels, **exactly
    )
    right["logp"][right["logp"] < -1e29] = -np.inf  # of a label that is not allowed
    for name, value in right.items():
        assert outputs[name].shape == value.shape
        np.testing.assert_allclose(outputs[name], value, rtol=2e-5, atol=2e-5)
    if is_linear:
        gradients[1] = gradients[1].T
    for ours, theirs in zip(pull(type(found)(**upstream))[0], gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("is_linear", [False, True], ids=["logits", "head"])
def test_one_set_for_all_rows(rows: int, is_linear: bool) -> None:
    labels = labels_of(4).reshape(-1, 4)[-rows:]
    given = tuple(
        x.reshape(-1, x.shape[-1])[-rows:] if x.ndim == 3 else x for x in operands(is_linear)
    )
    words = allowed_from(jnp.arange(V) % 3 > 0)

    def step(words: Any) -> Any:
        rows, pull = jax.vjp(lambda x: call(x, labels, allowed=words).logp, given)
        return rows, pull(jnp.ones_like(rows))

    of_all, of_each = step(words), step(jnp.tile(words, (rows, 1)))
    jax.tree.map(np.testing.assert_array_equal, of_all, of_each)


def test_a_nearly_sure_label_keeps_its_digits_among_others() -> None:
    x = jnp.zeros((1, V)).at[0, 3].set(20.0)
    labels = jnp.array([[7, 3, -100]])
    found, pull = jax.vjp(lambda x: logprobs(x, labels).logp, x)
    leaf = as_torch(x).requires_grad_()
    right = leaf.log_softmax(-1).gather(-1, torch.tensor([[7, 3]]))
    np.testing.assert_allclose(found[:, :2], right.detach(), rtol=1e-6)
    for upstream in ((0.0, 1.0), (1.0, 0.0)):
        gradient = pull(jnp.array([[*upstream, 5.0]]))[0]
        (theirs,) = torch.autograd.grad(right, leaf, torch.tensor([upstream]), retain_graph=True)
        np.testing.assert_allclose(gradient, theirs, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_gradient_is_rounded_once(dtype: Any) -> None:
    """A label that is there twice too."""
    (x,), labels = operands(False, dtype), labels_of(4)
    step = jax.grad(lambda x: jnp.sum(jnp.square(logprobs(x, labels).logp)))
    exactly = step(x.astype(jnp.float32))
    np.testing.assert_array_equal(step(x), exactly.astype(dtype))


@pytest.mark.parametrize("is_linear", [False, True], ids=["logits", "head"])
def test_one_label_in_a_dimension_of_its_own_has_the_bits_of_one(is_linear: bool) -> None:
    given, labels = operands(is_linear), labels_of(4)[..., 0]

    def step(labels: Any) -> Any:
        rows, pull = jax.vjp(lambda x: call(x, labels, outputs=("logp", "correct")), given)
        no_grad = np.zeros(rows.correct.shape, jax.dtypes.float0)
        return rows, pull(rows._replace(correct=no_grad))[0]

    (several, of_several), (rows, of_rows) = step(labels[..., None]), step(labels)
    assert np.array_equal(several.logp, rows.logp[..., None])
    assert np.array_equal(several.correct, rows.correct)
    assert all(np.array_equal(x, y) for x, y in zip(of_several, of_rows, strict=True))


@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_no_labels_at_all(ignore_index: int) -> None:
    labels = jnp.zeros((B, T, 0), jnp.uint8)
    rows, pull = jax.vjp(
        lambda x: logprobs(x, labels, outputs=("logp", "lse"), ignore_index=ignore_index),
        *operands(False),
    )
    assert rows.logp.shape == (B, T, 0)
    assert not rows.lse.any()
    assert not pull(type(rows)(logp=rows.logp, lse=jnp.ones((B, T))))[0].any()


def test_a_label_out_of_range_makes_its_row_nan_alone() -> None:
    (x,), labels = operands(False), labels_of(4)
    labels, others = labels.at[0, 0, 2].set(V), np.arange(B * T).reshape(B, T) > 0
    rows, pull = jax.vjp(lambda x: logprobs(x, labels, outputs=("logp", "lse")), x)
    gradient = pull(type(rows)(logp=jnp.ones_like(rows.logp), lse=jnp.ones_like(rows.lse)))[0]
    for found in (*rows[:2], gradient):
        assert np.isnan(found[0, 0]).all()
        assert np.isfinite(np.asarray(found)[others]).all()


def test_rows_of_empty_slots_are_never_read() -> None:
    (x,), labels = operands(False), labels_of(4)
    x = x.at[1, 1].set(jnp.nan)
    gradient = jax.grad(lambda x: logprobs(x, labels).logp.sum())(x)
    assert not gradient[1, 1].any()
    assert np.isfinite(gradient).all()


def test_logits_of_minus_infinity() -> None:
    """A label there has logp -inf, also where it is the likeliest of its row."""
    (x,), labels = operands(False), jnp.broadcast_to(jnp.array([-100, 4, 6]), (B, T, 3))
    found = logprobs(x.at[..., 6].set(-jnp.inf).at[0, 0, 4].set(-jnp.inf), labels).logp
    assert np.isneginf(found[..., 2]).all()
    assert np.isneginf(found[0, 0, 1])
    assert np.isfinite(found[1]).any()
    assert not found[..., 0].any()


def test_vmap_and_second_derivatives() -> None:
    (x,), labels = operands(False), labels_of(4)

    def loss(x: Any, labels: Any) -> Any:
        return jnp.sum(jnp.square(logprobs(x, labels).logp))

    whole = jax.grad(loss)(x, labels)
    mapped = jax.vmap(jax.grad(loss))(x, labels)
    np.testing.assert_allclose(whole, mapped, rtol=1e-6, atol=1e-7)

    def plain(x: Any, labels: Any) -> Any:
        log_p = jnp.take_along_axis(jax.nn.log_softmax(x), jnp.maximum(labels, 0), axis=-1)
        return jnp.sum(jnp.square(jnp.where(labels == -100, 0.0, log_p)))

    ours, theirs = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.square(jax.grad(f)(x, labels))))(x)
        for f in (loss, plain)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("has_sets", [False, True], ids=["", "sets"])
@pytest.mark.parametrize("is_linear", [False, True], ids=["logits", "head"])
def test_shards(is_linear: bool, has_sets: bool) -> None:
    columns = 256 if has_sets else 80  # of each of the eight parts whole words
    labels = labels_of(6, columns)
    words = allowed_from(random(B, T, columns) > -1)

    def rows_of(*x: Any, vocab_axis: str | None) -> Any:
        mine = words
        if vocab_axis:
            width = x[-1].shape[-1] // 32
            start = jax.lax.axis_index(vocab_axis) * width
            mine = jax.lax.dynamic_slice_in_dim(words, start, width, axis=-1)
        how = {"allowed": mine} if has_sets else {}
        return function(*x, labels, outputs=("logp", *ROWS), vocab_axis=vocab_axis, **how)

    given = (random(B, T, H), random(H, columns)) if is_linear else (random(B, T, columns),)
    function = linear_logprobs if is_linear else logprobs
    assert_same_on(
        rows_of,
        given,
        (P(), P(None, "tp")) if is_linear else P(None, None, "tp"),
        (1, 2, 4),
    )


@ONLY_XLA
@pytest.mark.parametrize("layout", ["HV", "VH"])
def test_no_copy_of_a_head(layout: str, implementation: str) -> None:
    hidden, head = random(4, 8).astype(jnp.bfloat16), random(8, 4096).astype(jnp.bfloat16)
    labels = jnp.arange(8).reshape(4, 2)
    step = jax.jit(lambda h, w: linear_logprobs(h, w, labels, head_layout=layout).logp)
    program = step.lower(hidden, head if layout == "HV" else head.T).compile()
    assert program.memory_analysis().temp_size_in_bytes < head.size
