"""Blocks of the TPU kernels: the table, the room they take, what `tune` stores and the kernels find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import tileloss.jax
from tileloss.jax import cross_entropy
from tileloss.jax._sweeps.tpu import blocks, calls, store, tuning
from tileloss.jax._sweeps.tpu.blocks import MIB, Blocks, Call

KINDS = ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "TPU v4", "cpu")
LOGITS = Call("logits_forward", 4096, 151936, 2, row_arrays=4)


def head_call(kernel: str, hidden: int) -> Call:
    return Call(kernel, 4096, 151936, 2, hidden, head_bytes=2, compute_bytes=2, row_arrays=6)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store._read.cache_clear()
    return tmp_path / "tileloss" / "tpu_blocks.json"


@pytest.mark.parametrize("kind", KINDS)
def test_every_chip_has_blocks_that_fit(kind: str) -> None:
    with calls.using(device_kind=kind):
        for hidden in (64, 1536, 4096):
            for kernel in ("head_forward", "head_dhidden", "head_dhead"):
                call = head_call(kernel, hidden)
                found = blocks.blocks_for(call)
                assert blocks.vmem_bytes(found, call) <= blocks.chip().vmem_limit
                assert found.rows % 16 == 0 and found.columns % 128 == 0
        assert blocks.blocks_for(LOGITS) == (256, 2048)
        assert blocks.blocks_for(LOGITS._replace(rows=3, columns=130)) == (16, 256)


def test_blocks_shrink_with_the_hidden_size_until_there_are_none() -> None:
    with calls.using(device_kind="TPU v5"):
        areas = []
        for hidden in (1024, 8192, 16384):
            found = blocks.blocks_for(head_call("head_dhead", hidden))
            areas.append(found.rows * found.columns)
        assert areas[0] > areas[1] > areas[2]
        with pytest.raises(
            ValueError,
            match="head_dhead, 16 bits, hidden size 100000: expected blocks that fit into the 48 MiB of VMEM that a "
            "kernel may take on v5p, got 16 x 128, which take",
        ):
            blocks.blocks_for(head_call("head_dhead", 100_000))


def test_the_room_is_two_of_each_block_and_the_scratch() -> None:
    of_rows = 4 * 128 * 256 * 2 * 4
    of_columns = 4 * 8 * 2048 * 4
    assert blocks.vmem_bytes(Blocks(256, 2048), LOGITS) == 2 * 256 * 2048 * 2 + of_rows + of_columns
    assert blocks.vmem_bytes(Blocks(16, 128), head_call("head_dhead", 33)) < MIB


def fake_timer(best: Blocks, monkeypatch: pytest.MonkeyPatch) -> list[Blocks]:
    """A TPU where those blocks are the fastest, and blocks of 512 rows do not run."""
    timed = []

    def run(candidate: Blocks) -> Callable[[], Any]:
        timed.append(candidate)
        return lambda: candidate

    def seconds(run: Callable[[], Any], repeats: int) -> float:
        candidate = run()
        if candidate.rows == 512:
            raise tuning.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem\nmore")
        return 1e-3 if candidate == best else 2e-3

    monkeypatch.setattr(tuning, "seconds", seconds)
    monkeypatch.setattr(tuning, "_logits_runs", lambda *_: [(LOGITS, run)])
    return timed


def test_tune_times_all_and_stores_the_fastest(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = Blocks(128, 1024)
    timed = fake_timer(best, monkeypatch)
    with calls.using(device_kind="TPU v6 lite"):
        assert tileloss.jax.tune(4096, 151936) == {"logits_forward": best}
        assert len(timed) == len(set(timed)) == 20
        assert blocks.blocks_for(LOGITS) == best
        assert blocks.blocks_for(LOGITS._replace(operand_bytes=4)) == (256, 2048)  # not of float32
    with calls.using(device_kind="TPU v5 lite"):
        assert blocks.blocks_for(LOGITS) == (256, 2048)
        store.save("TPU v5 lite", blocks.key(LOGITS), (64, 512))
    stored = json.loads(cache.read_text())
    assert stored["TPU v6 lite"] == {"logits_forward, 16 bits": [128, 1024]}
    assert stored["TPU v5 lite"] == {"logits_forward, 16 bits": [64, 512]}
    printed = capsys.readouterr().out
    assert "  128 x  1024  1.000 ms" in printed and "fastest: 128 x 1024" in printed
    assert "512 x  1024  RESOURCE_EXHAUSTED: vmem\n" in printed


def test_stored_blocks_that_do_not_fit_or_are_none_are_refused(cache: Path) -> None:
    with calls.using(device_kind="TPU v5"):
        store.save("TPU v5", blocks.key(LOGITS), (4096, 8192))
        with pytest.raises(ValueError, match="logits_forward, 16 bits: expected blocks that fit"):
            blocks.blocks_for(LOGITS)
        for text in ("{", "[]", '{"TPU v5": {"logits_forward, 16 bits": [0, 128]}}'):
            cache.write_text(text)
            store._read.cache_clear()
            with pytest.raises(ValueError, match="tpu_blocks.json: expected the blocks that"):
                blocks.blocks_for(LOGITS)


def test_tune_needs_a_tpu_and_sizes() -> None:
    with pytest.raises(RuntimeError, match="tune: expected a TPU, the default device is 'cpu'"):
        tileloss.jax.tune(8, 300)
    with pytest.raises(ValueError, match="hidden: expected a number above 0, got 0"):
        tileloss.jax.tune(8, 300, hidden=0)
    with pytest.raises(ValueError, match="head_layout: expected VH or HV, got 'vh'"):
        tileloss.jax.tune(8, 300, head_layout="vh")
    with pytest.raises(ValueError, match="dtype: expected bfloat16 or float32, got float16"):
        tileloss.jax.tune(8, 300, dtype="float16")


@pytest.mark.parametrize("hidden", [None, 64])
def test_what_is_timed_are_calls_of_the_kernels(hidden: int | None) -> None:
    """Traced alone: the real timer has nothing to run on here."""
    kernels = (
        tuning._logits_runs(32, 300, "bfloat16")
        if hidden is None
        else tuning._head_runs(32, 300, hidden, "bfloat16", "HV")
    )
    for call, run in kernels:
        step = run(Blocks(16, 128))
        traced = step.func.trace(*step.args)
        assert f"tileloss_{call.kernel}" in str(traced.jaxpr)


def test_the_median_of_the_runs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 29.0])
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: next(clock))
    assert tuning.seconds(lambda: 0, 3) == 2.0


def test_without_pallas_all_else_works() -> None:
    code = """
import sys
sys.modules["jax.experimental.pallas"] = None
import jax
import jax.numpy as jnp
from tileloss.jax import cross_entropy
x, labels = jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32)
assert abs(cross_entropy(x, labels) - 1.386294) < 1e-6
try:
    cross_entropy(x, labels, implementation="pallas_tpu")
except ValueError as error:
    assert "pallas_tpu has no Pallas" in str(error), error
else:
    raise AssertionError
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("is_traced", [False, True])
def test_on_another_platform_the_kernels_alone_are_an_error_at_lowering(is_traced: bool) -> None:
    x, labels = jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32)

    def loss(x: Any, implementation: Any = "pallas_tpu") -> Any:
        return cross_entropy(x, labels, implementation=implementation)

    wrong = "^implementation: pallas_tpu runs on tpu, the program is for cpu"
    for step in (loss, jax.grad(loss), lambda x: jax.vmap(loss)(x[None])):
        with pytest.raises(ValueError, match=rf"{wrong}\b(?!,)"):
            (jax.jit(step) if is_traced else step)(x)
    of_both = jax.jit(lambda x: loss(x, ("pallas_tpu", "xla")))
    with pytest.raises(ValueError, match=f'{wrong}, tpu ."xla" is for several at once.'):
        export.export(of_both, platforms=("cpu", "tpu"))(x)
    export.export(of_both, platforms=("tpu",))(x)
