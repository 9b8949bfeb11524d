#!/usr/bin/env python3
"""What holds for every row on a GPU, at sizes that the suites do not have: a row's bits whatever the other rows are, from logits
and with the LM head; the same bits of one pass and of two; a float32 head that is not TF32; 5e9 logits in place.
Prints a line each; exit code 1 where something does not hold, 3 without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from tileloss import torch as tl

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
IS_SMALL = DEVICE != "cuda"  # to try this program itself
V, H = (1003, 64) if IS_SMALL else (151936, 1536)
COUNTS = (1, 7, 100) if IS_SMALL else (1, 7, 1000, 8192)
MANY_ROWS = 300 if IS_SMALL else 32768


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def of_rows(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    loss = tl.cross_entropy(leaf, labels, reduction="none")
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def of_head_rows(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = hidden.detach().requires_grad_()
    loss = tl.linear_cross_entropy(leaf, head, labels, reduction="none")
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def other_rows() -> Iterator[tuple[str, bool]]:
    x, labels = normal(max(COUNTS), V), torch.randint(0, V, (max(COUNTS),), device=DEVICE)
    hidden, head = normal(max(COUNTS), H), normal(V, H) / H**0.5
    all_rows, all_head_rows = of_rows(x, labels), of_head_rows(hidden, head, labels)
    for count in COUNTS[:-1]:
        some = of_rows(x[:count], labels[:count])
        yield (
            f"{count} rows from logits, loss and gradient",
            all(torch.equal(a, b[:count]) for a, b in zip(some, all_rows, strict=True)),
        )
        found = of_head_rows(hidden[:count], head, labels[:count])
        for what, a, b in zip(("loss", "dhidden"), found, all_head_rows, strict=True):
            yield f"{count} rows with the head, {what}", torch.equal(a, b[:count])


def one_pass_and_two() -> Iterator[tuple[str, bool]]:
    for dtype in (torch.bfloat16, torch.float32):
        x, labels = normal(64, V, dtype=dtype), torch.randint(0, V, (64,), device=DEVICE)
        found = []
        for in_forward in (True, False):
            leaf = x.clone().requires_grad_()
            loss = tl.cross_entropy(leaf, labels, reduction="sum", grad_in_forward=in_forward)
            found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
        yield (
            f"one pass and two, {dtype}",
            all(torch.equal(a, b) for a, b in zip(*found, strict=True)),
        )


def float32_head() -> Iterator[tuple[str, bool]]:
    """TF32 would be off by 3e-4; sums of 4096 products in float32, in any order, by 1.2e-6 on an H100."""
    hidden, head = (
        normal(256, 512, dtype=torch.float32),
        normal(4096, 512, dtype=torch.float32) / 512**0.5,
    )
    labels = torch.randint(0, 4096, (256,), device=DEVICE)
    leaves = [x.clone().requires_grad_() for x in (hidden, head)]
    wide = [x.double().requires_grad_() for x in (hidden, head)]
    loss = tl.linear_cross_entropy(*leaves, labels)
    exact = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, labels)
    loss.backward(), exact.backward()
    errors = [float((loss - exact).detach().abs() / exact.detach())]
    errors += [
        float((x.grad - y.grad).norm() / y.grad.norm()) for x, y in zip(leaves, wide, strict=True)
    ]  # type: ignore[operator, union-attr]
    yield (
        f"a float32 head: {', '.join(f'{e:.1e}' for e in errors)}, at most 4e-6",
        max(errors) < 4e-6,
    )


def many_logits() -> Iterator[tuple[str, bool]]:
    x = torch.empty(MANY_ROWS, V, device=DEVICE, dtype=torch.bfloat16).normal_()
    labels = torch.randint(0, V, (MANY_ROWS,), device=DEVICE)
    looked_at = torch.tensor([0, MANY_ROWS // 2, MANY_ROWS - 1], device=DEVICE)
    wide = x[looked_at].double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(wide, labels[looked_at], reduction="sum") / MANY_ROWS
    exact.backward()
    assert wide.grad is not None
    leaf = x.requires_grad_()
    loss = tl.cross_entropy(leaf, labels, inplace_backward=True)
    (gradient,) = torch.autograd.grad(loss, leaf)
    error = float((gradient[looked_at].double() - wide.grad).norm() / wide.grad.norm())
    yield f"{x.numel():.1e} logits in place: {error:.1e}, at most 2^-8", error < 2**-8


def main() -> int:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("no device: torch sees no GPU")
        return 3
    are_right = []
    for part in (one_pass_and_two, float32_head, other_rows, many_logits):
        torch.manual_seed(0)
        for what, is_right in part():
            print("right" if is_right else "WRONG", what)
            are_right.append(is_right)
        tl.check_errors(DEVICE)
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main())
