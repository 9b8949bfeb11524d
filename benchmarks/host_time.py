#!/usr/bin/env python3
"""What a step costs on the host: forward and backward of each function at a size where nothing else does, [8, 512] float32 on one
thread, beside torch's own cross_entropy; of JAX jitted, beside plain JAX's.

The contestants take turns, so that all see the same clock. Prints a Markdown table: a low percentile and the median of each, in
microseconds, and the first one's ratio to the reference.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["TILELOSS_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
Step = Callable[[], Any]
LOW = 0.02  # others on the machine only ever add time


def through_torch() -> list[dict[str, Step]]:
    """Races, of which the first is the reference."""
    import torch
    import torch.nn.functional as F

    from tileloss import torch as tl

    torch.set_num_threads(1)
    x, y = torch.randn(8, 512, requires_grad=True), torch.randint(512, (8,))
    hidden, head = torch.randn(8, 64, requires_grad=True), torch.randn(512, 64, requires_grad=True)
    batch, tokens = x.detach().view(2, 4, 512).requires_grad_(), y.view(2, 4)
    old, advantages, teacher = torch.randn(2, 4), torch.randn(2), torch.randn(8, 512)

    def step(loss: Step, *leaves: torch.Tensor) -> Step:
        def run() -> None:
            for leaf in leaves:
                leaf.grad = None
            loss().backward()

        return run

    def policy() -> Any:
        return tl.policy_loss(batch, tokens, advantages, old_logp=old, preset="grpo")

    def of_logits(loss: Step) -> dict[str, Step]:
        return {"F.cross_entropy": step(lambda: F.cross_entropy(x, y), x), "": step(loss, x)}

    def of_head() -> Any:
        return F.cross_entropy(F.linear(hidden, head), y)

    named: dict[str, dict[str, Step]] = {
        "cross_entropy": of_logits(lambda: tl.cross_entropy(x, y)),
        "cross_entropy, grad_in_forward": of_logits(
            lambda: tl.cross_entropy(x, y, grad_in_forward=True)
        ),
        "logprobs(...).logp.sum()": of_logits(lambda: tl.logprobs(x, y).logp.sum()),  # type: ignore[union-attr]
        "policy_loss, grpo": of_logits(lambda: None) | {"": step(policy, batch)},
        "distillation": of_logits(lambda: tl.distillation(x, teacher)),
        "linear_cross_entropy": {
            "F.cross_entropy(F.linear)": step(of_head, hidden, head),
            "": step(lambda: tl.linear_cross_entropy(hidden, head, y), hidden, head),
        },
    }
    return [{name or key: s for name, s in race.items()} for key, race in named.items()]


def through_jax() -> list[dict[str, Step]]:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    from tileloss import jax as tl

    x, y = jax.random.normal(jax.random.key(0), (8, 512)), jnp.arange(8)

    def plain(x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()

    def step(loss: Any) -> Step:
        both = jax.jit(jax.value_and_grad(loss))
        return lambda: jax.block_until_ready(both(x, y))

    return [{"plain JAX, jitted": step(plain), "cross_entropy, jitted": step(tl.cross_entropy)}]


def race(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Sorted microseconds of each, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 200):
        for name, step in steps.items():
            begin = time.perf_counter_ns()
            step()
            if number >= 200:
                times[name].append((time.perf_counter_ns() - begin) / 1000)
    return {name: sorted(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--frontend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--rounds", type=int, default=3000)
    options = parser.parse_args()
    print("| step | us | median | beside | us | median | ratio |")
    print("|---|---|---|---|---|---|---|")
    for steps in through_torch() if options.frontend == "torch" else through_jax():
        (reference, other), (theirs, ours) = steps, race(steps, options.rounds).values()
        low, middle = int(LOW * len(ours)), len(ours) // 2
        print(
            f"| {other} | {ours[low]:.0f} | {ours[middle]:.0f} | {reference} | {theirs[low]:.0f} | {theirs[middle]:.0f} | "
            f"{ours[low] / theirs[low]:.2f} |"
        )


if __name__ == "__main__":
    main()
