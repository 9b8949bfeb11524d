"""The passes of tileloss.jax in time: inputs, steps, clock and peak memory."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tileloss._core.functions import FUNCTIONS
from tileloss.check.bench import Roofs
from tileloss.check.case import Case
from tileloss.check.jax_case import Call
from tileloss.check.memory import reset_peak, resident

_PASSES = ("forward", "value_and_grad", "value_and_grad, donated")
_SEQUENCE_LENGTH = 256
_DRAWN_ROWS = 64  # of the logits; repeated down the matrix
_T = TypeVar("_T")
_NOISE = 0.1  # of the other policies' logp


def time_passes(roofs: Roofs, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A line of results for each pass, without its roof.

    Raises:
        TypeError, ValueError: as the functions of tileloss.jax.
    """
    like = roofs.lines["value_and_grad"]
    case = _make_case(like, options)
    call = Call(case, options.implementation)
    described = {
        "impl": f"jax {options.implementation or 'default'}",
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        **{name: like[name] for name in ("loss", "preset", "tokens", "vocab", "hidden", "dtype")},
        "options": roofs.options,
        "seed": like["seed"],
        "warmup": options.warmup,
        "iters": options.iters,
    }
    return [described | _time_pass(call, name, like, options) for name in _PASSES]


def _make_case(like: dict[str, Any], options: argparse.Namespace) -> Case:
    """Logits that are normal numbers, or hidden states that are and a head normal / sqrt(H)."""
    random, dtype = np.random.default_rng(like["seed"]), jnp.dtype(like["dtype"])
    tokens, vocab, hidden = like["tokens"], like["vocab"], like["hidden"]
    function = FUNCTIONS[like["loss"]]

    def normal(*shape: int, std: float = 1.0) -> np.ndarray:
        return (std * random.standard_normal(shape, np.float32)).astype(dtype)

    tensors = {"labels": random.integers(0, vocab, tokens)}
    if function.is_linear:
        tensors |= {
            "hidden": normal(tokens, hidden),
            "head": normal(vocab, hidden, std=hidden**-0.5),
        }
    else:
        drawn = normal(min(tokens, _DRAWN_ROWS), vocab)
        tensors["logits"] = drawn[np.arange(tokens) % len(drawn)]
    if not function.is_loss:
        tensors["logp_grad"] = np.ones(tokens, np.float32)
    case = Case(
        tensors,
        like["loss"],
        like["options"],
        batch_size=1,
        seq_len=tokens,
        outputs=["logp"],
        mutants=False,
        in_place=False,
        gradients=("dhidden", "dhead") if function.is_linear else ("dlogits",),
        head_layout=options.head_layout or "vh",
    )
    if function.metrics:
        tensors |= _policy_tensors(case, random)
    return case


def _policy_tensors(case: Case, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Sequences of 256 tokens, advantages of both signs, the other policies' logp near this one's."""
    tokens = case.seq_len
    offsets = np.append(np.arange(0, tokens, _SEQUENCE_LENGTH), tokens)
    has_token_advantages = case.options.get("advantage_level") == "token"
    size = tokens if has_token_advantages else len(offsets) - 1
    made = {"sequence_offsets": offsets, "advantages": random.standard_normal(size, np.float32)}
    call = Call(case, None)
    logp = np.asarray(jax.jit(call.row_outputs)(call.operands)["logp"])
    names = ["old_logp"]
    names += ["ref_logp"] if case.options.get("beta") else []
    names += ["sampler_logp"] if "sampler_correction" in case.options else []
    return made | {n: logp + _NOISE * random.standard_normal(tokens, np.float32) for n in names}


def _time_pass(
    call: Call, name: str, like: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    is_donated, is_forward = name.endswith("donated"), name == "forward"
    if is_forward:
        step: Callable[..., Any] = jax.jit(lambda operands: call.forward(operands)[0])
    else:
        step = jax.jit(call.value_and_grad, donate_argnums=0 if is_donated else ())

    def fresh() -> Any:
        """The operands, in memory that may be given away."""
        if not is_donated:
            return call.operands
        return _ready(jax.tree.map(jnp.copy, call.operands))

    first = _seconds(step, fresh())
    for _ in range(options.warmup):
        _seconds(step, fresh())
    times = [1000 * _seconds(step, fresh()) for _ in range(options.iters)]
    operands = fresh()
    before = reset_peak()
    outputs = _ready(step(operands))
    peak = resident("VmHWM") - before
    held = 0 if is_donated else sum(array.nbytes for array in jax.tree.leaves(outputs))
    return {
        "pass": name,
        "first_call_s": first,
        "median_ms": statistics.median(times),
        "min_ms": min(times),
        "mean_ms": statistics.mean(times),
        "mem_scratch": max(0, peak - held),
    } | _rates(like, is_forward, statistics.median(times))


def _rates(like: dict[str, Any], is_forward: bool, ms: float) -> dict[str, float]:
    """Of useful work: each logit read once and written once, or the products of each gradient once."""
    size = like["tokens"] * like["vocab"]
    if like["hidden"]:
        tflops = 2 * size * like["hidden"] * (1 if is_forward else 3) / ms / 1e9
        return {"tflops": tflops, "roof_share": tflops / like["roof_tflops"]}
    item = jnp.dtype(like["dtype"]).itemsize
    return {"gb_per_s": size * item * (1 if is_forward else 2) / ms / 1e6}


def _ready(arrays: _T) -> _T:
    """The same, once they have been computed."""
    for array in jax.tree.leaves(arrays):
        array.block_until_ready()
    return arrays


def _seconds(step: Callable[..., Any], operands: Any) -> float:
    """What the call allocates is freed after the clock stopped."""
    gc.collect()
    begin = time.perf_counter()
    outputs = _ready(step(operands))
    seconds = time.perf_counter() - begin
    del outputs
    return seconds
