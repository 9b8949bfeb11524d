#!/usr/bin/env python3
"""The first calls on a GPU: cross-entropy, GRPO and cross-entropy with the LM head, values and gradients against torch in
float64. Prints relative errors; exit code 1 where one is too large, 3 without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tileloss import torch as tl

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
N, V, H, LENGTH = 64, 4099, 256, 16
# Of a gradient in the Frobenius norm: half an ULP of bfloat16 an element, with the LM head two roundings. TF32: 3e-4.
BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def logp_of(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def grpo(logits: Tensor, labels: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio, a = (logp_of(logits, labels) - old).exp(), advantages[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean(1).mean()


def compare(
    name: str, ours: Callable[..., Tensor], exact: Callable[..., Tensor], leaves: list[Tensor]
) -> bool:
    dtype = leaves[0].dtype
    mine = [x.clone().requires_grad_() for x in leaves]
    wide = [x.double().requires_grad_() for x in leaves]
    found, expected = ours(*mine), exact(*wide)
    gradients = zip(
        torch.autograd.grad(found, mine), torch.autograd.grad(expected, wide), strict=True
    )
    loss = relative(found.detach(), expected.detach())
    errors = [relative(a, b) for a, b in gradients]
    is_right = loss < 1e-5 and max(errors) < BOUNDS[dtype]
    told = ", ".join(f"{error:.1e}" for error in errors)
    print("right" if is_right else "WRONG", f"{name} {dtype}: loss {loss:.1e}, gradients {told}")
    return is_right


def calls(dtype: torch.dtype) -> Iterator[bool]:
    labels = torch.randint(0, V, (N,), device=DEVICE)
    x = torch.randn(N, V, device=DEVICE).to(dtype)
    yield compare(
        "cross_entropy",
        lambda x: tl.cross_entropy(x, labels),
        lambda x: F.cross_entropy(x, labels),
        [x],
    )
    x, labels = x.view(-1, LENGTH, V), labels.view(-1, LENGTH)
    old = logp_of(x.double(), labels).float() + 0.1 * torch.randn(labels.shape, device=DEVICE)
    advantages = torch.linspace(-1, 2, N // LENGTH, device=DEVICE)
    yield compare(
        "policy_loss, grpo",
        lambda x: tl.policy_loss(x, labels, advantages, old_logp=old, preset="grpo"),
        lambda x: grpo(x, labels, old, advantages),
        [x],
    )
    hidden, head = (torch.randn(n, H, device=DEVICE).to(dtype) for n in (N, V))
    yield compare(
        "linear_cross_entropy",
        lambda h, w: tl.linear_cross_entropy(h, w, labels.flatten()),
        lambda h, w: F.cross_entropy(h @ w.T, labels.flatten()),
        [hidden / H**0.5, head],
    )
    tl.check_errors(DEVICE)


def main() -> int:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("no device: torch sees no GPU")
        return 3
    torch.manual_seed(0)
    return 0 if all([is_right for dtype in BOUNDS for is_right in calls(dtype)]) else 1


if __name__ == "__main__":
    sys.exit(main())
