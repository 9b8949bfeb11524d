"""The passes of tileloss.jax in time: inputs and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tileloss._core.functions import FUNCTIONS
from tileloss.tools.case import Case
from tileloss.tools.implementations.own import Call, jax_call
from tileloss.tools.timing import Timed, peak_bytes, time_in_turns

_PASSES = ("forward", "value_and_grad", "value_and_grad, donated")
_SEQUENCE_LENGTH = 256
_DRAWN_ROWS = 64  # of the logits; repeated down the matrix
_NOISE = 0.1  # of the other policies' logp
_SHOWN = ("loss", "preset", "tokens", "vocab", "hidden", "dtype", "options", "seed")
Operands = dict[str, jax.Array]
_ready: Any = jax.block_until_ready  # without types


def time_passes(like: dict[str, Any], implementation: str | None) -> list[dict[str, Any]]:
    """A line of results for each pass, without its roof, of the case that ``like`` describes: a line of the kernels' own.

    Raises:
        TypeError, ValueError: as the functions of tileloss.jax.
    """
    case = _make_case(like)
    described = {
        "impl": f"jax {implementation or 'default'}",
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        **{name: like[name] for name in _SHOWN},
        "warmup": like["warmup"],
        "iters": like["iters"],
    }

    def call(operands: Operands) -> Call:
        return jax_call(case, operands, implementation)

    return [described | _time_pass(case, call, name, like) for name in _PASSES]


def _make_case(like: dict[str, Any]) -> Case:
    """Logits that are normal numbers, or hidden states that are and a head normal / sqrt(H); a teacher's likewise."""
    random, dtype = np.random.default_rng(like["seed"]), jnp.dtype(like["dtype"])
    tokens, vocab, hidden = like["tokens"], like["vocab"], like["hidden"]
    function, layout = FUNCTIONS[like["loss"]], like.get("head_layout", "vh")

    def normal(*shape: int, std: float = 1.0) -> np.ndarray:
        return (std * random.standard_normal(shape, np.float32)).astype(dtype)

    def side(prefix: str) -> dict[str, np.ndarray]:
        if function.is_linear:
            size = (hidden, vocab) if layout == "hv" else (vocab, hidden)
            head = normal(*size, std=hidden**-0.5)
            return {f"{prefix}hidden": normal(tokens, hidden), f"{prefix}head": head}
        drawn = normal(min(tokens, _DRAWN_ROWS), vocab)
        return {f"{prefix}logits": drawn[np.arange(tokens) % len(drawn)]}

    tensors = {"labels": random.integers(0, vocab, tokens)} | side("")
    if function.loss == "distillation":
        tensors |= side("teacher_")
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
        head_layout=layout,
    )
    if function.metrics:
        tensors |= _policy_tensors(case, random)
    case.outputs.clear()
    return case


def _policy_tensors(case: Case, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Sequences of 256 tokens, advantages of both signs, the other policies' logp near this one's."""
    tokens = case.seq_len
    offsets = np.append(np.arange(0, tokens, _SEQUENCE_LENGTH), tokens)
    has_token_advantages = case.options.get("advantage_level") == "token"
    size = tokens if has_token_advantages else len(offsets) - 1
    made = {"sequence_offsets": offsets, "advantages": random.standard_normal(size, np.float32)}
    rows = jax.jit(lambda operands: jax_call(case, operands, None).rows())
    logp = np.asarray(rows(case.jax_operands())["logp"])
    names = ["old_logp"]
    names += ["ref_logp"] if case.options.get("beta") else []
    names += ["sampler_logp"] if "sampler_correction" in case.options else []
    return made | {n: logp + _NOISE * random.standard_normal(tokens, np.float32) for n in names}


def _time_pass(
    case: Case,
    call: Callable[[Operands], Call],
    name: str,
    like: dict[str, Any],
) -> dict[str, Any]:
    is_donated, is_forward = name.endswith("donated"), name == "forward"

    def step(operands: Operands, fixed: Operands) -> Operands:
        def compute(operands: Operands) -> Operands:
            return call(operands | fixed).outputs()

        if not is_forward:
            return case.jax_step(compute)(operands)
        return {name: x for name, x in compute(operands).items() if name != "metrics"}

    jitted = jax.jit(step, donate_argnums=0 if is_donated else ())
    kept = case.jax_operands()
    # Constants otherwise, of hundreds of megabytes in each program.
    fixed = {name: case.jax(name) for name in case.tensors if name.startswith("teacher_")}
    given = _ready(jax.tree.map(jnp.copy, kept)) if is_donated else kept

    def restore() -> None:
        """New operands for those that were given away, in their place in memory."""
        if is_donated:
            given.update(_ready(jax.tree.map(jnp.copy, kept)))

    timed = Timed(lambda: _ready(jitted(given, fixed)), restore)
    first = timed.once()
    for _ in range(like["warmup"]):
        timed.once()
    time_in_turns([timed], like["iters"])

    def outputs_bytes(outputs: Operands) -> int:
        return 0 if is_donated else sum(array.nbytes for array in outputs.values())

    scratch = peak_bytes(timed.run, outputs_bytes)
    found = timed.statistics()
    rates = _rates(like, is_forward, found["median_ms"])
    return {"pass": name, "first_call_s": first} | found | {"mem_scratch": scratch} | rates


def _rates(like: dict[str, Any], is_forward: bool, ms: float) -> dict[str, float]:
    """Of useful work: each logit read once and written once, or the products of each gradient once; a teacher's forward alone."""
    size = like["tokens"] * like["vocab"]
    teachers = FUNCTIONS[like["loss"]].loss == "distillation"
    if like["hidden"]:
        products = (1 if is_forward else 3) + teachers
        tflops = 2 * size * like["hidden"] * products / ms / 1e9
        return {"tflops": tflops, "roof_share": tflops / like["roof_tflops"]}
    item = jnp.dtype(like["dtype"]).itemsize
    return {"gb_per_s": size * item * ((1 if is_forward else 2) + teachers) / ms / 1e6}
