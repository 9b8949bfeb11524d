"""A digest of the results of some thousands of calls: `--write FILE` before a change that must not alter a bit, `--check FILE`
after it.

Every function, from logits and with the LM head, in each dtype, with the gradient made in the forward, in the backward and over
the logits, with each option that has kernels or a formula of its own; through PyTorch on every instruction set here, and
through JAX's "cpu" and "xla". The digests are of one machine and one build of torch and jax: write and check on the same.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx", "neon", "neon_bf16")
N, V, H, G, K = (2, 9), 1003, 40, 24, 12
DTYPES = ("float32", "bfloat16", "float16")
DIVERGENCES = (
    "forward_kl",
    "reverse_kl",
    "jsd",
    "jeffreys",
    "skew_forward_kl",
    "skew_reverse_kl",
    "total_variation",
)
UNCLIPPED = ("sapo", "vespo", "reinforce")
MIXTURES = ("jsd", "skew_forward_kl", "skew_reverse_kl")
PRESETS = "grpo bnpo dr_grpo dapo cispo sapo gspo luspo vespo reinforce".split()
ROWS = ("logp", "lse", "entropy", "argmax", "correct", "log_sum_sq_probs", "mean_logit")
PAIR_ROWS = ("divergence", "entropy", "teacher_entropy", "agreement", "logp", "lse")
TRANSFORM = {"logit_scale": 0.7, "softcap": 20.0, "temperature": 1.7}
Case = tuple[str, str, dict[str, Any]]  # function, what is given beside the logits, options


def cases() -> Iterator[Case]:
    """Of one dtype and one way to make the gradient."""
    for options in (
        {},
        TRANSFORM,
        {"temperature": 0.6, "temperature_on": "logprob"},
        {"label_smoothing": 0.1},
        {"z_loss": 1e-3, "reduction": "sum"},
        {"reduction": "none", "valid_vocab": V - 50},
        {"num_items": 7.5},
    ):
        yield "cross_entropy", "labels", options
    yield "cross_entropy", "weights", {"label_smoothing": 0.05}
    yield "cross_entropy", "probabilities", {"label_smoothing": 0.1, "softcap": 20.0}
    yield "cross_entropy", "probabilities", {"reduction": "none"}
    yield "logprobs", "labels", {"outputs": ROWS}
    yield "logprobs", "labels", {"outputs": ("logp", "entropy"), **TRANSFORM}
    for preset in PRESETS:
        yield (
            "policy_loss",
            "policy",
            {"preset": preset, **({} if preset in UNCLIPPED else {"epsilon_high": 0.3})},
        )
    for options in (
        {"beta": 0.04, "entropy_coef": 0.01, "entropy_quantile": 0.5},
        {"sampler_correction": "truncate", "sampler_max": 1.2, "kl_estimator": "k1", "beta": 0.1},
        {"ratio_level": "sequence", "off_policy_threshold": 0.5, "dual_clip": 3.0},
        {"aggregation": "none", **TRANSFORM},
    ):
        yield "policy_loss", "policy", options
    for kind in DIVERGENCES:
        beta = {"beta": 0.3} if kind in MIXTURES else {}
        yield "distillation", "teacher", {"divergence": kind, **beta, "outputs": PAIR_ROWS}
        mixed = {
            "divergence": kind,
            "label_weight": 0.3,
            "divergence_weight": 0.7,
            "temperature": 2.0,
            "label_temperature": 0.8,
        }
        yield "distillation", "teacher", {**mixed, "scale_by_temperature_squared": True}
        capped = {"softcap": 20.0, "teacher_softcap": 0.0}
        yield "distillation", "teacher", {"divergence": kind, **capped, "reduction": "none"}
        for tail in ("lump", "ignore", "renormalise"):
            known = {"divergence": kind, "tail": tail}
            yield (
                "sparse_distillation",
                "columns",
                {**known, "label_weight": 0.2, "divergence_weight": 0.8, "softcap": 20.0},
            )
            yield "sparse_distillation", "columns", known


def arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * draw.normal(size=shape)).astype(np.float32)

    labels = draw.integers(0, V - 50, N)
    x, teacher = normal(*N, V, scale=3), normal(*N, V, scale=2)
    x[0, 1, labels[0, 1]] += 40  # a sure row
    teacher[1, 0] = x[1, 0]
    log_q = teacher - np.logaddexp.reduce(teacher, -1, keepdims=True)
    ids = np.argsort(-log_q, -1, kind="stable")[..., :K]
    labels[1, 3] = -100
    logp = normal(*N, scale=0.3) - 7
    return {
        "x": x,
        "labels": labels,
        "hidden": normal(*N, H),
        "head": normal(V, H, scale=0.3),
        "bias": normal(V, scale=0.1),
        "upstream": np.abs(normal(*N)) + 0.5,
        "token_weights": np.abs(normal(*N)),
        "class_weights": np.abs(normal(V)) + 0.1,
        "probabilities": np.exp(log_q).astype(np.float32),
        "teacher": teacher,
        "teacher_hidden": normal(*N, G),
        "teacher_head": normal(V, G, scale=0.4),
        "ids": ids,
        "log_q": np.take_along_axis(log_q, ids, -1).astype(np.float32),
        "advantages": normal(N[0]),
        "mask": (draw.random(N) < 0.8).astype(np.float32),
        "old_logp": logp,
        "ref_logp": logp + normal(*N, scale=0.2),
        "sampler_logp": logp + normal(*N, scale=0.1),
    }


def beside(given: str, a: dict[str, Any], is_linear: bool, words: dict[str, str]) -> Any:
    """What goes with the logits: arguments by position and by name."""
    labels = a["labels"]
    if given == "weights":
        names = {"token_weights": a["token_weights"]}
        return (labels,), names | {words["class_weights"]: a["class_weights"]}
    if given == "probabilities":
        return (a["probabilities"],), {}
    if given == "policy":
        names = {n: a[n] for n in ("mask", "old_logp", "ref_logp", "sampler_logp")}
        return (labels, a["advantages"]), names
    if given == "teacher":
        teacher = (a["teacher_hidden"], a["teacher_head"]) if is_linear else (a["teacher"],)
        return (*teacher, labels), {}
    return ((a["ids"], a["log_q"], labels) if given == "columns" else (labels,)), {}


def digest(results: list[Any]) -> str:
    found = hashlib.sha256()
    for array in results:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def torch_digests() -> Iterator[tuple[str, str]]:
    import torch

    import tileloss.torch as tl

    torch.set_num_threads(2)
    made = {name: torch.from_numpy(array) for name, array in arrays().items()}
    floats = ("x", "hidden", "head", "bias", "teacher", "teacher_hidden", "teacher_head")

    def run(case: Case, a: dict[str, Any], is_linear: bool, how: dict[str, Any]) -> list[Any]:
        function, given, options = case
        names = ("hidden", "head", "bias") if is_linear else ("x",)
        leaves = [a[name].clone().requires_grad_() for name in names]
        args, more = beside(given, a, is_linear, {"class_weights": "weight"})
        if is_linear:
            more["linear_bias"] = leaves[2]
        call: Callable[..., Any] = getattr(tl, ("linear_" if is_linear else "") + function)
        first = [leaf * 1 for leaf in leaves[:2]]
        result = call(*first, *args, **more, **options, **how)
        parts = result if isinstance(result, tuple) else (result,)
        rows = [t for p in parts for t in (p if isinstance(p, tuple) else (p,)) if t is not None]
        total = sum((t * (a["upstream"] if t.ndim else 3.0)).sum() for t in rows if t.requires_grad)
        gradients = torch.autograd.grad(total, leaves)
        found = [t.detach() for t in (*rows, *gradients)]
        return [(t.view(torch.int16) if t.element_size() == 2 else t).numpy() for t in found]

    for dtype, is_linear in itertools.product(DTYPES, (False, True)):
        a = made | {name: made[name].to(getattr(torch, dtype)) for name in floats}
        for case in cases():
            ways: list[dict[str, Any]] = [{}]
            if "logprobs" not in case[0]:
                ways.append({"grad_in_forward": True})
            if not is_linear:
                ways.append({"inplace_backward": True})
            for how in ways:
                name = f"{'linear_' * is_linear}{case[0]} {dtype} {case[1]} {case[2]} {how}"
                try:
                    yield name, digest(run(case, a, is_linear, how))
                except (TypeError, ValueError) as error:
                    yield name, f"refused: {error}"


def jax_digests(implementation: str) -> Iterator[tuple[str, str]]:
    import jax
    import jax.numpy as jnp

    import tileloss.jax as tj

    made = {name: jnp.asarray(array) for name, array in arrays().items()}
    made["head"], made["teacher_head"] = made["head"].T, made["teacher_head"].T

    def run(case: Case, is_linear: bool) -> list[Any]:
        function, given, options = case
        args, more = beside(given, made, is_linear, {"class_weights": "class_weights"})
        call: Callable[..., Any] = getattr(tj, ("linear_" if is_linear else "") + function)

        def loss(*leaves: Any) -> Any:
            found = call(*leaves, *args, **more, **options, implementation=implementation)
            parts = jax.tree.leaves(found)
            floats = [p for p in parts if jnp.issubdtype(p.dtype, jnp.floating)]
            return sum((p * (made["upstream"] if p.ndim else 3.0)).sum() for p in floats), parts

        names = ("hidden", "head") if is_linear else ("x",)
        step = jax.jit(jax.value_and_grad(loss, tuple(range(len(names))), has_aux=True))
        (_, parts), gradients = step(*(made[name] for name in names))
        return [np.asarray(x) for x in (*parts, *gradients)]

    # Each is a program that XLA compiles: of several options of one kind every third.
    for is_linear in (False, True):
        for case in itertools.islice(cases(), 0, None, 3):
            name = f"{'linear_' * is_linear}{case[0]} {case[1]} {case[2]}"
            try:
                yield name, digest(run(case, is_linear))
            except (TypeError, ValueError) as error:
                yield name, f"refused: {error}"


def child(what: str) -> int:
    found = torch_digests() if what == "torch" else jax_digests(what)
    print(json.dumps(dict(found)))
    return 0


def everything() -> dict[str, str]:
    from tileloss._core.library import lib

    runs = [
        (f"torch {isa}", "torch", {"TILELOSS_ISA": isa})
        for number, isa in enumerate(ISAS, start=1)
        if lib.tileloss_isa_supported(number)
    ]
    runs += [(f"jax {name}", name, {"JAX_PLATFORMS": "cpu"}) for name in ("cpu", "xla")]
    found: dict[str, str] = {}
    for title, what, environment in runs:
        command = [sys.executable, __file__, "--child", what]
        done = subprocess.run(
            command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
        )
        digests = json.loads(done.stdout)
        print(f"bits: {title}: {len(digests)} calls", file=sys.stderr, flush=True)
        found |= {f"{title}: {name}": value for name, value in digests.items()}
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bits", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    action.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options.child)
    found = everything()
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    wanted = json.loads(options.check.read_text())
    wrong = [name for name in wanted | found if wanted.get(name) != found.get(name)]
    for name in wrong:
        print(f"{name}: {wanted.get(name)} before, {found.get(name)} now")
    print(f"{len(wanted)} calls before, {len(found)} now, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
