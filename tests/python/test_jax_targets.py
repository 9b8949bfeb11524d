"""tileloss.jax's losses whose target is not labels, but for `distillation`, against float64 autograd: two LM heads, class
probabilities, sparse teachers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_exact import check
from tileloss._core.functions import FUNCTIONS
from tileloss.jax import (
    DistillationRows,
    cross_entropy,
    distillation,
    linear_distillation,
    sparse_distillation,
)
from tileloss.jax._sweeps import xla, xla_targets_head

KINDS = FUNCTIONS["distillation"].options["divergence"].choices
V, H, G = 203, 24, 16
STUDENT = ("hidden", "head", "bias")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of "xla", whose programs take their time to compile: a loop over rows and none over columns."""
    monkeypatch.setattr(xla, "TILE", 256)
    monkeypatch.setattr(xla_targets_head, "ROWS", 5)


# ------------------------------------------------------------------------------------------------------------ two LM heads


def heads(dtype: Any = jnp.float32) -> dict[str, Any]:
    random = np.random.default_rng(3)

    def draw(*shape: int, std: float = 1.0) -> Any:
        return jnp.asarray(std * random.normal(size=shape), dtype)

    return {
        "hidden": draw(2, 5, H),
        "head": draw(H, V, std=0.3),
        "bias": draw(V),
        "teacher_hidden": draw(2, 5, G),
        "teacher_head": draw(G, V, std=0.3),
        "teacher_bias": draw(V),
    }


def labels_of_rows() -> Any:
    labels = np.random.default_rng(4).integers(0, V, (2, 5))
    labels[0, :2] = -100
    return jnp.asarray(labels, jnp.int32)


@pytest.mark.full
@pytest.mark.parametrize(
    ("of", "dtype", "kind", "how"),
    [
        *(("cpu", jnp.float32, kind, {}) for kind in KINDS),
        ("cpu", jnp.bfloat16, "forward_kl", {}),
        ("cpu", jnp.float32, "jsd", {"grad_in_forward": False}),
        ("cpu", jnp.bfloat16, "reverse_kl", {"reduction": "none", "head_layout": "VH"}),
        ("xla", jnp.float32, "jsd", {}),
        ("xla", jnp.bfloat16, "reverse_kl", {"reduction": "none", "head_layout": "VH"}),
    ],
)
def test_two_heads_are_autograd_s(
    monkeypatch: pytest.MonkeyPatch, of: str, dtype: Any, kind: str, how: dict[str, Any]
) -> None:
    arrays, labels = heads(dtype), labels_of_rows()
    upstream = None
    if "reduction" in how:  # a tail of rows too
        monkeypatch.setattr(xla_targets_head, "ROWS", 4)
        upstream = np.linspace(1, 2, 10).reshape(2, 5)
        arrays |= {name: x.T for name, x in arrays.items() if name.endswith("head")}
    student = [arrays.pop(name) for name in STUDENT]
    found, gradients = check(
        "linear_distillation", student, arrays["teacher_hidden"], arrays["teacher_head"], labels,
        teacher_bias=arrays["teacher_bias"], divergence=kind, label_weight=0.3, divergence_weight=0.7,
        label_temperature=0.5 if kind == "jsd" else 1.0, outputs=("divergence", "agreement"),
        implementation=of, upstream=upstream, rtol=2e-5, atol=2e-6,
        limit=3e-6 if dtype == jnp.float32 else 8e-3, **how,
    )  # fmt: skip
    assert found["agreement"].dtype == jnp.bool_
    assert not np.asarray(gradients[0])[0, :2].any()


def test_what_is_not_asked_for_and_rows_that_do_not_count(implementation: str) -> None:
    arrays, labels = heads(), labels_of_rows()
    student = [arrays.pop(name) for name in STUDENT]

    def loss(hidden: Any, head: Any, bias: Any, of_teacher: Any, labels: Any) -> Any:
        rest = arrays | {"teacher_hidden": of_teacher}
        return linear_distillation(hidden, head, **rest, bias=bias, labels=labels)

    of_teacher = arrays["teacher_hidden"]
    all_four = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    expected = all_four(*student, of_teacher, labels)
    assert not expected[3].any()  # the teacher's
    student[0] = student[0].at[0, 0].set(jnp.nan)  # ignored
    of_teacher = of_teacher.at[0, 1].set(jnp.inf)
    of_head = jax.jit(jax.grad(loss, 1))(*student, of_teacher, labels)
    for got, right in zip(all_four(*student, of_teacher, labels), expected, strict=True):
        np.testing.assert_array_equal(got, right)
    np.testing.assert_array_equal(of_head, expected[1])
    labels = labels.at[1, 3].set(V)  # out of range
    dhidden, dhead, *_ = all_four(*student, of_teacher, labels)
    assert np.isnan(dhead).all() and np.isnan(dhidden[1, 3]).all()
    assert np.isfinite(dhidden[1, jnp.array([0, 1, 2, 4])]).all()


def test_two_heads_of_one_model_are_0(implementation: str) -> None:
    hidden, head = heads()["hidden"], heads()["head"]

    def loss(hidden: Any, head: Any, *teacher: Any) -> Any:
        return linear_distillation(hidden, head, *teacher, divergence="jsd")

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    value, gradients = step(hidden, head, hidden, head)
    assert value == 0 and not any(g.any() for g in gradients)


@pytest.mark.skipif(jax.device_count() < 2, reason="NOT RUN: fewer GPUs than 2")
def test_rows_over_devices_give_what_one_gives(implementation: str) -> None:
    arrays, labels = heads(), labels_of_rows()

    def loss(hidden: Any, head: Any, of_teacher: Any, labels: Any) -> Any:
        rest = arrays["teacher_head"]
        options = {
            "divergence": "reverse_kl",
            "label_weight": 0.5,
            "divergence_weight": 0.5,
            "reduction": "sum",
        }
        return linear_distillation(hidden, head, of_teacher, rest, labels, **options)

    both = jax.value_and_grad(loss, (0, 1))
    given = (arrays["hidden"], arrays["head"], arrays["teacher_hidden"], labels)
    expected = jax.jit(both)(*given)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("x"), P(), P("x"), P("x"))
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(given, specs, strict=True)]

    def summed_loss(*arrays: Any) -> Any:
        return jax.lax.psum(loss(*arrays), "x")

    mapped = jax.shard_map(summed_loss, mesh=mesh, in_specs=specs, out_specs=P())
    in_shard_map = jax.jit(jax.value_and_grad(mapped, (0, 1)))
    ways = [in_shard_map] if implementation == "xla" else [in_shard_map, jax.jit(both)]
    for found in (way(*placed) for way in ways):
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        for got, right in zip(found[1], expected[1], strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- soft labels


@pytest.mark.parametrize(
    ("dtype", "probs_dtype", "reduction", "smoothing", "has_weights"),
    [
        (jnp.float32, jnp.float32, "mean", 0.1, False),
        (jnp.float32, jnp.bfloat16, "none", 0.2, True),
        (jnp.bfloat16, jnp.float32, "sum", 0.0, True),
        (jnp.float16, jnp.float16, "mean", 0.0, False),
    ],
)
def test_class_probabilities_are_autograd_s(
    implementation: str,
    dtype: Any,
    probs_dtype: Any,
    reduction: str,
    smoothing: float,
    has_weights: bool,
) -> None:
    random, valid = np.random.default_rng(5), V - 3
    x = jnp.asarray(3 * random.normal(size=(2, 5, V)), dtype)
    q = jax.nn.softmax(jnp.asarray(random.normal(size=(2, 5, V)))).astype(probs_dtype)
    c = random.uniform(size=valid).astype(np.float32) if has_weights else None
    w = jnp.linspace(0.5, 1.5, 10).reshape(2, 5)
    upstream = np.linspace(1, 2, 10).reshape(2, 5) if reduction == "none" else 3.0

    _, (gradient,) = check(
        "cross_entropy", [x], q, c, token_weights=w, label_smoothing=smoothing, reduction=reduction,
        valid_vocab=valid, upstream=np.asarray(upstream), rtol=2e-5,
        limit={jnp.float32: 3e-6, jnp.bfloat16: 4e-3, jnp.float16: 1e-3}[dtype],
    )  # fmt: skip
    assert not gradient[..., valid:].any()


def test_class_probabilities_with_a_head(implementation: str) -> None:
    arrays = heads()
    q = jax.nn.softmax(jnp.asarray(np.random.default_rng(6).normal(size=(2, 5, V)), jnp.float32))
    student, c = [arrays["hidden"], arrays["head"]], jnp.linspace(0.5, 1.5, V)
    check("linear_cross_entropy", student, q, weight=c, rtol=0, atol=2e-5, limit=3e-6)


def test_sure_rows_of_one_class_keep_their_digits(implementation: str) -> None:
    x = jnp.asarray(20 * np.random.default_rng(3).normal(size=(40, 17)), jnp.float32)
    for of in (x, x[:, :1]):
        labels = of.argmax(1)
        q = jax.nn.one_hot(labels, of.shape[1])
        both = [
            jax.jit(jax.value_and_grad(lambda x, y=y: cross_entropy(x, y, reduction="sum")))(of)
            for y in (q, labels)
        ]
        (soft, of_soft), (hard, of_hard) = both
        assert soft >= 0 and soft == pytest.approx(float(hard), rel=1e-6, abs=0)
        np.testing.assert_allclose(of_soft[q > 0], of_hard[q > 0], rtol=1e-6)


def test_special_values_beside_class_probabilities(implementation: str) -> None:
    x = jnp.zeros((4, 6)).at[0, 1].set(-jnp.inf).at[1, 2].set(-jnp.inf).at[3, 0].set(jnp.nan)
    q = jnp.full((4, 6), 1 / 6).at[0, 1].set(0.0).at[2, 4].set(jnp.nan)

    def rows(x: Any) -> Any:
        loss = cross_entropy(x, q, reduction="none")
        return loss.sum(), loss

    (_, loss), gradient = jax.jit(jax.value_and_grad(rows, has_aux=True))(x)
    assert loss[0] == pytest.approx(5 / 6 * np.log(5), rel=1e-6)  # q = p = 0 has no part
    assert loss[1] == np.inf and np.isnan(loss[2]) and np.isnan(loss[3])
    assert np.isfinite(gradient[:2]).all() and np.isnan(gradient[2:]).all()


# --------------------------------------------------------------------------------------------------------- sparse teachers

TAILS = FUNCTIONS["sparse_distillation"].options["tail"].choices


def sparse_teacher(*rows: int, k: int = 12) -> tuple[Any, Any]:
    teacher = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(7), (*rows, V)))
    log_q, ids = jax.lax.top_k(teacher, k)
    return ids, log_q


@pytest.mark.parametrize(
    ("of", "kind", "tail"),
    [
        *(("cpu", kind, TAILS[i % 3]) for i, kind in enumerate(KINDS)),
        *(("xla", kind, TAILS[(i + 1) % 3]) for i, kind in enumerate(KINDS)),
    ],
)
def test_sparse_teachers_are_autograd_s(
    monkeypatch: pytest.MonkeyPatch, of: str, kind: str, tail: str
) -> None:
    if kind == "jsd":  # several tiles: a column is looked for in each
        monkeypatch.setattr(xla, "TILE", 64)
    x = 2 * jax.random.normal(jax.random.key(6), (2, 5, V))
    ids, log_q = sparse_teacher(2, 5)
    labels = jnp.stack([ids[0, :, 3], jnp.arange(5)]).at[1, 1].set(-100)
    _, (gradient,) = check(
        "sparse_distillation", [x], ids, log_q, labels, tail=tail, divergence=kind, label_weight=0.25,
        divergence_weight=0.75, temperature=2.0, label_temperature=0.5 if kind == "jsd" else 2.0,
        outputs="divergence", implementation=of, rtol=2e-5, atol=1e-5, limit=1e-5,
    )  # fmt: skip
    assert not gradient[1, 1].any()


@pytest.mark.parametrize(("kind", "tail"), [("jsd", "lump"), ("forward_kl", "ignore")])
def test_sparse_teachers_with_a_head(implementation: str, kind: str, tail: str) -> None:
    arrays = heads()
    student, teacher = [arrays["hidden"], arrays["head"]], sparse_teacher(2, 5)
    check(
        "linear_sparse_distillation", student, *teacher, tail=tail, divergence=kind,
        rtol=0, atol=1e-5, limit=1e-5,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("tail", ["lump", "renormalise"])
def test_a_teacher_of_all_columns_is_a_teacher_of_logits(implementation: str, tail: str) -> None:
    x, teacher = jax.random.normal(jax.random.key(8), (2, 3, 30))
    ids, log_q = jnp.tile(jnp.arange(30), (3, 1)), jax.nn.log_softmax(teacher)
    names = ("divergence", "entropy", "teacher_entropy", "agreement", "lse")

    def sparse(x: Any) -> Any:
        return sparse_distillation(x, ids, log_q, tail=tail, divergence="jsd", outputs=names)

    def dense(x: Any) -> Any:
        return distillation(x, teacher, divergence="jsd", outputs=names)

    (found, gradient), (expected, right) = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(x) for f in (sparse, dense)
    )
    assert isinstance(found[1], DistillationRows)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, right, atol=1e-6)
    # Mass outside of all columns: the tail is a class of which p has nothing.
    lost = sparse_distillation(x, ids, log_q - 0.3, tail=tail, implementation=implementation)
    assert np.isposinf(lost) == (tail == "lump")


@pytest.mark.parametrize("tail", TAILS)
def test_rows_may_have_fewer_columns_and_wrong_ones_are_nan(implementation: str, tail: str) -> None:
    x = jax.random.normal(jax.random.key(9), (7, V))
    of_rows = [[5, 9, -1], [-1, 9, 5], [-1, -1, -1], [1, V, 2], [3, 3, 1], [1, 2, 3], [V, 4, 4]]
    ids = jnp.array(of_rows)
    log_q = jnp.tile(jnp.array([[-1.0, -2.0, -3.0]]), (7, 1)).at[1].set([7.0, -2.0, -1.0])
    log_q = log_q.at[5, 1].set(0.5)  # of no probability
    mask = jnp.array([1, 1, 1, 1, 1, 1, 0])
    x = x.at[1].set(x[0])

    def rows(x: Any) -> Any:
        loss = sparse_distillation(x, ids, log_q, tail=tail, mask=mask, reduction="none")
        return loss.sum(), loss

    (_, loss), gradient = jax.jit(jax.value_and_grad(rows, has_aux=True))(x)
    np.testing.assert_allclose(loss[0], loss[1], rtol=1e-6)
    np.testing.assert_allclose(gradient[0], gradient[1], atol=1e-7)
    assert loss[0] != 0 and gradient[0].any()
    np.testing.assert_allclose(loss[2], 0, atol=1e-6)
    assert np.isnan(loss[3:6]).all() and np.isnan(gradient[3:6]).all()
    assert loss[6] == 0 and not gradient[6].any()
    assert np.isfinite(gradient[:3]).all()
