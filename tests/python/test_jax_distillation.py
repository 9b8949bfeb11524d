"""tileloss.jax.distillation against float64 autograd, other programs' values, and the definitions where something is infinite."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_calls import tiles_of
from jax_exact import check, exact
from tileloss._core.functions import FUNCTIONS
from tileloss.jax import DistillationRows, distillation
from tileloss.jax._sweeps import xla

VALUES = json.loads((Path(__file__).parents[1] / "data" / "distillation-values.json").read_text())
KINDS = FUNCTIONS["distillation"].options["divergence"].choices
VALID = VALUES["valid_vocab"]
COLUMNS = len(VALUES["student"][0])
LABELS = jnp.asarray(VALUES["labels"])
CAPPED = {
    "logit_scale": 0.75,
    "softcap": 3.0,
    "teacher_logit_scale": 1.25,
    "teacher_softcap": 0.0,
    "scale_by_temperature_squared": True,
}


def with_beta(kind: str, beta: float) -> dict[str, float]:
    """Of the divergences that have one."""
    return {"beta": beta} if kind == "jsd" or kind.startswith("skew") else {}


small_tiles = tiles_of(3)  # of 6 columns two tiles; a tail have the tests of ordinary sizes


@cache
def step(implementation: str, kind: str, beta: float, is_capped: bool) -> Any:
    """(loss, rows), gradient of logits [4, 7] with everything that may be traced an array: compiled once for many tests."""

    def loss(x: Any, teacher: Any, labels: Any, weights: Any, **numbers: Any) -> Any:
        return distillation(
            x,
            teacher,
            labels,
            divergence=kind,
            **with_beta(kind, beta),
            token_weights=weights,
            valid_vocab=VALID,
            outputs=DistillationRows._fields if kind == "forward_kl" else ("divergence", "logp"),
            implementation=implementation,
            **(CAPPED if is_capped else {}),
            **numbers,
        )

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(
    step: Any,
    student: Any,
    teacher: Any,
    labels: Any = LABELS,
    weights: Any = None,
    **given: float | None,
) -> tuple[float, DistillationRows, np.ndarray]:
    numbers: dict[str, Any] = {
        "temperature": 1.0,
        "label_weight": 0.0,
        "divergence_weight": 1.0,
        "num_items": 1.0,
    } | given
    x, of_teacher = (jnp.asarray(rows, jnp.float32) for rows in (student, teacher))
    weights = jnp.ones(len(x)) if weights is None else jnp.asarray(weights)
    arrays = {n: None if number is None else jnp.float32(number) for n, number in numbers.items()}
    (loss, rows), gradient = step(x, of_teacher, labels, weights, **arrays)
    return float(loss), rows, np.asarray(gradient)


def our_name(case: dict[str, Any]) -> tuple[str, float]:
    """Where a skewed KL with beta 0 is a KL, the functions have one name for it."""
    kind, beta = case["divergence"], case["beta"]
    if kind in ("skew_forward", "skew_reverse"):
        kind = kind.replace("skew_", "") + "_kl"
        return (f"skew_{kind}", beta) if beta else (kind, 0.5)
    return kind, beta


NAMES = sorted({our_name(case) for case in VALUES["dense"]})


@pytest.mark.full
@pytest.mark.parametrize(("kind", "beta"), NAMES)
def test_other_programs_values(implementation: str, kind: str, beta: float) -> None:
    cases = [case for case in VALUES["dense"] if our_name(case) == (kind, beta)]
    assert len(cases) >= 3
    for case in cases:
        student, teacher = case["student"], case["teacher"]
        is_capped = student["softcap"] > 0
        if is_capped and kind not in ("forward_kl", "jsd", "skew_reverse_kl"):
            continue  # one more program; the softcap is the sweeps', not the divergence's
        loss, _, gradient = run(
            step(implementation, kind, beta, is_capped),
            VALUES["student"],
            VALUES["teacher"],
            weights=VALUES["token_weights"] if case["weighted"] else None,
            temperature=student["temperature"],
            teacher_temperature=teacher["temperature"],
            label_weight=case["label_weight"],
            divergence_weight=case["divergence_weight"],
            num_items=1.0 if case["reduction"] == "sum" else case["num_items"],
        )
        assert loss == pytest.approx(case["loss"], rel=2e-6)
        np.testing.assert_allclose(gradient, case["dlogits"], rtol=2e-5, atol=3e-7)


def definition(kind: str, beta: float, z: Any, zt: Any) -> tuple[float, np.ndarray]:
    """D and its gradient in float64: 0 log 0 = 0, and dD/dz_j = s_j - p_j sum s with s_j = p_j dD/dp_j."""
    log_p, log_q = (x - np.logaddexp.reduce(x) for x in np.asarray((z, zt), np.float64))
    p, q = np.exp(log_p), np.exp(log_q)

    def times(weight: Any, x: Any) -> Any:
        return np.where(weight == 0, 0.0, weight * x)

    forward, reverse = times(q, log_q - log_p), times(p, log_p - log_q)
    if kind == "total_variation":
        value, slope = abs(p - q) / 2, np.sign(p - q) * p / 2
    elif kind == "forward_kl":
        value, slope = forward, -q
    elif kind == "reverse_kl":
        value, slope = reverse, reverse
    elif kind == "jeffreys":
        value, slope = forward + reverse, reverse - q
    else:
        share = 1 - beta if kind == "skew_reverse_kl" else beta
        m = share * q + (1 - share) * p
        to_p, to_q = times(p, log_p - np.log(m)), times(q, log_q - np.log(m))
        p_by_m, q_by_m = (x / np.where(m == 0, 1, m) for x in (p, q))
        value, slope = {
            "jsd": (beta * to_q + (1 - beta) * to_p, (1 - beta) * to_p),
            "skew_forward_kl": (to_q, -(1 - beta) * p * q_by_m),
            "skew_reverse_kl": (to_p, to_p - beta * p * p_by_m),
        }[kind]
    return value.sum(), slope - times(p, slope.sum())


NO_LOGITS = {"nan": (0, np.nan), "plus_inf": (0, np.inf), "all_minus_inf": (slice(None), -np.inf)}


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(("kind", "beta"), NAMES)
def test_probabilities_of_0_and_equal_rows(implementation: str, kind: str, beta: float) -> None:
    random = np.random.default_rng(1)
    x, teacher = (random.normal(size=(4, COLUMNS)).astype(np.float32) for _ in range(2))
    x[0, 1] = x[2, [0, 5]] = -np.inf
    teacher[1, 3] = teacher[2, 5] = -np.inf
    teacher[3] = x[3]
    labels = jnp.asarray([4, 4, 2, 2])
    _, rows, gradient = run(step(implementation, kind, beta, False), x, teacher, labels)
    with np.errstate(all="ignore"):
        for i in range(4):
            value, slopes = definition(kind, beta, x[i, :VALID], teacher[i, :VALID])
            np.testing.assert_allclose(rows.divergence[i], value, rtol=2e-6, atol=1e-9)
            np.testing.assert_allclose(gradient[i, :VALID], slopes, rtol=2e-5, atol=3e-7)
    assert not gradient[:, VALID:].any()
    assert rows.divergence[3] == 0 and not gradient[3].any()


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("what", NO_LOGITS)
def test_a_row_that_is_no_logits_is_nan_and_leaves_the_others_alone(
    implementation: str, what: str, side: str
) -> None:
    program = step(implementation, "forward_kl", 0.5, False)
    x, teacher = (np.array(VALUES[name], np.float32) for name in ("student", "teacher"))
    _, clean, expected = run(program, x, teacher)
    changed = x if side == "student" else teacher
    where, value = NO_LOGITS[what]
    changed[3, where] = value
    changed[1] = np.nan  # ignored
    loss, rows, gradient = run(program, x, teacher)
    assert np.isnan(loss) and np.isnan(rows.divergence[3]) and np.isnan(gradient[3, :VALID]).all()
    np.testing.assert_array_equal(gradient[:3], expected[:3])
    np.testing.assert_array_equal(rows.divergence[:3], clean.divergence[:3])
    others = ("teacher_entropy",) if side == "student" else ("entropy", "lse", "logp")
    for name in others:
        assert getattr(rows, name)[3] == getattr(clean, name)[3]
    assert not any(np.asarray(x)[1] for x in rows)
    # Whatever its weight is: D is not looked at where divergence_weight is 0.
    assert np.isnan(
        run(program, x, teacher, label_weight=1.0, divergence_weight=0.0)[2][3, :VALID]
    ).all()


def test_a_part_without_weight_is_left_out(implementation: str) -> None:
    program = step(implementation, "reverse_kl", 0.5, False)
    x, teacher = (np.array(VALUES[name], np.float32) for name in ("student", "teacher"))
    teacher[0, 1] = -np.inf
    assert run(program, x, teacher)[0] == np.inf
    loss, rows, _ = run(program, x, teacher, label_weight=1.0, divergence_weight=0.0)
    assert loss == pytest.approx(-float(rows.logp.sum()), rel=1e-6)
    assert run(program, x, teacher, num_items=0.0)[0] == 0


def test_a_label_out_of_range_is_nan_in_its_row(implementation: str) -> None:
    program = step(implementation, "forward_kl", 0.5, False)
    for wrong in (VALID, -1):
        labels = LABELS.at[2].set(wrong)
        loss, rows, gradient = run(program, VALUES["student"], VALUES["teacher"], labels)
        assert np.isnan(loss) and np.isnan(rows.logp[2]) and np.isnan(rows.divergence[2])
        assert np.isnan(gradient[2, :VALID]).all() and not rows.agreement[2]
        assert np.isfinite(gradient[[0, 1, 3]]).all() and np.isfinite(rows.divergence[3])


@pytest.mark.parametrize(
    "option",
    [
        {"label_weight": -1.5},
        {"divergence_weight": -0.5},
        {"num_items": -1.0},
        {"teacher_temperature": -1.0},
    ],
    ids=str,
)
def test_a_number_that_only_the_program_knows_to_be_wrong_makes_all_nan(
    implementation: str, option: dict[str, float]
) -> None:
    program = step(implementation, "forward_kl", 0.5, False)
    loss, rows, gradient = run(program, VALUES["student"], VALUES["teacher"], **option)
    used = [0, 2, 3]
    assert np.isnan(loss) and np.isnan(rows.divergence[jnp.array(used)]).all()
    assert np.isnan(gradient[used, :VALID]).all()


# ------------------------------------------------------------------------------------------------------ ordinary sizes


def batch(dtype: Any, width: int = 1003) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    x = jnp.asarray(3 * random.normal(size=(2, 5, width)), dtype)
    teacher = jnp.asarray(2 * random.normal(size=(2, 5, width)), dtype)
    labels = random.integers(0, width, (2, 5))
    labels[1, 2] = -100
    return x, teacher, jnp.asarray(labels, jnp.int32)


def test_the_teachers_transform_is_the_students_unless_given(implementation: str) -> None:
    x, teacher = 3 * jax.random.normal(jax.random.key(2), (2, 5, 60))

    def loss(**options: Any) -> Any:
        given = {"softcap": 4.0, "logit_scale": 0.6, **options}
        return distillation(x, teacher, implementation=implementation, **given)

    found, named = loss(), loss(teacher_softcap=4.0, teacher_logit_scale=0.6)
    assert found == named != loss(teacher_softcap=0.0)


@pytest.mark.parametrize(
    ("dtype", "kind", "how"),
    [
        (jnp.float32, "jeffreys", {"grad_in_forward": False}),
        (jnp.float32, "forward_kl", {"label_temperature": np.float32(0.8)}),
        (jnp.bfloat16, "skew_forward_kl", {"reduction": "none", "label_temperature": 0.8}),
        (jnp.float16, "total_variation", {"reduction": "sum"}),
    ],
)
def test_value_gradient_and_rows_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch, implementation: str, dtype: Any, kind: str, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(xla, "TILE", 256)
    x, teacher, labels = batch(dtype)
    weights = np.linspace(0.5, 1.5, 10).reshape(2, 5)
    upstream = np.linspace(1, 2, 10).reshape(2, 5) if how.get("reduction") == "none" else 3.0

    found, (gradient,) = check(
        "distillation", [x], teacher, labels, divergence=kind, **with_beta(kind, 0.3),
        label_weight=0.25, divergence_weight=0.75, temperature=2.0, token_weights=weights,
        scale_by_temperature_squared=True, upstream=np.asarray(upstream), rtol=1e-5, atol=1e-6,
        outputs=("divergence", "entropy", "teacher_entropy", "agreement"),
        limit={jnp.float32: 2e-6, jnp.float16: 1e-3, jnp.bfloat16: 4e-3}[dtype], **how,
    )  # fmt: skip
    assert found["logp"] is None and found["agreement"].dtype == jnp.bool_
    assert not np.asarray(gradient[1, 2]).any()


@pytest.mark.parametrize("kind", ["jsd", "skew_forward_kl", "skew_reverse_kl"])
def test_a_mixture_keeps_its_digits_for_any_beta(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(xla, "TILE", 256)
    x, teacher, labels = batch(jnp.float32)
    betas = (1e-4, 0.9999) if kind == "jsd" else (1e-4, 0.9)

    @jax.jit
    def ours(x: Any) -> Any:
        options: Any = {"divergence": kind, "reduction": "none", "implementation": "xla"}
        return [distillation(x, 2 * teacher, beta=beta, **options) for beta in betas]

    for got, beta in zip(ours(x), betas, strict=True):
        options = {"divergence": kind, "beta": beta, "reduction": "none"}
        upstream = np.ones(labels.shape)
        wanted, _ = exact("distillation", [x], 2 * teacher, upstream=upstream, **options)
        np.testing.assert_allclose(got, wanted["loss"], rtol=1e-6)


def test_vmap_a_mask_and_no_labels(implementation: str) -> None:
    x, teacher, _ = batch(jnp.float32, 13)
    mask = jnp.asarray([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]])
    x = x.at[0, 1].set(jnp.nan)  # not read

    def loss(x: Any, teacher: Any, mask: Any) -> Any:
        return distillation(x, teacher, mask=mask, divergence="jsd", beta=0.1, temperature=0.7)

    losses, gradients = jax.jit(jax.vmap(jax.value_and_grad(loss)))(x, teacher, mask)
    for i in range(2):
        chosen = np.flatnonzero(mask[i])
        rows = [definition("jsd", 0.1, x[i, j] / 0.7, teacher[i, j] / 0.7) for j in chosen]
        assert losses[i] == pytest.approx(np.mean([value for value, _ in rows]), rel=1e-5)
        expected = np.zeros(x.shape[1:])
        expected[chosen] = np.array([slopes for _, slopes in rows]) / 0.7 / 3
        np.testing.assert_allclose(gradients[i], expected, rtol=2e-5, atol=3e-7)


def test_the_teacher_has_no_gradient() -> None:
    x, teacher, _ = batch(jnp.float32, 13)
    gradient = jax.grad(lambda t: distillation(x, t, implementation="cpu"))(teacher)
    assert gradient.shape == teacher.shape and not gradient.any()


def test_the_choice_of_an_implementation() -> None:
    x, teacher, _ = batch(jnp.float32, 13)

    def calls_the_library(implementation: Any) -> bool:
        student_loss = lambda x: distillation(x, teacher, implementation=implementation)  # noqa: E731
        return "tileloss_call" in jax.jit(student_loss).lower(x).as_text()

    assert calls_the_library(None) and calls_the_library(("pallas_tpu", "cpu"))
    assert not calls_the_library(("xla", "cpu"))
    with pytest.raises(ValueError, match="can do this: pallas_tpu has no kernels of this loss"):
        distillation(x, teacher, implementation="pallas_tpu")


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _ in NAMES} == set(KINDS)
