"""Runs a function of tileloss.torch, forward and backward, and holds all that it gives against definitions.py.

How exact the kernels are is what the C++ suites and `tileloss judge` say. Here an argument that goes astray has to show, and one
rounding too many: float32 to some units in the last place, a narrower type to its one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import definitions
from tileloss import torch as tl

View = Callable[[Tensor], Tensor]
Leaves = Sequence[Tensor | None]
Found = dict[str, Tensor]
# Of float32's arithmetic, in a component and in the norm of all.
RELATIVE, WHOLE = 4e-5, 5e-6
# A weight that is e to a sum over a sequence.
VESPO = {"whole": 4e-5}
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MODES = ("grad_in_forward", "inplace_backward", "workspace_bytes")


def as_is(x: Tensor) -> Tensor:
    return x


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def wide(x: Any) -> Any:
    return x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x


def named(result: Any) -> Found:
    """What a function of tileloss.torch or definitions.py gives, by name."""
    if isinstance(result, Tensor):
        return {"loss": result}
    if not isinstance(result, tl.RowOutputs):
        loss, rows = result
        return {"loss": loss} | named_rows(rows)
    return named_rows(result)


def named_rows(rows: Any) -> Found:
    return {name: x for name, x in rows._asdict().items() if x is not None}


class Exact(NamedTuple):
    """In float64: the outputs, the gradients of the leaves, the logits with theirs, and the operands of a head."""

    outputs: Found
    gradients: list[Tensor | None]
    logits: Tensor
    operands: list[Tensor]


def solve(
    name: str,
    leaves: Leaves,
    *args: Any,
    upstream: Tensor | dict[str, Tensor] | None = None,
    view: View = as_is,
    **options: Any,
) -> Exact:
    """``leaves``: logits, or hidden states, head and bias or None, of which the function is given ``view`` of the first;
    ``upstream``: the gradient of the loss, or by name those of the outputs."""
    exact = [None if x is None else wide(x).requires_grad_() for x in leaves]
    operands = [view(exact[0]), *(x for x in exact[1:] if x is not None)]
    logits = F.linear(*operands) if name.startswith("linear_") else operands[0] * 1
    logits.retain_grad()
    args = tuple(map(wide, args))
    options = {n: wide(x) for n, x in options.items() if n not in MODES and x is not None}
    if name == "linear_distillation":
        args = (F.linear(*args[:2], options.pop("teacher_bias", None)), *args[2:])
    found = named(getattr(definitions, name.removeprefix("linear_"))(logits, *args, **options))
    backward(found, upstream)
    gradients = [None if x is None else x.grad for x in exact]
    return Exact({n: x.detach() for n, x in found.items()}, gradients, logits, operands)


def backward(found: Found, upstream: Tensor | dict[str, Tensor] | None) -> None:
    if not isinstance(upstream, dict):
        upstream = {next(iter(found)): torch.ones(()) if upstream is None else upstream}
    pairs = [(found[name], grad.to(found[name].dtype)) for name, grad in upstream.items()]
    torch.autograd.backward([x for x, _ in pairs], [g.expand(x.shape) for x, g in pairs])


def check(
    name: str,
    leaves: Tensor | Leaves,
    *args: Any,
    upstream: Tensor | dict[str, Tensor] | None = None,
    view: View = as_is,
    relative: float = RELATIVE,
    whole: float = WHOLE,
    **options: Any,
) -> Found:
    """What the function of tileloss.torch gives, once it was compared with `solve` of the same arguments."""
    leaves = [leaves] if isinstance(leaves, Tensor) else list(leaves)
    operands = (view(leaves[0]), *leaves[1:2])
    bias = {"linear_bias": leaves[2]} if len(leaves) > 2 and leaves[2] is not None else {}
    found = named(getattr(tl, name)(*operands, *args, **bias, **options))
    backward(found, upstream)
    exact = solve(name, leaves, *args, upstream=upstream, view=view, **options)
    hold_outputs(found, exact)
    for x in leaves:
        assert x is None or (x.grad is not None) == x.requires_grad
    both = all(x.dtype == torch.bfloat16 for x in leaves[:2] if x is not None)
    compute = torch.bfloat16 if both else torch.float32
    gradients = [None if x is None else x.grad for x in leaves]
    hold_gradients(gradients, exact, compute, view, relative, whole)
    return found


def hold_outputs(found: Found, exact: Exact) -> None:
    assert found.keys() == exact.outputs.keys()
    slack = logit_error(exact)
    # Of what is read: rows and columns that are not may hold NaN or inf.
    read = exact.logits.detach().nan_to_num(0.0, 0.0, 0.0)
    size = float(read.abs().max()) + 1 if read.numel() else 1.0
    for name, value in found.items():
        right = exact.outputs[name]
        assert value.shape == right.shape, name
        if not right.is_floating_point():
            assert torch.equal(value, right), name
            continue
        assert value.dtype == torch.float32, name
        # A confident row's logp has digits of its own, however small it is.
        small = right.abs().clamp(max=1) if name == "logp" else 1.0
        allowed = 2.0**-18 * right.abs() + (2.0**-21 * small + slack) * size
        # 0: of a row that is not in use, or next to it in float64.
        assert_within(value.detach(), right, allowed.where(right != 0, 2.0**-50 * size), name)


def logit_error(exact: Exact) -> float:
    """What float32's sums may put a logit of a head off."""
    if len(exact.operands) < 2:
        return 0.0
    hidden, head, *_ = exact.operands
    return 2.0**-22 * float((hidden.detach().abs() @ head.detach().abs().T).max())


def hold_gradients(
    gradients: Leaves,
    exact: Exact,
    compute: torch.dtype = torch.float32,
    view: View = as_is,
    relative: float = RELATIVE,
    whole: float = WHOLE,
) -> None:
    """``compute``: what the products with a head see."""
    (first, *others), (right, *_) = gradients, exact.gradients
    if first is not None and right is not None:
        assert not first[(right == 0).all(-1)].any(), "a row not in use has a gradient"
        first, right = view(first), view(right)
    if len(exact.operands) == 1:
        hold_dlogits(first, right, relative, whole)
        return
    hidden, head = (x.detach().reshape(-1, x.shape[-1]) for x in exact.operands[:2])
    dlogits = exact.logits.grad.reshape(-1, len(head))
    slack = logit_error(exact)
    factors = ((dlogits, head), (dlogits.T, hidden), (dlogits.T, None))
    expected = (right, *exact.gradients[1:])
    for gradient, right, (terms, factor) in zip((first, *others), expected, factors, strict=False):
        if gradient is not None:
            hold_product(gradient, right, terms, factor, compute, relative + slack, whole + slack)


def hold_dlogits(
    gradient: Tensor, right: Tensor, relative: float = RELATIVE, whole: float = WHOLE
) -> None:
    """Each component to its rounding, and to what float32 makes of the terms that it is the difference of; the whole to at most
    1.5 times the error of one rounding, or to float32's ``whole``."""
    kind = torch.finfo(gradient.dtype)
    # As large as the terms: the largest of the row, but for the largest itself, a label's next to many small ones, the second.
    size, top = right.abs().max(-1, keepdim=True)
    others = right.abs().scatter(-1, top, 0.0).amax(-1, keepdim=True)
    sizes = others.expand_as(right).scatter(-1, top, size)
    allowed = (relative + ROUNDING[gradient.dtype]) * right.abs() + 2.0**-22 * sizes
    allowed += 2.0**-50 * right.abs().max() + max(2.0**-126, kind.smallest_normal * kind.eps / 2)
    assert_within(gradient, right, allowed)
    once = (right.to(gradient.dtype).double() - right).norm()
    error = (gradient.double() - right).norm()
    assert_within(error, 0, torch.maximum(1.5 * once, whole * right.norm()), "the whole gradient")


def hold_product(
    gradient: Tensor,
    right: Tensor,
    terms: Tensor,
    factor: Tensor | None,
    compute: torch.dtype,
    relative: float,
    whole: float,
) -> None:
    """right = terms @ factor, or the terms' sums. The whole is at most 1.5 times as far off as if each term was rounded once to
    ``compute`` and each result once, or float32's errors ``whole`` of a term; a row no more than its terms' roundings, its own
    and float32's errors ``relative`` make it."""
    factor = torch.ones(terms.shape[1], 1).double() if factor is None else factor
    value, right = (x.reshape(len(terms), -1).double() for x in (gradient, right))
    ideal = (terms.to(compute).double() @ factor).to(gradient.dtype).double() - right
    length = factor.norm(dim=-1)
    # A term is a difference of terms, whose size is not known here: of an average one.
    float32 = relative * ((terms.abs() + terms.abs().mean()) @ length)
    store = ROUNDING[gradient.dtype] * right.norm(dim=-1)
    rounded = 1.5 * ROUNDING[compute] * terms.norm(dim=-1) * length.max()
    error, least = (value - right).norm(dim=-1), 1.5 * ideal.norm(dim=-1)
    assert_within(error, 0, torch.maximum(rounded, least) + float32 + store, "a gradient's row")
    float32 = whole * (terms.abs() @ length)
    squares = (terms * length).square()
    if squares.sum() ** 2 < 64 * squares.square().sum():
        float32 += store  # sums of few terms have luck in their rounding
    allowed = torch.maximum(least.norm(), float32.norm())
    assert_within(error.norm(), 0, allowed, "the whole gradient")


def assert_within(
    value: Tensor, right: Tensor | float, allowed: Tensor, name: str = "a gradient"
) -> None:
    right = torch.as_tensor(right, dtype=torch.float64).expand(value.shape)
    assert torch.equal(value.isnan(), right.isnan()), f"{name} has NaN elsewhere than expected"
    error = (value.double() - right).abs().where(value != right, 0)
    times = error.div(allowed).where(error > 0, 0).max() if error.numel() else 0
    assert times <= 1, f"{name} is off by {times} times what is allowed"
