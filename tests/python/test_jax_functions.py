"""The functions of tileloss.jax against the C library, on every option and preset, and what JAX's users do with them."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import tileloss.jax as tileloss_jax
from jax_calls import ONLY_XLA, assert_agrees, tiles_of
from jax_cases import (
    CROSS_ENTROPY,
    LOGITS,
    POLICY,
    POLICY_LOSS,
    cases,
    preset_options,
    with_weights,
)
from jax_problems import OUTPUTS, VOCABULARY, Problem, plain_problem, policy_problem
from tileloss.jax import (
    _implementations,
    cross_entropy,
    distillation,
    linear_cross_entropy,
    logprobs,
    policy_loss,
)
from tileloss.jax._arguments import SHOWN
from tileloss.jax._sweeps import library, xla

pytestmark = pytest.mark.usefixtures("implementation")
RAGGED = 8  # columns of a tile: three whole ones and a tail of 5
assert VOCABULARY % RAGGED != 0
small_tiles = tiles_of(RAGGED)


@pytest.mark.parametrize("options", cases("logprobs"))
def test_logprobs_agrees_on_every_option(options: dict[str, Any]) -> None:
    assert_agrees(plain_problem("logprobs", **options))


# The logits' options with both implementations have logprobs; here each with one, and with both what only this loss has.
LOGITS_OPTIONS = [options for values in LOGITS.values() for options in values]
ALTERNATING = [(options, ("xla", "cpu")[i % 2]) for i, options in enumerate(LOGITS_OPTIONS)]
OWN = [o for name, values in CROSS_ENTROPY.items() if name not in LOGITS for o in values]


@pytest.mark.parametrize(
    ("options", "implementation"), ALTERNATING, indirect=["implementation"], ids=str
)
def test_cross_entropy_agrees_on_the_logits_options(options: dict[str, Any]) -> None:
    assert_agrees(with_weights(plain_problem("cross_entropy", **options), 3))


@pytest.mark.parametrize("options", OWN, ids=str)
def test_cross_entropy_agrees_on_every_option(options: dict[str, Any]) -> None:
    assert_agrees(with_weights(plain_problem("cross_entropy", **options), 3))


def test_cross_entropy_agrees_without_weights() -> None:
    assert_agrees(plain_problem("cross_entropy", label_smoothing=0.1, z_loss=0.1))


# What a policy loss makes of its options is the row stage's, which has tests of its own: here what the sweeps must gather for it.
@pytest.mark.full
@pytest.mark.parametrize("batch", [False, True], ids=["offsets", "batch"])
@pytest.mark.parametrize(
    "options",
    [
        *LOGITS["softcap"],
        *LOGITS["valid_vocab"],
        *LOGITS["temperature_on"],
        *POLICY_LOSS["aggregation"][-1:],
        *POLICY_LOSS["advantage_level"],
        *POLICY_LOSS["entropy_quantile"],
        *POLICY_LOSS["entropy_threshold"],
        *POLICY_LOSS["entropy_coef"],
        *POLICY_LOSS["beta"],
    ],
    ids=str,
)
def test_policy_loss_agrees(options: dict[str, Any], batch: bool) -> None:
    assert_agrees(policy_problem(batch=batch, **options))


@pytest.mark.full
@pytest.mark.parametrize("preset", POLICY.presets)
def test_presets_agree(preset: str) -> None:
    assert_agrees(policy_problem(seed=5, preset=preset, batch=True, **preset_options(preset)))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("column", [2, 9, VOCABULARY - 1])
def test_special_values_agree_in_every_tile(value: float, column: int) -> None:
    problem = plain_problem("cross_entropy", 7, label_smoothing=0.0, z_loss=0.1)
    problem.logits[1:3, column] = value
    problem.logits[5, np.arange(VOCABULARY) != problem.labels[5]] = -np.inf
    assert_agrees(problem)


def test_a_label_far_above_all_others_keeps_the_digits_of_1_minus_p() -> None:
    # The others' exp(z - max) are below what float32 holds, their sum is not.
    above, rows = np.array([40.0, 80.0, 86.0, 88.0]), np.arange(4)
    labels = np.array([3, VOCABULARY - 1, 9, 0])
    x = np.random.default_rng(0).normal(0, 0.1, (4, VOCABULARY)).astype(np.float32)
    x[rows, labels] = above
    loss, pull = jax.vjp(lambda x: cross_entropy(x, jnp.asarray(labels), reduction="none"), x)
    terms = np.exp(np.float64(x) - above[:, None])
    terms[rows, labels] = 0
    expected = terms.sum(axis=1)
    np.testing.assert_allclose(loss, expected, rtol=5e-7)
    np.testing.assert_allclose(pull(jnp.ones(4))[0][rows, labels], -expected, rtol=5e-7)


@ONLY_XLA
def test_a_wrong_tail_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    over_tiles = xla.over_tiles
    monkeypatch.setattr(
        xla, "over_tiles", lambda columns, *rest: over_tiles(columns // RAGGED * RAGGED, *rest)
    )
    with pytest.raises(AssertionError):
        assert_agrees(plain_problem("cross_entropy"))


# ------------------------------------------------------------------------------------------------------------ what users do


@pytest.fixture
def problem() -> Problem:
    problem = plain_problem("cross_entropy", 3)
    return problem.but(logits=np.nan_to_num(problem.logits))


def loss_of(problem: Problem) -> Callable[[Any], Any]:
    labels = jnp.asarray(problem.labels)
    return lambda x: cross_entropy(x, labels)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_have_the_logits_type_and_are_rounded_once(problem: Problem, dtype: Any) -> None:
    logits = jnp.asarray(problem.logits).astype(dtype)
    narrow, wide = (jax.grad(loss_of(problem))(x) for x in (logits, logits.astype(jnp.float32)))
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(np.asarray(narrow), np.asarray(wide.astype(dtype)))


def test_under_vmap_scan_and_checkpoint_it_is_the_same(problem: Problem) -> None:
    logits, labels = jnp.asarray(problem.logits), jnp.asarray(problem.labels)
    each = jax.jit(jax.value_and_grad(lambda x, y: cross_entropy(x, y, reduction="sum")))
    alone = [each(logits[i : i + 7], labels[i : i + 7]) for i in (0, 7, 14)]
    x, y = logits.reshape(3, 7, -1), labels.reshape(3, 7)
    mapped = jax.jit(jax.vmap(each))(x, y)
    _, scanned = jax.lax.scan(lambda carry, one: (carry, each(*one)), 0, (x, y))
    checkpointed = jax.checkpoint(lambda x: cross_entropy(x, y, reduction="sum"))
    again = jax.jit(jax.grad(checkpointed))(x)
    for i, (loss, gradient) in enumerate(alone):
        for other in (mapped, scanned):
            np.testing.assert_allclose(other[0][i], loss, rtol=1e-6)
            np.testing.assert_allclose(other[1][i], gradient, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(again[i], gradient, rtol=1e-5, atol=1e-7)


def test_numbers_that_change_may_be_traced(problem: Problem) -> None:
    labels = jnp.asarray(problem.labels)
    traces = []

    @jax.jit
    def step(x: Any, temperature: Any, items: Any) -> Any:
        traces.append(1)
        return cross_entropy(x, labels, temperature=temperature, num_items=items)

    x = jnp.asarray(problem.logits)
    for temperature, items in ((1.0, 5.0), (0.7, 9.0)):
        expected = cross_entropy(x, labels, temperature=temperature, num_items=items)
        np.testing.assert_allclose(
            step(x, jnp.float32(temperature), jnp.float32(items)), expected, rtol=1e-6
        )
    assert len(traces) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "grad_in_forward"), [(jnp.float32, True), (jnp.float32, False), (jnp.bfloat16, None)]
)
@pytest.mark.parametrize("name", ["linear_cross_entropy", "distillation"])
def test_second_derivatives_are_those_of_the_definition(
    name: str, dtype: Any, grad_in_forward: bool | None
) -> None:
    x, head, labels = jnp.linspace(-1, 1, 36).reshape(4, 9), jnp.eye(9, 7) * 2, jnp.arange(4)
    x, other = x.astype(dtype), jnp.cos(9 * x).astype(dtype)

    def ours(x: Any) -> Any:
        if name == "distillation":
            return distillation(x, other, grad_in_forward=grad_in_forward)
        return linear_cross_entropy(x, head.astype(dtype), labels, grad_in_forward=grad_in_forward)

    def definition(x: Any) -> Any:
        q, log_p = jax.nn.softmax(other.astype(jnp.float32)), jax.nn.log_softmax
        if name == "distillation":
            return (q * (jnp.log(q) - log_p(x.astype(jnp.float32)))).sum() / 4
        return -log_p(x.astype(jnp.float32) @ head)[jnp.arange(4), labels].mean()

    def second(loss: Any) -> Any:
        return jax.grad(lambda x: (jax.grad(loss)(x).astype(jnp.float32) ** 2).sum())(x)

    expected = np.asarray(second(definition), np.float32)
    limit = 0.03 if dtype == jnp.bfloat16 else 3e-6
    found = np.asarray(jax.jit(second, static_argnums=0)(ours), np.float32)
    assert np.abs(found - expected).max() < limit * np.abs(expected).max()


def test_forward_mode_is_refused(problem: Problem) -> None:
    x = jnp.asarray(problem.logits)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss_of(problem), (x,), (x,))


def test_a_label_out_of_range_is_nan_and_leaves_the_other_rows_alone(problem: Problem) -> None:
    labels = jnp.asarray(problem.labels).at[0].set(VOCABULARY)
    x = jnp.asarray(problem.logits)
    loss, pull = jax.vjp(lambda x: cross_entropy(x, labels, reduction="none"), x)
    dlogits = pull(jnp.ones_like(loss))[0]
    assert np.isnan(loss[0]) and np.isnan(dlogits[0]).all()
    assert np.isfinite(loss[1:]).all() and np.isfinite(dlogits[1:]).all()


def test_a_label_that_int32_cannot_hold_is_out_of_range_in_one_pass_too(problem: Problem) -> None:
    # As int32 it would be ignore_index.
    labels = jnp.asarray(problem.labels).astype(jnp.uint32).at[0].set(2**32 - 100)
    x = jnp.asarray(problem.logits)
    for grad_in_forward in (True, False):
        loss = jax.value_and_grad(
            lambda x: cross_entropy(x, labels, grad_in_forward=grad_in_forward)  # noqa: B023
        )(x)[0]
        assert np.isnan(loss), grad_in_forward


WITH_ROWS = {"divergence": "jsd", "outputs": ("agreement", "entropy")}


@pytest.mark.parametrize(
    ("function", "dtype", "options", "most"),
    [
        # Before jax 0.11 one copy of bfloat16 logits, as integers; one in float32 would be twice as large.
        (cross_entropy, jnp.float32, {}, 0.25),
        (cross_entropy, jnp.float16, {}, 0.4),
        (cross_entropy, jnp.bfloat16, {}, 1.4),
        (distillation, jnp.float32, WITH_ROWS | {"grad_in_forward": True}, 0.4),
        (distillation, jnp.float32, WITH_ROWS | {"grad_in_forward": False}, 0.4),
    ],
)
def test_no_scratch_of_the_logits_size_and_a_donated_gradient_in_their_place(
    monkeypatch: pytest.MonkeyPatch, implementation: str,
    function: Any, dtype: Any, options: dict[str, Any], most: float,
) -> None:  # fmt: skip
    monkeypatch.setattr(xla, "TILE", 512)
    logits = jax.ShapeDtypeStruct((128, 16384 + 100), dtype)
    labels = jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
    given = (logits, labels if function is cross_entropy else logits)
    size = logits.size * logits.dtype.itemsize

    def loss(x: Any, y: Any) -> Any:
        return function(x, y, **options)

    forward = jax.jit(loss).lower(*given).compile()
    assert forward.memory_analysis().temp_size_in_bytes < 0.4 * size
    step = jax.jit(jax.value_and_grad(loss, has_aux="outputs" in options), donate_argnums=0)
    memory = step.lower(*given).compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < (0.01 if implementation == "cpu" else most) * size


def test_a_donated_gradient_lies_where_the_logits_were() -> None:
    x, y = jnp.ones((16, 5000), jnp.bfloat16), jnp.zeros(16, jnp.int32)
    place = x.unsafe_buffer_pointer()
    step = jax.jit(jax.grad(lambda x: cross_entropy(x, y)), donate_argnums=0)
    assert step(x).unsafe_buffer_pointer() == place


def test_the_choice_of_an_implementation() -> None:
    x, y, weight = jnp.ones((3, 5)), jnp.zeros(3, jnp.int32), jnp.ones(5)

    def calls_the_library(**options: Any) -> bool:
        program = jax.jit(lambda x: cross_entropy(x, y, **options)).lower(x).compile()
        return "tileloss_call" in program.as_text()

    assert calls_the_library(implementation="cpu")
    assert calls_the_library(implementation=("cpu", "xla"))
    assert not calls_the_library(implementation=("xla", "cpu"))
    assert calls_the_library(implementation=("cpu", "xla"), weight=weight, label_smoothing=0.1)
    assert not calls_the_library(implementation=("pallas_tpu", "xla"))
    message = "none of those named can do this: pallas_tpu has no float16 .logits."
    with pytest.raises(ValueError, match=message):
        cross_entropy(x.astype(jnp.float16), y, implementation="pallas_tpu")


@pytest.mark.parametrize("implementation", ["cpu"], indirect=True)
def test_who_gets_xla_as_a_build_lacks_the_kernels_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y, warn = jnp.ones((3, 5)), jnp.zeros(3, jnp.int32), "_warn_where_the_handler_is_missing"
    monkeypatch.setattr(library, "is_built", lambda file: False)
    monkeypatch.setattr(_implementations, warn, cache(getattr(_implementations, warn).__wrapped__))
    with warnings.catch_warnings(record=True) as found:
        cross_entropy(x, y, implementation="xla")
        assert not found
        cross_entropy(x, y)
        cross_entropy(x, y)
    (told,) = found
    assert 'tileloss.jax: "cpu" is not in this build (libtileloss_xla.so is' in str(told.message)


WRONG: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"temperature": np.inf},
    {"num_items": -2.0},
    {"num_items": np.nan},
    {"beta": -0.1},
    {"sequence_offsets": [0, 9, 4, 15]},
    {"sequence_offsets": [-3, 5, 9, 15]},
    {"sequence_offsets": [0, 5, 9, 99]},
]


# In both modes, each with one implementation; every other has them the other way round.
@pytest.mark.parametrize(
    ("given", "xla_in_forward"), [(x, i % 2 == 0) for i, x in enumerate(WRONG)]
)
def test_what_only_the_program_knows_to_be_wrong_makes_all_nan(
    given: dict[str, Any], xla_in_forward: bool, implementation: str
) -> None:
    grad_in_forward = xla_in_forward == (implementation == "xla")
    labels = jnp.zeros(15, jnp.int32).at[3].set(-1)
    (name, value), offsets = *given.items(), {"sequence_offsets": jnp.array([0, 5, 9, 15])}
    fixed = {"ignore_index": -1, "aggregation": "sum", "grad_in_forward": grad_in_forward}

    @jax.jit
    def step(x: Any, traced: Any) -> Any:
        named = {**offsets, **fixed, "ref_logp": jnp.zeros(15), name: traced}
        return jax.value_and_grad(lambda x: policy_loss(x, labels, jnp.ones(3), **named))(x)

    loss, gradient = step(jnp.ones((15, 7)), jnp.asarray(value))
    assert np.isnan(loss) and np.isnan(gradient[np.arange(15) != 3]).all()


def test_numbers_of_numpy_are_numbers() -> None:
    x, y = jnp.arange(10.0).reshape(2, 5), jnp.zeros(2, jnp.int32)
    given = {
        "label_smoothing": np.float64(0.1),
        "softcap": np.array(30.0),
        "temperature": np.float32(2),
    }
    given |= {"ignore_index": np.int64(-1), "valid_vocab": np.int32(4), "reduction": np.str_("sum")}
    plain = {name: value.item() for name, value in given.items()}
    assert cross_entropy(x, y, **given) == cross_entropy(x, y, **plain)
    with pytest.raises(ValueError, match="temperature: expected a number > 0, got -1"):
        cross_entropy(x, y, temperature=np.float32(-1))


def test_class_weights_may_have_those_of_the_padding() -> None:
    x, y, weight = jnp.arange(10.0).reshape(2, 5), jnp.array([0, 2]), jnp.arange(1.0, 6.0)
    for labels in (y, jax.nn.one_hot(y, 5)):
        of_all, of_valid = (
            cross_entropy(x, labels, c, valid_vocab=3) for c in (weight, weight[:3])
        )
        assert of_all == of_valid


@pytest.mark.parametrize(
    "name", ["temperature", "weight", "token_weights", "labels", "old_logp", "advantages", "beta"]
)
def test_a_gradient_that_there_is_none_of_is_refused(name: str) -> None:
    x, shape = jnp.zeros((2, 3, 5)), {"weight": 5, "advantages": 2, "labels": (2, 3, 5)}
    given = jnp.ones({"temperature": (), "beta": ()}.get(name, shape.get(name, (2, 3))))
    y, advantages = jnp.zeros((2, 3), jnp.int32), {"advantages": jnp.ones(2)}

    def loss(x: Any, value: Any) -> Any:
        named = {"labels": y, name: value}
        if name in ("old_logp", "advantages", "beta"):
            return policy_loss(x, **advantages | {"ref_logp": jnp.zeros((2, 3))} | named)
        return cross_entropy(x, **named)

    with pytest.raises(ValueError, match=f"^{name}: expected an array without gradient"):
        jax.jit(jax.grad(loss, argnums=1))(x, given)
    assert jax.grad(lambda x: loss(x, jax.lax.stop_gradient(given * x.sum())))(x).shape == x.shape


@pytest.mark.parametrize("name", ["cross_entropy", "policy_loss", "logprobs", "distillation"])
def test_debug_nans_raises_for_results_alone(name: str) -> None:
    x, y = jnp.ones((2, 3, 5)), jnp.zeros((2, 3), jnp.int32)

    def loss(x: Any) -> Any:
        if name == "policy_loss":
            return policy_loss(x, y, jnp.ones(2), preset="grpo", return_metrics=True)[0]
        if name == "logprobs":
            return logprobs(x, y, outputs=("logp", "entropy")).entropy.sum()
        if name == "distillation":
            return distillation(x, x + 1, y, label_weight=0.5, divergence_weight=0.5)
        return cross_entropy(x, y)

    bad = x.at[0, 0, 0].set(jnp.nan)
    with jax.debug_nans(True):
        for function in (loss, jax.grad(loss), jax.jit(loss)):
            function(x)
            with pytest.raises(FloatingPointError):
                function(bad)


def test_a_batch_of_no_known_size_is_refused_in_words() -> None:
    (size,) = export.symbolic_shape("b")
    x, y = jax.ShapeDtypeStruct((size, 7), jnp.float32), jax.ShapeDtypeStruct((size,), jnp.int32)
    with pytest.raises(ValueError, match=r"logits: expected a shape of known sizes .*got \[b, 7\]"):
        export.export(jax.jit(cross_entropy))(x, y)


def test_a_batch_without_rows_has_no_loss() -> None:
    for shape in ((2, 0), (0, 3)):
        x, y, advantages = jnp.zeros((*shape, 5)), jnp.zeros(shape, jnp.int32), jnp.ones(shape[0])
        loss, gradient = jax.value_and_grad(policy_loss)(x, y, advantages)
        assert loss == 0 and gradient.shape == x.shape
        assert cross_entropy(x, y) == 0


def test_the_names_are_those_of_the_torch_functions() -> None:
    functions = {"cross_entropy", "logprobs", "policy_loss"}
    linear = {f"linear_{name}" for name in functions}
    pairs = {"distillation", "sparse_distillation"}
    pairs |= {f"linear_{name}" for name in pairs} | {"DistillationRows"}
    assert set(tileloss_jax.__all__) == {
        "RowOutputs",
        "allowed_from",
        "tune",
        *functions,
        *linear,
        *pairs,
    }
    assert set(tileloss_jax.RowOutputs._fields) == set(OUTPUTS)


@pytest.mark.parametrize("implementation", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    "name", [n for n in tileloss_jax.__all__ if n.islower() and n not in ("allowed_from", "tune")]
)
def test_every_argument_is_handed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(tileloss_jax, name)
    handed: dict[str, Any] = {}

    def apply(loss: str, operand: Any, **given: Any) -> Any:
        assert name in (loss, f"linear_{loss}")
        handed.update({SHOWN.get(name, name): x for name, x in given.items()})
        handed.update({n: x for n, x in operand._asdict().items() if x is not None})
        raise InterruptedError

    monkeypatch.setattr(sys.modules[inspect.unwrap(function).__module__], "apply", apply)
    arguments: dict[str, Any] = {n: object() for n in inspect.signature(function).parameters}
    arguments["labels"] = jnp.zeros(3, jnp.int32)
    with pytest.raises(InterruptedError):
        function(**arguments)
    assert handed.keys() == arguments.keys()
    assert [n for n, x in arguments.items() if handed[n] is not x] == []
