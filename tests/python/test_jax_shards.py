"""The vocabulary cut over devices: every function against itself on one device, bit by bit for any number of shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tileloss.jax import (
    _shards,
    cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
    linear_policy_loss,
    logprobs,
    policy_loss,
)

pytestmark = pytest.mark.usefixtures("implementation")
B, T, V, H = 2, 7, 64, 5
P = PartitionSpec
ROW_OUTPUTS = ("logp", "lse", "entropy", "argmax", "correct", "log_sum_sq_probs", "mean_logit")


def random(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def labels_below(classes: int) -> Any:
    return jax.random.randint(jax.random.key(9), (B, T), 0, classes).at[0, 2].set(-100)


def over(count: int, function: Callable[..., Any], specs: Any, checked: bool = True) -> Any:
    """The function inside shard_map over ``count`` devices."""
    mesh = jax.make_mesh(
        (count,), ("tp",), devices=jax.devices()[:count], axis_types=(AxisType.Auto,)
    )
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)


def assert_same_on(
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    specs: Any,
    counts: tuple[int, ...] = (1, 4),
    checked: bool = True,
) -> None:
    """``function``: of the operands and of vocab_axis, to what is compared and a scalar of it to differentiate."""

    def with_gradients(f: Callable[..., Any]) -> Any:
        every = tuple(range(len(operands)))
        step = jax.value_and_grad(f, argnums=every, has_aux=True)
        # Where all counts are compared, as users compile it: conftest.py has the other programs compiled without optimisations.
        optimised = {"xla_backend_optimization_level": 3} if len(counts) > 2 else {}
        (_, found), gradients = jax.jit(step, compiler_options=optimised)(*operands)
        return jax.tree.map(np.asarray, (found, gradients))

    expected, exact = with_gradients(lambda *x: weighed(function(*x, vocab_axis=None)))
    first = None
    for count in counts:
        inside = over(count, lambda *x: function(*x, vocab_axis="tp"), specs, checked)
        found, gradients = with_gradients(lambda *x: weighed(inside(*x)))  # noqa: B023
        for ours, theirs in zip(
            jax.tree.leaves((found, gradients)), jax.tree.leaves((expected, exact)), strict=True
        ):
            np.testing.assert_allclose(
                ours, theirs, rtol=2e-5, atol=2e-6, err_msg=f"{count} shards"
            )
        first = found if first is None else first
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=f"bits on {count} shards")


def weighed(found: Any) -> tuple[Any, Any]:
    """A scalar in which every differentiable number of the result has a weight of its own."""
    parts = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating)]
    weights = [jnp.linspace(0.5, 2 + i, x.size).reshape(x.shape) for i, x in enumerate(parts)]
    return sum(jnp.sum(w * x) for w, x in zip(weights, parts, strict=True)), found


@pytest.mark.parametrize(
    ("options", "counts", "checked"),
    [
        ({}, (1, 2, 4, 8), True),
        ({}, (4,), False),
        ({"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 9.0}, (1, 4), True),
        ({"reduction": "none", "temperature": 1.3, "valid_vocab": 60}, (1, 2), True),
        # The last two shards hold nothing but padding.
        (
            {"valid_vocab": 43, "label_smoothing": 0.1, "weight": jnp.linspace(0.5, 2, 43)},
            (1, 8),
            True,
        ),
    ],
    ids=["plain", "unchecked", "smoothed", "per row", "empty shards"],
)
def test_cross_entropy(options: dict[str, Any], counts: tuple[int, ...], checked: bool) -> None:
    labels = labels_below(options.get("valid_vocab", V))
    assert_same_on(
        lambda x, **axis: cross_entropy(x, labels, **options, **axis),
        (random(0, B, T, V),),
        P(None, None, "tp"),
        counts,
        checked,
    )


@pytest.mark.parametrize(
    ("layout", "counts", "checked"),
    [("HV", (1, 2, 4, 8), True), ("VH", (8,), True), ("HV", (4,), False)],
)
def test_linear_cross_entropy(layout: str, counts: tuple[int, ...], checked: bool) -> None:
    labels = labels_below(43)
    head = random(1, H, V)
    assert_same_on(
        lambda h, w, b, **axis: linear_cross_entropy(
            h, w, labels, bias=b, head_layout=layout, valid_vocab=43, **axis
        ),
        (random(0, B, T, H), head if layout == "HV" else head.T, random(2, V)),
        (P(), P(None, "tp") if layout == "HV" else P("tp"), P("tp")),
        counts,
        checked,
    )


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "head"])
def test_rows_over_another_axis_of_the_mesh(fused: bool) -> None:
    # Of the four shards the third holds some padding, the last nothing else.
    labels, options = labels_below(43), {"valid_vocab": 43, "reduction": "sum"}
    if fused:
        function, cut = linear_cross_entropy, (P("dp"), P(None, "tp"))
        operands = (random(0, B, T, H), random(1, H, V))
    else:
        function, cut = cross_entropy, (P("dp", None, "tp"),)
        operands = (random(0, B, T, V),)
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def summed_loss(*x: Any) -> Any:
        return jax.lax.psum(function(*x, vocab_axis="tp", **options), "dp")

    inside = jax.shard_map(summed_loss, mesh=mesh, in_specs=(*cut, P("dp")), out_specs=P())
    found, expected = (
        jax.jit(jax.value_and_grad(f, argnums=tuple(range(len(operands)))))(*operands, labels)
        for f in (inside, lambda *x: function(*x, **options))
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_logprobs() -> None:
    labels = labels_below(43)
    x = random(0, B, T, V).at[1, 1, 3].set(jnp.nan)
    assert_same_on(
        lambda x, **axis: logprobs(x, labels, outputs=ROW_OUTPUTS, valid_vocab=43, **axis),
        (x,),
        P(None, None, "tp"),
    )


def test_linear_logprobs() -> None:
    labels = labels_below(V)
    assert_same_on(
        lambda h, w, **axis: linear_logprobs(h, w, labels, outputs=ROW_OUTPUTS, **axis),
        (random(0, B, T, H), random(1, H, V)),
        (P(), P(None, "tp")),
    )


def test_all_platforms_give_dhidden_in_one_dtype() -> None:
    """The shards' parts are summed in float32: a lowering has the branch of every platform that a call may run on."""
    h, w = (random(k, B * T, H).astype(jnp.bfloat16) for k in (0, 1))
    y = jnp.arange(B * T) % (B * T)
    found = []
    for names in (("xla",), ("pallas_tpu", "cpu", "xla")):
        inside = over(
            2,
            lambda h, w, names=names: linear_cross_entropy(
                h, w, y, head_layout="VH", vocab_axis="tp", implementation=names
            ),
            (P(), P("tp")),
        )
        found.append(jax.jit(jax.grad(inside))(h, w))
    assert found[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in found), rtol=1e-2, atol=1e-5)


def test_policy_loss() -> None:
    labels, advantages = labels_below(V), jnp.array([1.0, -0.7])
    options = {"preset": "gspo", "old_logp": random(5, B, T) - 4, "entropy_coef": 0.1}
    assert_same_on(
        lambda x, **axis: policy_loss(x, labels, advantages, **options, **axis),
        (random(0, B, T, V),),
        P(None, None, "tp"),
    )


def test_linear_policy_loss_with_its_gradient_in_the_forward() -> None:
    labels, advantages = labels_below(V), jnp.array([1.0, -0.7])
    options = {"preset": "grpo", "old_logp": random(5, B, T) - 4, "grad_in_forward": True}
    assert_same_on(
        lambda h, w, **axis: linear_policy_loss(h, w, labels, advantages, **options, **axis),
        (random(0, B, T, H), random(1, H, V)),
        (P(), P(None, "tp")),
    )


def test_only_states_and_dhidden_travel() -> None:
    labels = labels_below(V)
    step = over(
        4, lambda h, w: linear_cross_entropy(h, w, labels, vocab_axis="tp"), (P(), P(None, "tp"))
    )
    program = jax.jit(jax.grad(step, argnums=(0, 1))).lower(random(0, B, T, H), random(1, H, V))
    collective = re.compile(r"= (.*?) (?:all-|reduce-scatter|collective-)[\w-]*\(")
    shapes = [
        tuple(int(size) for size in dims.split(",") if size)
        for found in collective.findall(program.compile().as_text())
        for dims in re.findall(r"\w+\[([\d,]*)\]", found)
    ]
    assert shapes
    of_states = {(_shards.SLICES, B * T), (_shards.SLICES,)}
    assert set(shapes) <= of_states | {(B * T, H), (B, T, H)}, shapes
    assert sum(shape in {(B * T, H), (B, T, H)} for shape in shapes) == 1


def test_a_wrong_start_of_a_shard_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = _shards._columns_here
    monkeypatch.setattr(
        _shards, "_columns_here", lambda y, start, width: columns(y, start + 1, width)
    )
    with pytest.raises(AssertionError, match="shards"):
        test_cross_entropy({}, (4,), True)


def test_outside_shard_map_there_is_no_such_axis() -> None:
    with pytest.raises(ValueError, match="vocab_axis: expected the name of a mesh axis inside sh"):
        cross_entropy(random(0, B, T, V), labels_below(V), vocab_axis="tp")
