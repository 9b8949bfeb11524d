"""tileloss.jax on CUDA: the programs that are made for it, and the handlers, which a process of its own runs on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from cuda_runs import DEVICES, HERE, run_on
from tileloss.jax import (
    _implementations,
    cross_entropy,
    distillation,
    linear_cross_entropy,
    linear_distillation,
    logprobs,
)
from tileloss.jax._sweeps import library


def lowered(function: Any, *arguments: Any) -> list[str]:
    """The library's calls in the program for CUDA, which no GPU is needed to make."""
    program = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return [line for line in program.as_text().splitlines() if "@tileloss_call" in line]


@pytest.mark.parametrize("implementation", ["xla"], indirect=True)
def test_programs_for_cuda(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, head = jnp.ones((3, 5)), jnp.zeros(3, jnp.int32), jnp.ones((5, 7))
    names = ("cpu", "cuda", "pallas_tpu", "xla")
    assert tuple(_implementations.IMPLEMENTATIONS) == names
    monkeypatch.setattr(_implementations, "DEFAULT", names)
    loss = partial(cross_entropy, labels=y, grad_in_forward=True)
    if not library.is_built("libtileloss_cuda.so"):
        assert lowered(loss, x) == []
        with pytest.raises(ValueError, match="cuda is not in this build .libtileloss_cuda.so is"):
            cross_entropy(x, y, implementation="cuda")
    monkeypatch.setattr(library, "is_built", lambda file="": True)
    (call,) = lowered(jax.value_and_grad(loss), x)
    for part in (
        'function = "cross_entropy", operands = "logits labels", options = "ignore_index=-2.0", ',
        'results = "loss dlogits", sequence_length = 0 : i64',
        "call_pass = 2 : i32",
        "result_layouts = [dense<> : tensor<0xindex>, dense<[1, 0]> : tensor<2xindex>]",
        "output_tuple_indices = [1], operand_index = 0",  # the gradient over the logits
    ):
        assert part in call
    (call,) = lowered(partial(logprobs, labels=y, outputs=("logp", "argmax")), x)
    assert 'function = "sweep"' in call
    assert 'results = "state:max state:sum state:label_logit state:argmax"' in call
    assert "tensor<3x2xi32>)" in call
    (call,) = lowered(partial(linear_cross_entropy, labels=y, temperature=jnp.ones(())), x, head)
    assert 'operands = "hidden T:head labels option:temperature"' in call
    pair = jnp.ones((3, 2)), jnp.ones((2, 7))
    (call,) = lowered(partial(linear_cross_entropy, labels=y, low_rank=pair), x, head)
    assert 'operands = "hidden T:head hidden_r T:head_r labels"' in call
    pairs = jnp.zeros((3, 2), jnp.int32)
    _, call = lowered(jax.grad(lambda x: logprobs(x, pairs).logp.sum()), x)
    assert 'function = "logprobs"' in call
    (call,) = lowered(lambda x: distillation(x, x), x)
    assert 'function = "distillation", operands = "logits labels teacher_logits"' in call
    (call,) = lowered(lambda x: linear_distillation(x, head, x, head), x)
    words = "hidden T:head labels T:teacher_head teacher_hidden"
    assert f'function = "linear_distillation", operands = "{words}"' in call
    # What other platforms get is XLA's.
    assert lowered(partial(loss, implementation=("cpu", "xla")), x) == []
    exported = export.export(
        jax.jit(loss),
        platforms=("cpu", "cuda"),
        disabled_checks=[export.DisabledSafetyCheck.custom_call("tileloss_call")],
    )(x)
    assert "@tileloss_call" in str(exported.mlir_module())
    assert jnp.isclose(exported.call(x), jnp.log(5.0))


PYTEST = ("-m", "pytest", "-q")


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "preallocates"), [("host", "false"), ("gpu", "false"), ("gpu", "true")]
)
def test_losses(device: str, preallocates: str) -> None:
    """Beside memory that XLA takes as it needs it, and all at once."""
    run_on(device, *PYTEST, "-n0", HERE / "cuda_jax.py", XLA_PYTHON_CLIENT_PREALLOCATE=preallocates)


@pytest.mark.full
@DEVICES
def test_the_handlers(device: str) -> None:
    """JAX's own tests of "cpu", or on a GPU of "cuda"; but for those of what happens before a handler is called, or is XLA's."""
    parts = ("functions", "linear", "several_labels", "targets")
    files = [HERE / f"test_jax_{part}.py" for part in parts]
    elsewhere = "second_derivatives or shards or refused or choice or told_once or numbers_of_numpy"
    chosen = f"{'cpu' if device == 'host' else 'cuda'} and not ({elsewhere} or named or checked)"
    processes, more = "-n0", {}
    if device == "gpu":
        processes, more = "-n8", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run_on(device, *PYTEST, processes, *files, "-k", chosen, **more)


@pytest.mark.full
def test_a_workspace_is_xlas() -> None:
    run_on("host", *PYTEST, "-n0", HERE / "jax_cuda_memory.py")
