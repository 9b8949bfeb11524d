"""The error metric of the Python tests: float64 references against what a kernel returned.

The rules are those of `tileloss gradcheck` (src/check/error_metric.h, src/check/linear_metric.h). A
component g of a gradient with reference g_ref is allowed

    budget * ulp(g_ref) + floor
    budget  float32: 4 + |z - m|, and max(|z|, |m|) more under a transform (scale, softcap, temperature);
            at the label, whose 1 - p is made of the others, their mean |z - m| if that is larger.
            bfloat16, float16: 1 = half for the one rounding, half for float32's arithmetic, or what that
            costs if it is more.
    floor   float32's budget * 2^-24 (sum of |terms| - |g_ref|), for cancellation, what the errors of
            a row's coefficients bring, 2^-48 of the row's largest |g_ref|, 2^-126 max(1, scale).

The label's column and all others are judged apart, and each row by its norm: there with half an ULP and
float32's arithmetic only, so that a store that truncates fails. Rows that are ignored must be exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle import Gradient, SoftmaxRows

EXP_RANGE = 104.0  # exp(-104) is 0 in float32
IDEAL_FACTOR = 1.5  # of the ideal implementation's error, with the LM head
CAP = 1.5  # c of a row's cap: 0.95 was measured at worst
MANY_TERMS = 64  # sums of fewer terms of equal size have luck in their rounding


@dataclass(frozen=True)
class Format:
    """mantissa_bits without the hidden one; smallest_normal; smallest_step between subnormals."""

    mantissa_bits: int
    smallest_normal: float

    @property
    def smallest_step(self) -> float:
        return self.smallest_normal * 2.0**-self.mantissa_bits


FORMATS = {
    torch.float32: Format(23, 2.0**-126),
    torch.bfloat16: Format(7, 2.0**-126),
    torch.float16: Format(10, 2.0**-14),
}


def binade(x: Tensor) -> Tensor:
    """2^floor(log2 |x|), 0 for 0."""
    _, exponent = torch.frexp(x)
    return torch.where(x == 0, torch.zeros_like(x), torch.ldexp(torch.ones_like(x), exponent - 1))


def float32_budget(distance: Tensor, rows: SoftmaxRows) -> Tensor:
    """In ULP, of a column `distance` below its row's maximum."""
    distance = distance.clamp(max=EXP_RANGE)
    if rows.transform.is_identity:
        return 4 + distance
    top = rows.max[:, None]
    return 4 + distance + torch.maximum((top - distance).abs(), top.abs())


def worst(errors: Tensor, allowed: Tensor) -> float:
    """max |error| / allowed: passes if at most 1. 0 for nothing."""
    if errors.numel() == 0:
        return 0.0
    used = torch.where(errors == 0, torch.zeros_like(errors), errors.abs() / allowed)
    return used.max().item() if not used.isnan().any() else float("inf")


def judge_dlogits(output: Tensor, rows: SoftmaxRows, reference: Gradient) -> dict[str, float]:
    """Figures that pass if at most 1. output [n, V] in its own dtype: the rows in use."""
    form = FORMATS[output.dtype]
    value, expected = output.double(), reference.gradient
    label = torch.nn.functional.one_hot(rows.labels, expected.shape[1]).bool()
    budget = float32_budget(rows.max[:, None] - rows.z, rows)
    others = float32_budget(rows.others_distance[:, None], rows).expand_as(budget)
    budget = torch.where(label, torch.maximum(budget, others), budget)

    power = binade(expected)
    ulp = (power * 2.0**-form.mantissa_bits).clamp(min=form.smallest_step)
    rounding = 0.0 * ulp if output.dtype == torch.float32 else 0.5 * ulp
    arithmetic = budget * (power * 2.0**-23).clamp(min=2.0**-149)
    cancelled = (reference.magnitude - expected.abs()).clamp(min=0)
    floor = budget * 2.0**-24 * cancelled + reference.blur
    floor += 2.0**-48 * expected.abs().amax(-1, keepdim=True)
    floor += 2.0**-126 * reference.scale.clamp(min=1)[:, None]

    error = value - expected
    allowed = rounding + torch.maximum(rounding, arithmetic) + floor
    tight = (rounding + arithmetic + floor).square()
    off = error.masked_fill(label, 0)
    return {
        "label": worst(error[label], allowed[label]),
        "off label": worst(off, allowed),
        "row norm": worst(error.norm(dim=-1), tight.sum(-1).sqrt()),
        "row norm off label": worst(off.norm(dim=-1), tight.masked_fill(label, 0).sum(-1).sqrt()),
    }


def judge_values(output: Tensor, reference: Tensor, magnitude: Tensor) -> float:
    """Losses and row outputs, float32: error over 2^-18 |ref| + 2^-22 magnitude. Passes if at most 1.

    magnitude: the size of the terms that cancel in the reference.
    """
    assert output.dtype == torch.float32, output.dtype
    assert output.shape == reference.shape, (output.shape, reference.shape)
    allowed = 2.0**-18 * reference.abs() + 2.0**-22 * magnitude + 2.0**-126
    return worst(output.double() - reference, allowed)


def assert_passes(figures: dict[str, float]) -> None:
    failed = {name: value for name, value in figures.items() if not value <= 1}
    assert not failed, f"in multiples of what is allowed: {failed}"


# -------------------------------------------------------------------------------------- with the LM head


@dataclass(frozen=True)
class LinearCase:
    """float64 operands of the rows in use: hidden [n, H], head [V, H], bias [V] or None; how the
    dlogits are rounded (the compute dtype); the softmax of their logits and the gradient by these."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    compute: torch.dtype
    rows: SoftmaxRows
    dlogits: Gradient

    def logit_errors(self) -> Tensor:
        """What float32 may get wrong in each logit x, [n, V]: in float32's products 2^-24 sqrt(H) of the
        spread of its terms and of |x|, which the partial sums reach where it is far from 0."""
        if self.compute == torch.float32:
            spread = (self.hidden.square() @ self.head.square().T).sqrt()
            size = self.hidden.shape[1] ** 0.5 * (spread + self.rows.x.abs())
        else:
            size = self.hidden.norm(dim=-1)[:, None] * self.head.norm(dim=-1)
        size = size + self.rows.x.abs()
        return 2.0**-24 * (size if self.bias is None else size + 2 * self.bias.abs())

    def output_error(self) -> Tensor:
        """The same bound for row outputs, in z, [n]: 2^-24 sqrt(H) ||hidden_i|| max ||head_j||."""
        most = self.head.norm(dim=-1).max()
        size = self.hidden.shape[1] ** 0.5 * self.hidden.norm(dim=-1) * most
        if self.bias is not None:
            size = size + 2 * self.bias.abs().max()
        return 2.0**-24 * size * self.rows.transform.largest_slope


@dataclass(frozen=True)
class Share:
    """Of float32's errors in the dlogits: `own`, each independent of the others, and `common` to a row."""

    own: Tensor
    common: Tensor


def float32_share(case: LinearCase) -> Share:
    rows, magnitude = case.rows, case.dlogits.magnitude
    errors = case.logit_errors()
    distance = (rows.max[:, None] - rows.z).clamp(max=EXP_RANGE)
    budget = 8 + 2 * distance
    sensitivity = rows.slope.abs().expand_as(errors)
    if not rows.transform.is_identity:
        budget = budget + 2 * torch.maximum(rows.z.abs(), rows.max[:, None].abs())
    if rows.transform.softcap > 0:
        sensitivity = sensitivity + 2 * rows.transform.logit_scale / rows.transform.softcap
    mean_error = (rows.p * rows.slope.abs() * errors).sum(-1, keepdim=True)
    own = magnitude * (2.0**-24 * budget + sensitivity * errors)
    own += 2.0**-126 * case.dlogits.scale.clamp(min=1)[:, None]
    common = (2.0**-21 + 2 * mean_error) * magnitude + case.dlogits.blur
    return Share(own, common)


def judge_product(
    output: Tensor, left: Tensor, operand: Tensor | None, share: Share, compute: torch.dtype
) -> dict[str, float]:
    """output [r, H] against left [r, t] @ operand [t, H]; operand None: the sum over t, output [r].

    Frobenius: at most 1.5 times the error of the ideal, which rounds each dlogit once to `compute` and
    the result once, is exact otherwise; or float32's share. Each row: c u ||left|| max ||operand||.
    """
    form = FORMATS[output.dtype]
    factor = torch.ones(left.shape[1], 1, dtype=torch.float64) if operand is None else operand
    size = factor.norm(dim=-1) if operand is not None else torch.ones(left.shape[1]).double()
    value = output.double().reshape(left.shape[0], -1)
    expected = left @ factor
    ideal = (left.to(compute).double() @ factor).to(output.dtype).double()

    error, ideal_error = (value - expected).norm(dim=-1), (ideal - expected).norm(dim=-1)
    weighted = (left.square() @ size.square()).sqrt()
    own = (share.own.square() @ size.square()).sqrt()
    share_of_row = own + share.common @ size
    share_of_row += 2.0**-24 * left.shape[1] ** 0.5 * (weighted + expected.norm(dim=-1))
    unit = 2.0**-24 if compute == torch.float32 else 2.0**-8
    if compute == torch.float16:
        unit = 2.0**-11
    if operand is None:
        cap = unit * left.abs().sum(-1)
    else:
        cap = CAP * unit * left.norm(dim=-1) * size.max()
    stored = expected.abs().clamp(min=form.smallest_normal).norm(dim=-1)
    cap = torch.maximum(cap, IDEAL_FACTOR * ideal_error) + share_of_row
    cap = cap + 2.0 ** -(form.mantissa_bits + 1) * stored
    figures = {"cap": worst(error, cap)}
    terms = (left * size).square()
    if terms.sum() ** 2 >= MANY_TERMS * terms.square().sum():
        allowed = torch.maximum(IDEAL_FACTOR * ideal_error.norm(), share_of_row.norm())
        figures["frobenius"] = worst(error.norm()[None], allowed[None])
    return figures


def judge_linear(
    case: LinearCase, dhidden: Tensor | None, dhead: Tensor | None, dbias: Tensor | None
) -> dict[str, float]:
    """Figures that pass if at most 1, of the gradients given: dhidden [n, H] of the rows in use."""
    share = float32_share(case)
    turned = Share(share.own.T, share.common.T)
    dlogits = case.dlogits.gradient
    figures: dict[str, float] = {}
    for name, output, left, operand, part in (
        ("dhidden", dhidden, dlogits, case.head, share),
        ("dhead", dhead, dlogits.T, case.hidden, turned),
        ("dbias", dbias, dlogits.T, None, turned),
    ):
        if output is not None:
            judged = judge_product(output, left, operand, part, case.compute)
            figures |= {f"{name} {figure}": value for figure, value in judged.items()}
    return figures
