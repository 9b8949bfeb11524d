"""The JAX row stage as programs use it: jit with traced numbers and offsets, merges, refusals; and bugs that must show."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cases import BONUS, CISPO, POLICY, SAMPLER, VESPO, WITH_KL
from jax_problems import ROWS, STATE, VOCABULARY, Problem, plain_problem, policy_problem, witness
from jax_stage import assert_agrees, compare, resolved, run, to_state
from tileloss._core.library import lib, raise_on_error
from tileloss._core.structs import RowState as LibraryState
from tileloss._core.structs import Scalar
from tileloss.jax._rows import cross_entropy as cross_entropy_module
from tileloss.jax._rows import inputs as inputs_module
from tileloss.jax._rows import options as row_options
from tileloss.jax._rows.cross_entropy import cross_entropy
from tileloss.jax._rows.logprobs import logprobs
from tileloss.jax._rows.policy import factors, kinds, kl
from tileloss.jax._rows.policy import loss as policy_module
from tileloss.jax._rows.policy.kinds import KINDS, TokenLoss
from tileloss.jax._rows.policy.loss import policy_loss
from tileloss.jax._rows.state import RowState, identity, merge
from tileloss.jax._rows.stats import row_stats

# ------------------------------------------------------------------------------------------------------------------- jit

TRACED: list[dict[str, Any]] = [
    {**WITH_KL, "epsilon_low": 0.1, "epsilon_high": 0.15, "delta": 1.05, "dual_clip": 1.02},
    {**CISPO, "cap_low": 0.9, "aggregation": "token_mean", "num_items": 12.0},
    {**BONUS, "entropy_threshold": 1.1, "temperature": 1.4, "temperature_on": "logprob"},
    {**VESPO, **SAMPLER, **WITH_KL, "ratio_level": "sequence", "kl_importance": True},
    {"beta": 0.0, "kl_importance": True, "entropy_coef": 0.0, "entropy_reduction": "as_loss"},
    {"off_policy_threshold": 0.0, "entropy_quantile": 0.6, "ratio_level": "sequence"},
]


@pytest.mark.parametrize("options", TRACED)
def test_jit_with_traced_numbers_and_offsets_agrees(options: dict[str, Any]) -> None:
    """Everything that may change from step to step is an argument of the compiled program; masks and special rows included."""
    problem = policy_problem(seed=2, **options)
    scalars = {k: v for k, v in options.items() if POLICY.options[k].kind is Scalar}
    fixed = {k: v for k, v in options.items() if k not in scalars}
    theirs = witness(problem)

    @jax.jit
    def step(state: RowState, tensors: Any, numbers: Any) -> Any:
        given = row_options.resolve("policy_loss", {**fixed, **numbers})
        labels, advantages = jnp.asarray(problem.labels), tensors.pop("advantages")
        return policy_loss(state, labels, advantages, given, classes=VOCABULARY, **tensors)

    tensors = {k: jnp.asarray(v) for k, v in problem.tensors.items()}
    tensors["loss_grad"] = tensors["loss_grad"].reshape(())
    found = step(to_state(theirs.state), tensors, {k: jnp.float32(v) for k, v in scalars.items()})
    eager = run(problem, to_state(theirs.state))
    # A fused program rounds elsewhere; the loss is a difference of terms of about 1.
    np.testing.assert_allclose(found.result.loss, eager.loss[0], rtol=2e-6, atol=3e-7)
    np.testing.assert_allclose(found.metrics, eager.metrics, rtol=2e-6, atol=1e-7)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found) if x.dtype != bool)
    # Traced numbers are resolved as plain ones are, and both agree with the library.
    arrays = {k: np.float32(v) for k, v in scalars.items()}
    assert_agrees(problem, row_options.resolve("policy_loss", {**fixed, **arrays}))


def test_the_other_losses_compile() -> None:
    problem = plain_problem("cross_entropy", label_smoothing=0.1, z_loss=0.1, num_items=7.0)
    theirs = witness(problem)

    @jax.jit
    def step(state: RowState, labels: Any, items: Any) -> Any:
        given = row_options.resolve("cross_entropy", {**problem.options, "num_items": items})
        rows = logprobs(state, labels, row_options.resolve("logprobs"), classes=VOCABULARY)
        return cross_entropy(state, labels, given, classes=VOCABULARY).loss, rows.lse

    loss, lse = step(to_state(theirs.state), jnp.asarray(problem.labels), jnp.float32(7))
    assert theirs.loss is not None
    np.testing.assert_allclose(loss, theirs.loss[0], rtol=1e-6)
    np.testing.assert_allclose(lse, theirs.outputs["lse"], rtol=1e-6)


def test_it_runs_under_vmap() -> None:
    problems = [policy_problem(seed, preset="gspo", batch=True) for seed in range(3)]
    states = [to_state(witness(p).state) for p in problems]
    given = resolved(problems[0])

    def one(state: RowState, labels: Any, tensors: Any) -> Any:
        rest = {k: v for k, v in tensors.items() if k not in ("advantages", "loss_grad")}
        return policy_loss(
            state,
            labels,
            tensors["advantages"],
            given,
            classes=VOCABULARY,
            sequence_length=7,
            **rest,
        ).result.loss

    labels = [jnp.asarray(p.labels) for p in problems]
    tensors = [{k: jnp.asarray(v) for k, v in p.tensors.items()} for p in problems]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *zip(states, labels, tensors, strict=True))
    expected = [jax.jit(one)(*x) for x in zip(states, labels, tensors, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(*stacked), expected, rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("temperature_on", ["logits", "logprob"])
@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_the_same_logp_gives_a_ratio_of_exactly_one_and_no_kl(
    preset: str, temperature_on: str
) -> None:
    """old_logp and ref_logp that the row stage itself made of the same states."""
    options = {"temperature": 1.3, "temperature_on": temperature_on}
    problem = policy_problem(preset=preset, **options)
    state = to_state(witness(problem).state)
    rows = resolved(problem.but(function="logprobs", preset="", options=options, tensors={}))
    own = logprobs(state, jnp.asarray(problem.labels), rows, classes=VOCABULARY).logp
    tensors = {
        **problem.tensors,
        **{name: np.asarray(own) for name in ("old_logp", "ref_logp", "sampler_logp")},
    }
    changed = problem.but(
        tensors=tensors,
        options={**options, "beta": 0.1, "kl_importance": True, "sampler_correction": "mask"},
    )
    metrics = dict(zip(POLICY.metrics, run(changed, state).metrics, strict=True))
    assert metrics["ratio_mean"] == 1 and metrics["kl"] == 0 and metrics["sampler_ratio_mean"] == 1


def test_a_small_kl_keeps_its_digits() -> None:
    """expm1(d) - d would have no digit right at d = 1e-6."""
    d = np.array([1e-7, -1e-6, 1e-4, -0.02, 0.3, -0.49, 0.51, -3, 5], np.float32)
    exact = np.array(
        [sum(float(x) ** k / np.prod(np.arange(1.0, k + 1)) for k in range(2, 40)) for x in d]
    )
    found = kl.estimate_kl(jnp.asarray(d), row_options.resolve("policy_loss"))
    np.testing.assert_allclose(found.value, exact, rtol=1e-6)


@pytest.mark.parametrize(
    ("q", "count", "kept"),
    [(0.7, 11, 8), (0.2, 11, 3), (0.9, 11, 10), (0.5, 4, 2), (1.0, 5, 5), (1e-9, 5, 1)],
)
def test_the_entropy_quantile_keeps_the_token_that_it_falls_on(
    q: float, count: int, kept: int
) -> None:
    entropy = np.random.default_rng(0).permutation(np.linspace(0.5, 3, count)).astype(np.float32)
    padded = jnp.asarray(np.concatenate([entropy, [9, np.nan]]).astype(np.float32))
    used = jnp.arange(count + 2) < count
    threshold = factors.quantile_threshold(padded, used, q)
    assert int(np.sum(entropy >= float(threshold))) == kept


def test_confident_rows_keep_their_digits() -> None:
    """1 - p = 4e-18 and 2e-9 at the label: logp, the loss and the label's own gradient to 1e-6."""
    x = np.zeros((2, VOCABULARY), np.float32)
    x[0, 3], x[1, 4] = 43.5, 23.25
    problem = Problem("cross_entropy", x, np.array([3, 4]), {}, {"reduction": "none"})
    theirs = witness(problem)
    ours = run(problem, to_state(theirs.state))
    others = (VOCABULARY - 1) * np.exp(-np.array([43.5, 23.25]))
    np.testing.assert_allclose(ours.loss, np.log1p(others), rtol=1e-6)
    np.testing.assert_allclose(ours.dlogits[[0, 1], [3, 4]], -others / (1 + others), rtol=1e-6)


# --------------------------------------------------------------------------------------------------------------------- merge


def library_merge(
    a: dict[str, np.ndarray], b: dict[str, np.ndarray], weights: tuple[float, float]
) -> dict[str, np.ndarray]:
    into = {name: array.copy() for name, array in a.items()}
    views = []
    for arrays, weight in ((into, weights[0]), (b, weights[1])):
        places = [arrays[name].ctypes.data for name in STATE]
        size = ctypes.sizeof(LibraryState)
        views.append(LibraryState(size, arrays["max"].size, *places, smoothing_weight=weight))
    lib.tileloss_row_state_merge.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    raise_on_error(lib.tileloss_row_state_merge(ctypes.byref(views[0]), ctypes.byref(views[1])))
    return into


def state_of(values: np.ndarray, label: int, start: int) -> dict[str, float]:
    """One row's state over columns that begin at ``start``, in float64."""
    if values.size == 0:
        return dict.fromkeys(STATE[3:6], 0.0) | {
            "max": -np.inf,
            "sum": 0.0,
            "label_logit": -np.inf,
            "argmax": -1,
        }
    m = float(np.max(values))
    with np.errstate(all="ignore"):
        shifted = values.astype(np.float64) - (m if np.isfinite(m) else 0)
        e = np.exp(shifted)
    here = np.arange(start, start + values.size)
    finite = np.isfinite(shifted)
    return {
        "max": m,
        "sum": float(e[here != label].sum()),
        "label_logit": float(values[label - start]) if label in here else -np.inf,
        "entropy_sum": float((shifted[finite] * e[finite]).sum()),
        "collision_sum": float((e * e).sum()),
        "smoothing_sum": float(shifted.sum()),
        "argmax": -1 if np.isnan(m) else start + int(np.argmax(values)),
    }


def test_merge_is_the_librarys() -> None:
    """Random splits of rows; empty parts, -inf, +inf and NaN on either side, ties."""
    random = np.random.default_rng(1)
    pieces = [
        np.array([], np.float32),
        np.full(3, -np.inf, np.float32),
        np.array([1, -np.inf, 2], np.float32),
        np.array([np.nan, 1], np.float32),
        np.array([np.inf, 1], np.float32),
        np.array([2, 0], np.float32),
        *(random.normal(0, spread, 5).astype(np.float32) for spread in (0.1, 3, 40)),
    ]
    for left, right in itertools.product(pieces, pieces):
        parts = [[], []]
        for label in (0, left.size + right.size - 1, 99):
            parts[0].append(state_of(left, label, 0))
            parts[1].append(state_of(right, label, left.size))
        a, b = (
            {
                n: np.array([row[n] for row in part], np.int64 if n == "argmax" else np.float32)
                for n in STATE
            }
            for part in parts
        )
        theirs = library_merge(a, b, (float(left.size), float(right.size)))
        ours = merge(
            to_state(a)._replace(smoothing_weight=jnp.float32(left.size)),
            to_state(b)._replace(smoothing_weight=jnp.float32(right.size)),
        )
        for name in STATE:
            np.testing.assert_allclose(
                getattr(ours, name),
                theirs[name],
                rtol=2e-6,
                atol=1e-6 if name == "entropy_sum" else 0,
                err_msg=f"{name} {left} {right}",
            )
        assert ours.smoothing_weight == left.size + right.size


def test_the_identity_changes_no_bit() -> None:
    problem = plain_problem("logprobs")
    state = to_state(witness(problem).state)._replace(smoothing_weight=jnp.float32(VOCABULARY))
    empty = identity(ROWS, entropy_sum=True, collision_sum=True, smoothing_sum=True, argmax=True)
    for merged in (merge(empty, state), merge(state, empty)):
        for name in RowState._fields:
            np.testing.assert_array_equal(getattr(merged, name), getattr(state, name), err_msg=name)


# ------------------------------------------------------------------------------------------------------------------- options


def test_choices_are_those_of_the_schema() -> None:
    assert tuple(KINDS) == POLICY.options["kind"].choices
    assert tuple(kl.ESTIMATORS) == POLICY.options["kl_estimator"].choices
    for preset in POLICY.presets:
        given = row_options.resolve("policy_loss", preset=preset)
        struct = POLICY.new_options(preset)
        for name, option in POLICY.options.items():
            value = option.kind.from_buffer(struct, option.offset).value  # type: ignore[attr-defined]
            if option.choices:
                assert given.choice(name) == option.choices[value]
            else:
                np.testing.assert_equal(given.number(name), float(value))


@pytest.mark.parametrize(
    "options", [{**BONUS, **SAMPLER, **WITH_KL}, {**VESPO, "entropy_quantile": 0.5}]
)
def test_it_is_float32_with_64_bit_types_on(options: dict[str, Any]) -> None:
    problem = policy_problem(**options)
    theirs = witness(problem)
    state, tensors = to_state(theirs.state), {k: jnp.asarray(v) for k, v in problem.tensors.items()}
    tensors["loss_grad"] = tensors["loss_grad"].reshape(())
    with jax.enable_x64(True):
        labels, advantages = jnp.asarray(problem.labels), tensors.pop("advantages")
        given = resolved(problem)
        found = policy_loss(state, labels, advantages, given, classes=VOCABULARY, **tensors)
    kinds_found = {str(x.dtype) for x in jax.tree.leaves(found)}
    assert kinds_found == {"float32"}


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32])
def test_labels_of_other_types_agree(dtype: type) -> None:
    problem = plain_problem("cross_entropy", ignore_index=3)
    theirs = witness(problem)
    assert theirs.loss is not None
    state, labels = to_state(theirs.state), jnp.asarray(problem.labels.astype(dtype))
    found = cross_entropy(state, labels, resolved(problem), classes=VOCABULARY)
    np.testing.assert_allclose(found.loss, theirs.loss[0], rtol=1e-6)
    # More classes than the type has numbers.
    assert np.isfinite(cross_entropy(state, labels, resolved(problem), classes=151936).loss)


def test_labels_out_of_range_are_nan_and_touch_no_other_row() -> None:
    """A device finds out too late to raise: the row's loss, outputs and coefficients are NaN."""
    problem = plain_problem("cross_entropy", reduction="none")
    wrong = problem.labels.copy()
    wrong[[2, 6]] = [VOCABULARY, -1]
    state, labels = to_state(witness(problem).state), jnp.asarray(wrong)
    result = cross_entropy(state, labels, resolved(problem), classes=VOCABULARY)
    expected = np.isin(np.arange(ROWS), [2, 6])
    np.testing.assert_array_equal(np.isnan(result.loss), expected)
    np.testing.assert_array_equal(np.isnan(result.coefficients.prob), expected)
    rows = logprobs(state, labels, row_options.resolve("logprobs"), classes=VOCABULARY)
    for values in (rows.logp, rows.lse, rows.entropy, rows.log_sum_sq_probs, rows.mean_logit):
        np.testing.assert_array_equal(np.isnan(values), expected)
    assert rows.argmax is not None and np.all(np.asarray(rows.argmax)[[2, 6]] == -1)


# -------------------------------------------------------------------------------------------------------------- planted bugs


def wrong_sign(d: Any, options: Any) -> kl.Kl:
    return kl.estimate_kl(-d, options)


def wrong_count(tokens: Any, sequences: Any, options: Any) -> Any:
    return RIGHT_WEIGHTS(jnp.maximum(tokens, 2.0), sequences, options)


def wrong_tie(t: Any, n: Any) -> TokenLoss:
    right = kinds.clip(t, n)
    return right._replace(dratio=jnp.where(t.ratio > 1, 0.0, right.dratio))


def without_class_weights(options: Any, used: Any, weights: Any, of_label: Any) -> Any:
    return RIGHT_SCALES(options, used, weights, jnp.ones_like(of_label))


RIGHT_WEIGHTS, RIGHT_SCALES = policy_module.token_weights, cross_entropy_module._scales
BUGS = [
    ("policy_loss", policy_module, "estimate_kl", wrong_sign, {**WITH_KL, "kl_estimator": "k1"}),
    ("policy_loss", policy_module, "estimate_kl", wrong_sign, {}),  # the metric alone
    ("policy_loss", policy_module, "token_weights", wrong_count, {"aggregation": "token_mean"}),
    ("cross_entropy", cross_entropy_module, "_scales", without_class_weights, {}),
]


@pytest.mark.parametrize(("function", "module", "name", "bug", "options"), BUGS)
def test_a_planted_bug_shows(
    function: str,
    module: Any,
    name: str,
    bug: Any,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = policy_problem(**options)
    if function == "cross_entropy":
        problem = plain_problem(function, **options)
        weights = np.linspace(0.5, 2, VOCABULARY, dtype=np.float32)
        problem = problem.but(tensors={**problem.tensors, "class_weights": weights})
    assert max(compare(problem).values()) <= 1
    monkeypatch.setattr(module, name, bug)
    assert max(compare(problem).values()) > 10


def test_a_planted_bug_of_a_kind_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = policy_problem(dual_clip=3.0)
    monkeypatch.setitem(KINDS, "clip", wrong_tie)
    assert compare(problem)["dlogits"] > 10


def logp_from_lse(state: RowState) -> Any:
    right = row_stats(state)
    return right._replace(logp=state.label_logit - right.lse)


def one_minus_rounded_p(state: RowState) -> Any:
    right = row_stats(state)
    return right._replace(one_minus_p=1 - right.p)


@pytest.mark.parametrize("bug", [logp_from_lse, one_minus_rounded_p])
def test_a_broken_rounding_rule_shows(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At an offset of 1e4 that all logits share, and where p is 1 in float32."""
    x = np.random.default_rng(0).normal(0, 1, (2, VOCABULARY)).astype(np.float32)
    x[0] += 1e4
    x[1, 4] = 43.5
    problem = Problem("cross_entropy", x, np.array([3, 4]), {}, {"reduction": "none"})
    theirs = witness(problem)
    right = run(problem, to_state(theirs.state))
    monkeypatch.setattr(inputs_module, "row_stats", bug)
    wrong = run(problem, to_state(theirs.state))
    errors = []
    for ours in (right, wrong):
        assert ours.loss is not None and theirs.loss is not None
        loss = np.abs(ours.loss / theirs.loss - 1).max()
        label = np.abs(ours.dlogits[1, 4] / theirs.dlogits[1, 4] - 1)
        errors.append(max(loss, label))
    assert errors[0] < 1e-6 and errors[1] > 1e-5
