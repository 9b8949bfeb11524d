"""tileloss.jax with the rows over several devices, against one device: by shard_map, and by XLA's partitioner.

conftest.py has JAX make four devices of the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_calls import tiles_of
from tileloss.jax import (
    _implementations,
    cross_entropy,
    distillation,
    linear_cross_entropy,
    linear_logprobs,
    linear_policy_loss,
    logprobs,
    policy_loss,
)
from tileloss.jax._sweeps import tpu, xla

pytestmark = pytest.mark.usefixtures("implementation")
# A gathered [SEQUENCES * LENGTH, HIDDEN] is larger than a head, and no multiple of a device's part of anything.
SEQUENCES, LENGTH, HIDDEN, VOCABULARY = 8, 6, 7, 37
ROWS = SEQUENCES * LENGTH
ONLY_CPU = pytest.mark.parametrize("implementation", ["cpu"], indirect=True)
small_tiles = tiles_of(16)


def make_mesh(x: AxisType = AxisType.Auto, y: AxisType | None = None) -> Mesh:
    assert jax.device_count() >= 4
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(x, y or x))


class Case(NamedTuple):
    """A loss of arrays, of which the first are differentiated."""

    loss: Callable[..., Any]
    differentiated: int
    arrays: tuple[Any, ...]
    replicated: tuple[int, ...] = ()

    def specs(self, axes: Any) -> tuple[P, ...]:
        """``axes``: those of the first dimension, or of the first two as a PartitionSpec."""
        spec = axes if isinstance(axes, P) else P(axes)
        return tuple(
            P() if i in self.replicated else P(*tuple(spec)[: np.ndim(x)])
            for i, x in enumerate(self.arrays)
        )

    def placed(self, mesh: Mesh, axes: Any) -> tuple[Any, ...]:
        specs = self.specs(axes)
        return tuple(
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(self.arrays, specs, strict=True)
        )

    def value_and_grad(self, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
        return jax.value_and_grad(loss or self.loss, argnums=tuple(range(self.differentiated)))

    def on_one_device(self) -> Any:
        return jax.jit(self.value_and_grad())(*self.arrays)


def case_of(name: str) -> Case:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    labels = random.integers(0, VOCABULARY, (SEQUENCES, LENGTH)).astype(np.int32)
    labels[1, 3] = -100
    logits, hidden = normal(SEQUENCES, LENGTH, VOCABULARY), normal(SEQUENCES, LENGTH, HIDDEN)
    head, bias = normal(HIDDEN, VOCABULARY), normal(VOCABULARY)
    if name == "cross_entropy":

        def from_logits(x: Any, labels: Any, token_weights: Any, temperature: Any) -> Any:
            options = {"token_weights": token_weights, "temperature": temperature, "z_loss": 0.1}
            return cross_entropy(x, labels, reduction="sum", **options)

        weights, temperature = np.abs(normal(*labels.shape)), np.float32(0.7)
        return Case(from_logits, 1, (logits, labels, weights, temperature), (3,))
    if name == "linear_cross_entropy":

        def from_hidden(x: Any, head: Any, bias: Any, labels: Any) -> Any:
            options = {"bias": bias, "label_smoothing": 0.1}
            return linear_cross_entropy(x, head, labels, reduction="sum", **options)

        return Case(from_hidden, 3, (hidden, head, bias, labels), (1, 2))
    if name == "logprobs":

        def weighted_outputs(x: Any, labels: Any, token_weights: Any) -> Any:
            found = logprobs(x, labels, outputs=("logp", "entropy"))
            return jnp.sum(token_weights * found.logp + found.entropy)

        return Case(weighted_outputs, 1, (logits, labels, normal(*labels.shape)))
    if name.startswith("several labels"):
        several = np.stack([labels, labels[::-1], np.full_like(labels, 3)], axis=-1)
        function = logprobs if name == "several labels" else linear_logprobs

        def weighted_labels(*arrays: Any) -> Any:
            *operand, labels, weights = arrays
            return jnp.sum(weights * function(*operand, labels).logp)

        if name == "several labels":
            return Case(weighted_labels, 1, (logits, several, normal(*several.shape)))
        return Case(weighted_labels, 2, (hidden, head, several, normal(*several.shape)), (1,))
    if name.startswith("distillation"):

        def mixed(x: Any, teacher: Any, labels: Any, token_weights: Any) -> Any:
            options = {"divergence": "reverse_kl", "label_weight": 0.3, "divergence_weight": 0.7}
            options |= {"token_weights": token_weights, "reduction": "sum"}
            return distillation(x, teacher, labels, **options)

        everywhere = (2,) if name.endswith("labels everywhere") else ()
        arrays = (logits, 2 * logits[::-1], labels, np.abs(normal(*labels.shape)))
        return Case(mixed, 1, arrays, everywhere)
    if name == "policy_loss":

        def packed_policy(x: Any, labels: Any, advantages: Any, old_logp: Any) -> Any:
            offsets = jnp.array([0, 5, 5, 20, ROWS])
            options = {"old_logp": old_logp, "preset": "gspo", "sequence_offsets": offsets}
            return policy_loss(x, labels, advantages, **options)

        return Case(
            packed_policy, 1, (logits, labels, 9 * normal(4), normal(*labels.shape) - 3), (2, 3)
        )
    assert name == "linear_policy_loss", name

    def policy(x: Any, head: Any, labels: Any, advantages: Any, old_logp: Any) -> Any:
        options = {"old_logp": old_logp, "preset": "dapo", "entropy_coef": 0.1}
        return linear_policy_loss(x, head, labels, advantages, **options)

    return Case(
        policy, 2, (hidden, head, labels, normal(SEQUENCES), normal(*labels.shape) - 3), (1,)
    )


def assert_close(ours: Any, theirs: Any) -> None:
    def check(x: Any, y: Any) -> None:
        assert np.abs(y).max() > 0.01
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)

    jax.tree.map(check, ours, theirs)


def collectives(function: Callable[..., Any], *arguments: Any) -> list[tuple[str, int]]:
    """The collectives of the program: name and elements of each array that one moves."""
    text = function.lower(*arguments).compile().as_text()  # type: ignore[attr-defined]
    found = []
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for types, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", text):
        for shape in re.findall(r"[a-z]\d*\[([\d,]*)\]", types):
            found.append((name, int(np.prod([int(n) for n in shape.split(",") if n]))))
    return found


def assert_moves_no_rows(function: Callable[..., Any], *arguments: Any) -> None:
    """Sums of the head's size, and nothing else of more than a number for each row."""
    for name, elements in collectives(function, *arguments):
        assert elements <= (HIDDEN * VOCABULARY if name == "all-reduce" else ROWS), name


# ------------------------------------------------------------------------------------------------------------ shard_map

# Over rows.
SUMS = ["cross_entropy", "logprobs", "linear_cross_entropy", "several labels, head", "distillation"]


@pytest.mark.parametrize("name", SUMS)
def test_gradients_inside_of_shard_map(name: str) -> None:
    case, mesh = case_of(name), make_mesh()

    def step(*arrays: Any) -> Any:
        loss, gradients = case.value_and_grad()(*arrays)
        return lax.psum(loss, "x"), gradients

    specs = case.specs("x")
    out = (P(), specs[: case.differentiated])
    cut = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out))
    assert_close(cut(*case.placed(mesh, "x")), case.on_one_device())


@pytest.mark.parametrize("name", SUMS)
def test_gradients_of_shard_map(name: str) -> None:
    case, mesh = case_of(name), make_mesh(AxisType.Explicit)

    def summed(*arrays: Any) -> Any:
        return lax.psum(case.loss(*arrays), "x")

    cut = jax.shard_map(summed, mesh=mesh, in_specs=case.specs("x"), out_specs=P())
    step = jax.jit(case.value_and_grad(cut))
    assert_close(step(*case.placed(mesh, "x")), case.on_one_device())


@ONLY_CPU
def test_shard_map_over_one_axis_of_two() -> None:
    case, mesh = case_of("linear_cross_entropy"), make_mesh()
    loss = jax.shard_map(
        lambda *arrays: lax.psum(case.loss(*arrays), "x"),
        mesh=mesh,
        in_specs=case.specs("x"),
        out_specs=P(),
        axis_names={"x"},
    )
    step = jax.jit(case.value_and_grad(loss))
    expected = case.on_one_device()
    for axes in ("x", ("x", "y")):
        assert_close(step(*case.placed(mesh, axes)), expected)


def test_class_weights_in_shard_map() -> None:
    mesh, (logits, labels, *_) = make_mesh(), case_of("cross_entropy").arrays
    weight = np.linspace(0.5, 1.5, VOCABULARY, dtype=np.float32)

    def rows(x: Any, labels: Any, weight: Any) -> Any:
        return cross_entropy(x, labels, weight, label_smoothing=0.1, reduction="none")

    cut = jax.shard_map(rows, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=P("x"))
    assert_close(jax.jit(cut)(logits, labels, weight), jax.jit(rows)(logits, labels, weight))


# ------------------------------------------------------------------------------------------------------------ jit


AUTO, EXPLICIT = (AxisType.Auto,), (AxisType.Explicit,)
NAMES = ["cross_entropy", "linear_cross_entropy", "linear_policy_loss"]


@pytest.mark.parametrize(
    ("kinds", "axes", "name"),
    [
        *((AUTO, "x", name) for name in NAMES),
        *((EXPLICIT, ("x", "y"), name) for name in NAMES),
        *((EXPLICIT, P(None, "y"), name) for name in ["cross_entropy", "policy_loss"]),
        *(
            (EXPLICIT, P("x", "y"), name)
            for name in [*NAMES[1:], "distillation, labels everywhere"]
        ),
        (AUTO, "x", "distillation"),
        (AUTO + EXPLICIT, P("x", "y"), "logprobs"),
        (AUTO, "x", "several labels, head"),
        (EXPLICIT, P("x", "y"), "several labels"),
    ],
)
def test_rows_stay_where_they_are(kinds: tuple[AxisType, ...], axes: Any, name: str) -> None:
    case, mesh = case_of(name), make_mesh(*kinds)
    arrays, step = case.placed(mesh, axes), jax.jit(case.value_and_grad())
    loss, gradients = step(*arrays)
    assert_close((loss, gradients), case.on_one_device())
    for x, gradient in zip(arrays, gradients, strict=False):
        assert gradient.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert_moves_no_rows(step, *arrays)


@ONLY_CPU
@pytest.mark.parametrize(
    ("kinds", "axes", "name"),
    [
        (AUTO, ("x", "y"), "linear_cross_entropy"),
        (EXPLICIT, "x", "linear_policy_loss"),
        (EXPLICIT, P("x", "y"), "cross_entropy"),
    ],
)
def test_rows_stay_where_they_are_for_kernels_that_xla_cannot_partition(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[AxisType, ...], axes: Any, name: str
) -> None:
    # Those for TPUs; the sweeps in plain XLA stand for them here.
    for kernels in (tpu.logits, tpu.head):
        monkeypatch.setattr(kernels, "forward", xla.forward)
        monkeypatch.setattr(kernels, "backward", xla.backward)
    anywhere = _implementations.IMPLEMENTATIONS["pallas_tpu"]._replace(
        platform=None, forward=tpu.forward, backward=tpu.backward
    )
    monkeypatch.setitem(_implementations.IMPLEMENTATIONS, "pallas_tpu", anywhere)
    monkeypatch.setattr(_implementations, "DEFAULT", ("pallas_tpu",))
    test_rows_stay_where_they_are(kinds, axes, name)


@pytest.mark.parametrize("axes", ["x", P(None, "y"), P("y", "x")], ids=str)
def test_row_outputs_stay_with_their_rows(axes: Any) -> None:
    case, mesh = case_of("logprobs"), make_mesh(AxisType.Explicit)

    def rows(x: Any, labels: Any, _: Any) -> Any:
        return logprobs(x, labels, outputs=("logp", "entropy"))

    arrays, step = case.placed(mesh, axes), jax.jit(rows)
    found = step(*arrays)
    assert_close(found, step(*case.arrays))
    assert found.logp.sharding.is_equivalent_to(arrays[1].sharding, 2)
    assert collectives(step, *arrays) == []


@ONLY_CPU
def test_rows_cut_within_outside_of_jit_and_mapped() -> None:
    mesh, (logits, labels, *_) = make_mesh(AxisType.Explicit), case_of("logprobs").arrays
    placed = jax.device_put(logits, NamedSharding(mesh, P("x", "y")))
    expected = jax.jit(logprobs)(logits, labels).logp
    assert_close(logprobs(placed, labels).logp, expected)
    halves = [x.reshape(2, SEQUENCES // 2, *x.shape[1:]) for x in (logits, labels, expected)]
    cut = [jax.device_put(x, NamedSharding(mesh, P("x", None, "y"))) for x in halves[:2]]
    mapped = jax.jit(jax.vmap(lambda x, labels: logprobs(x, labels).logp))
    assert_close(mapped(*cut), halves[2])


@ONLY_CPU
def test_a_mapped_head_over_devices() -> None:
    mesh, (hidden, head, _, labels) = make_mesh(), case_of("linear_cross_entropy").arrays

    @jax.jit
    def step(hidden: Any, heads: Any, labels: Any) -> Any:
        return jax.vmap(lambda h: jax.value_and_grad(linear_cross_entropy)(hidden, h, labels))(
            heads
        )

    arrays = (hidden, np.stack([head, 2 * head]), labels)
    shardings = (NamedSharding(mesh, spec) for spec in (P("x"), P(), P("x")))
    placed = [jax.device_put(*pair) for pair in zip(arrays, shardings, strict=True)]
    assert_close(step(*placed), step(*arrays))
    assert ("all-gather", hidden.size) not in collectives(step, *placed)


@ONLY_CPU
def test_rows_that_devices_cannot_have_in_equal_parts() -> None:
    case, mesh = case_of("linear_cross_entropy"), make_mesh()
    hidden, head, bias, labels = case.arrays
    cut = NamedSharding(mesh, P(("x", "y")))
    step = case.value_and_grad(
        lambda hidden, *rest: case.loss(lax.with_sharding_constraint(hidden, cut), *rest)
    )
    few = case._replace(arrays=(hidden[0, :5], head, bias, labels[0, :5]))
    assert_close(jax.jit(step)(*few.arrays), few.on_one_device())


@ONLY_CPU
def test_one_pass_gathers_rows_only_where_nothing_tells_that_they_are_cut() -> None:
    case, mesh = case_of("linear_cross_entropy"), make_mesh()
    hidden, head, _, labels = case.arrays
    shardings = tuple(NamedSharding(mesh, spec) for spec in (P("x"), P(), P("x")))

    def step(**options: Any) -> Any:
        loss = jax.value_and_grad(
            lambda hidden, head, labels: linear_cross_entropy(hidden, head, labels, **options),
            argnums=(0, 1),
        )
        return jax.jit(loss, in_shardings=shardings)

    arrays = (hidden, head, labels)  # on no mesh while they are traced
    assert ("all-gather", hidden.size) in collectives(step(), *arrays)
    assert_moves_no_rows(step(grad_in_forward=False), *arrays)
    expected = jax.jit(jax.value_and_grad(linear_cross_entropy, argnums=(0, 1)))(*arrays)
    assert_close(step()(*arrays), expected)
    placed = tuple(jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True))
    assert_moves_no_rows(step(grad_in_forward=True), *placed)
    assert_close(step(grad_in_forward=True)(*placed), expected)


def test_a_donated_gradient_lies_where_its_rows_were() -> None:
    mesh = make_mesh(AxisType.Explicit)
    x = jax.device_put(jnp.ones((16, 4000), jnp.float32), NamedSharding(mesh, P(("x", "y"))))
    y = jnp.zeros(16, jnp.int32)
    places = [part.data.unsafe_buffer_pointer() for part in x.addressable_shards]
    gradient = jax.jit(jax.grad(lambda x: cross_entropy(x, y)), donate_argnums=0)(x)
    assert [part.data.unsafe_buffer_pointer() for part in gradient.addressable_shards] == places
