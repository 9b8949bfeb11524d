"""Which blocks are fastest on the TPU at hand: every candidate is timed, the best is stored for the kernels to find."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tileloss.jax._rows.coefficients import RowCoefficients
from tileloss.jax._rows.state import RowState
from tileloss.jax._sweeps.operands import BackwardRows, LmHead, Logits, Spec, Target
from tileloss.jax._sweeps.tpu import blocks, head, logits, store
from tileloss.jax._sweeps.tpu.blocks import Blocks, Call

_ROWS = (64, 128, 256, 512, 1024)
_COLUMNS = {True: (128, 256, 512, 1024), False: (512, 1024, 2048, 4096)}  # with a head or without

Run = Callable[[Blocks], Callable[[], Any]]  # a kernel compiled with these blocks


def tune(
    rows: int,
    vocab: int,
    *,
    hidden: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    head_layout: str = "HV",
    repeats: int = 10,
) -> dict[str, tuple[int, int]]:
    """Times the blocks of "pallas_tpu" on this machine's TPU, prints a table and stores the fastest in
    ``$XDG_CACHE_HOME/tileloss/tpu_blocks.json`` (``~/.cache`` where that is not set), which calls traced from then on use.

    Args:
        rows, vocab: N and V of the logits to time with. What is found serves every N and V.
        hidden: H: the kernels of the LM head; None: those from logits.
        dtype: bfloat16 or float32, of logits, or of hidden states, head and products. What is found serves this dtype and H.
        head_layout: "HV", a head [H, V], as of the linear_* functions, or "VH". Blocks are stored for both.
        repeats: runs of each candidate; the median counts.

    Returns:
        By kernel: rows and columns of the fastest blocks.

    Raises:
        RuntimeError: there is no TPU, or no candidate of a kernel runs.
        ValueError: an argument out of range.
    """
    for name, value in {"rows": rows, "vocab": vocab, "hidden": hidden, "repeats": repeats}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    if head_layout not in ("VH", "HV"):
        raise ValueError(f"head_layout: expected VH or HV, got {head_layout!r}")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype: expected bfloat16 or float32, got {jnp.dtype(dtype)}")
    if not blocks.is_tpu():
        raise RuntimeError(f"tune: expected a TPU, the default device is {blocks.device_kind()!r}")
    kernels = (
        _logits_runs(rows, vocab, dtype)
        if hidden is None
        else _head_runs(rows, vocab, hidden, dtype, head_layout)
    )
    return {call.kernel: fastest(call, run, repeats) for call, run in kernels}


def candidates(call: Call) -> Iterator[Blocks]:
    """Those that fit into VMEM, and no two that a call's shape makes the same."""
    seen = set()
    for rows in _ROWS:
        for columns in _COLUMNS[call.hidden > 0]:
            clipped = blocks.clipped(Blocks(rows, columns), call)
            if clipped not in seen and blocks.fits(clipped, call):
                seen.add(clipped)
                yield clipped


def fastest(call: Call, run: Run, repeats: int) -> tuple[int, int]:
    """Times every candidate of a kernel, prints and stores."""
    print(blocks.key(call))
    times: dict[Blocks, float] = {}
    for candidate in candidates(call):
        try:
            times[candidate] = seconds(run(candidate), repeats)
        except jax.errors.JaxRuntimeError as error:  # no room after all
            found = str(error).splitlines()[0]
        else:
            found = f"{1e3 * times[candidate]:.3f} ms"
        print(f"  {candidate.rows:5} x {candidate.columns:5}  {found}")
    if not times:
        raise RuntimeError(f"tune: no blocks of {call.kernel} run")
    best = min(times, key=times.__getitem__)
    print(f"  fastest: {best.rows} x {best.columns}")
    store.save(blocks.device_kind(), blocks.key(call), best)
    return best.rows, best.columns


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median; the first run, which compiles, does not count."""
    jax.block_until_ready(run())  # type: ignore[no-untyped-call]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _logits_runs(rows: int, vocab: int, dtype: DTypeLike) -> list[tuple[Call, Run]]:
    x = Logits(jax.random.normal(jax.random.key(0), (rows, vocab), dtype))
    target, given = _rows(rows, vocab)
    spec = Spec(vocab, has_prob_logp=False, has_uniform=False)

    def forward(candidate: Blocks) -> Callable[[], Any]:
        step = jax.jit(lambda x: logits.forward(x, target, spec, candidate))
        return partial(step, x)

    def backward(candidate: Blocks) -> Callable[[], Any]:
        step = jax.jit(lambda x: logits.backward(x, target, given, spec, candidate))
        return partial(step, x)

    return [
        (logits.call_of("logits_forward", x, spec), forward),
        (logits.call_of("logits_backward", x, spec), backward),
    ]


def _head_runs(
    rows: int, vocab: int, hidden: int, dtype: DTypeLike, layout: str
) -> list[tuple[Call, Run]]:
    keys = jax.random.split(jax.random.key(0))
    sizes = (vocab, hidden) if layout == "VH" else (hidden, vocab)
    x = LmHead(
        jax.random.normal(keys[0], (rows, hidden), dtype),
        jax.random.normal(keys[1], sizes, dtype) / hidden**0.5,
        None,
    )
    target, given = _rows(rows, vocab)
    spec = Spec(
        vocab,
        head_layout=layout,
        compute_dtype=dtype,
        has_prob_logp=False,
        has_uniform=False,
    )

    def forward(candidate: Blocks) -> Callable[[], Any]:
        step = jax.jit(lambda x: head.forward(x, target, spec, candidate))
        return partial(step, x)

    def backward(needs_grad: tuple[bool, ...], candidate: Blocks) -> Callable[[], Any]:
        one, both = spec._replace(needs_grad=needs_grad), (candidate, candidate)
        step = jax.jit(lambda x: head.backward(x, target, given, one, both))
        return partial(step, x)

    return [
        (head.call_of("head_forward", x, spec), forward),
        (head.call_of("head_dhidden", x, spec), partial(backward, (True, False, False))),
        (head.call_of("head_dhead", x, spec), partial(backward, (False, True, False))),
    ]


def _rows(rows: int, vocab: int) -> tuple[Target, BackwardRows]:
    """Labels, and what a cross-entropy would tell the backward of rows that are about as likely."""
    labels = jnp.arange(rows, dtype=jnp.int32) % vocab
    ones, zeros = jnp.ones(rows, jnp.float32), jnp.zeros(rows, jnp.float32)
    state = RowState(max=zeros, sum=vocab * ones, label_logit=zeros)
    coefficients = RowCoefficients(-ones, zeros, zeros, zeros)
    return Target(labels, {}), BackwardRows(
        jnp.ones(rows, bool), state, jnp.log(vocab * ones), coefficients, -ones
    )
