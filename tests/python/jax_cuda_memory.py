"""The workspace of JAX's calls on CUDA is XLA's memory (tests/backends/cuda/host_xla.cpp): test_jax_cuda.py runs this."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from tileloss._core.library import library_path
from tileloss.jax import cross_entropy

_BYTES = 80 << 30


@pytest.fixture
def set_pool() -> Iterator[Any]:
    handlers = ctypes.CDLL(str(library_path().parent / "libtileloss_xla.so"))
    handlers.host_xla_set_pool.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    yield handlers.host_xla_set_pool
    handlers.host_xla_set_pool(_BYTES, 0)


def test_a_pool_that_cannot_give_it(set_pool: Any) -> None:
    def loss() -> float:
        return float(cross_entropy(jnp.ones((3, 8)), jnp.zeros(3, jnp.int32), implementation="cpu"))

    assert loss() == pytest.approx(2.0794415)
    set_pool(1000, 0)
    words = r"sweep: expected \d{4} bytes of XLA's memory for the workspace, got none"
    with pytest.raises((RuntimeError, ValueError), match=words):
        loss()
    set_pool(_BYTES, 16)  # less aligned than the library needs
    words = "workspace: expected 64-byte alignment, got a pointer without it"
    with pytest.raises((RuntimeError, ValueError), match=words):
        loss()
