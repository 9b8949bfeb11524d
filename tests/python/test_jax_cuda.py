"""tileloss.jax on CUDA: the programs that are made for it, and the handlers, which a process of its own runs on the host."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from tileloss._core.library import library_path
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
    assert tuple(_implementations._BY_NAME) == names
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
    assert 'results = "state:max state:sum state:target state:argmax"' in call
    assert "tensor<3x2xi32>)" in call
    (call,) = lowered(partial(linear_cross_entropy, labels=y, temperature=jnp.ones(())), x, head)
    assert 'operands = "hidden T:head labels option:temperature"' in call
    (call,) = lowered(lambda x: distillation(x, x), x)
    assert 'function = "distillation", operands = "logits teacher_logits labels"' in call
    (call,) = lowered(lambda x: linear_distillation(x, head, x, head), x)
    words = "hidden T:head T:teacher_head teacher_hidden labels"
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


@pytest.mark.full
def test_the_handlers_run_on_the_host() -> None:
    """JAX's own tests of "cpu", whose calls go to the handlers of CUDA there (tests/backends/cuda/host_xla.cpp); but for those of
    what happens before a handler is called, or is XLA's."""
    if platform.machine() != "x86_64":
        pytest.skip("NOT RUN: CUDA's threads are fibers of x86-64")
    folder = Path(__file__).parent
    files = [folder / f"test_jax_{part}.py" for part in ("functions", "linear", "targets")]
    elsewhere = "second_derivatives or refused or choice or told_once or numbers_of_numpy or named or checked"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", *files, "-k", f"cpu and not ({elsewhere})"],
        env=os.environ | {"TILELOSS_LIBRARY": str(library_path().parent / "cuda_on_host/libtileloss.so")},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
