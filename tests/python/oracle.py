"""The losses in float64, from their definitions: what the Python tests compare with.

A loss is a plain torch function of a row's outputs (log p of the label, lse, entropy, sum_j c_j log p_j);
autograd gives its derivatives by these, and dL/dz follows by the chain rule written out, since that also
tells how large the terms are that make up each component. test_metric.py holds the whole against
torch.nn.functional in float64 and autograd from end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transform:
    """z = softcap(logit_scale * x) / temperature."""

    logit_scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0

    @property
    def is_identity(self) -> bool:
        return self == IDENTITY

    @property
    def largest_slope(self) -> float:
        return self.logit_scale / self.temperature

    def apply(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z and dz/dx."""
        u = self.logit_scale * x
        slope = torch.full_like(x, self.largest_slope)
        if self.softcap > 0:
            tanh = torch.tanh(u / self.softcap)
            u, slope = self.softcap * tanh, slope * (1 - tanh.square())
        return u / self.temperature, slope


IDENTITY = Transform()


@dataclass(frozen=True)
class SoftmaxRows:
    """Of n rows, float64: x, z, slope = dz/dx, p, log_p [n, V]; labels and the rest [n]."""

    transform: Transform
    labels: Tensor
    x: Tensor
    z: Tensor
    slope: Tensor
    max: Tensor
    log_sum: Tensor  # log sum exp(z - max)
    p: Tensor
    log_p: Tensor
    logp: Tensor  # of the label
    others: Tensor  # 1 - p of the label, from the others' sum
    entropy: Tensor

    @property
    def lse(self) -> Tensor:
        return self.max + self.log_sum

    @property
    def others_distance(self) -> Tensor:
        """The mean of max - z over all columns but the label, weighted by p."""
        distance = (self.p * (self.max[:, None] - self.z)).scatter(1, self.labels[:, None], 0.0)
        return torch.where(self.others > 0, distance.sum(-1) / self.others, 0.0)


def softmax_rows(x: Tensor, labels: Tensor, transform: Transform = IDENTITY) -> SoftmaxRows:
    """x [n, V] float64, labels [n]. 1 - p and log p of a confident label keep all their digits."""
    z, slope = transform.apply(x)
    top = z.amax(-1)
    exps = torch.exp(z - top[:, None])
    index = labels[:, None]
    others = exps.scatter(1, index, 0.0).sum(-1)
    own = exps.gather(1, index)[:, 0]
    total = others + own
    log_sum = torch.where(own == 1, torch.log1p(others), torch.log(total))
    p, log_p = exps / total[:, None], z - top[:, None] - log_sum[:, None]
    return SoftmaxRows(
        transform, labels, x, z, slope, top, log_sum, p, log_p,
        logp=log_p.gather(1, index)[:, 0],
        others=others / total,
        entropy=log_sum + (p * (top[:, None] - z)).sum(-1),
    )  # fmt: skip


@dataclass(frozen=True)
class RowValues:
    """What losses are functions of, each [n]. smooth = sum_j c_j log p_j."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor
    smooth: Tensor


@dataclass(frozen=True)
class Gradient:
    """dL/dx [n, V]; magnitude: the sum of its terms' absolute values; blur: what errors of the row's
    coefficients may add; scale [n]: the largest factor of a probability."""

    gradient: Tensor
    magnitude: Tensor
    blur: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Answer:
    """loss: 0-d or [n]; magnitude, of its shape: what float32 may lose (metric.judge_values)."""

    loss: Tensor
    magnitude: Tensor
    dlogits: Gradient


LossOfRows = Callable[[RowValues], Tensor]


def row_values(rows: SoftmaxRows, class_weights: Tensor) -> RowValues:
    weighted = torch.where(class_weights == 0, 0.0, class_weights * rows.log_p)
    return RowValues(rows.logp, rows.lse, rows.entropy, weighted.sum(-1))


def value_errors(rows: SoftmaxRows, class_weights: Tensor) -> RowValues:
    """What float32 may get wrong in each value (gradcheck's output_magnitudes and summarize)."""
    lossless = rows.transform.is_identity
    blur = torch.zeros_like(rows.max) if lossless else rows.max.abs() + 16
    label_z = rows.z.gather(1, rows.labels[:, None])[:, 0]
    size, entropy = rows.logp.abs(), rows.entropy
    small, small_entropy = size.clamp(max=1), entropy.clamp(max=1)
    flushed = 2.0**-104 * rows.z.shape[1]
    distance = 0.5 * rows.others_distance
    of_logp = flushed + distance * small
    of_entropy = 104 * flushed + distance * small_entropy
    of_entropy = of_entropy + torch.where(label_z < rows.max, 1 + blur, 0.0)
    if not lossless:
        of_logp = of_logp + (label_z.abs() + blur) * small
        of_entropy = of_entropy + 2 * blur * small_entropy
    weight = class_weights.abs().sum()
    of_smooth = weight * (rows.max.abs() + 16 if not lossless else torch.ones_like(rows.max))
    return RowValues(
        logp=2.0**-23 * (size + 2 * small) + 2.0**-22 * of_logp,
        lse=2.0**-22 * (rows.max.abs() + rows.log_sum),
        entropy=2.0**-22 * (entropy + of_entropy),
        smooth=2.0**-22 * (2 * of_smooth + (class_weights.abs() * rows.log_p.abs()).sum(-1)),
    )


def coefficients(
    loss_of: LossOfRows, values: RowValues, upstream: Tensor | None
) -> tuple[Tensor, RowValues]:
    """The loss and its derivatives by the values, times the upstream gradient."""
    leaves = [v.clone().requires_grad_() for v in vars(values).values()]
    loss = loss_of(RowValues(*leaves))
    if upstream is not None:
        upstream = upstream.reshape(loss.shape)
    grads = torch.autograd.grad(loss, leaves, upstream, allow_unused=True)
    filled = [torch.zeros_like(v) if g is None else g for g, v in zip(grads, leaves, strict=True)]
    return loss.detach(), RowValues(*filled)


def gradient_of(
    rows: SoftmaxRows, by: RowValues, class_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """gradient, magnitude [n, V] and scale [n] for the derivatives `by` of a loss."""
    label = torch.nn.functional.one_hot(rows.labels, rows.z.shape[1]).bool()
    logp_part = torch.where(label, rows.others[:, None], -rows.p)
    g_logp, g_lse, g_entropy, g_smooth = (v[:, None] for v in vars(by).values())
    total, total_size = class_weights.sum(), class_weights.abs().sum()
    log_p = torch.where(rows.p == 0, 0.0, rows.log_p)
    entropy = rows.entropy[:, None]
    gradient = g_logp * logp_part + g_lse * rows.p - g_entropy * rows.p * (log_p + entropy)
    gradient += g_smooth * (class_weights - rows.p * total)
    magnitude = g_logp.abs() * logp_part.abs() + g_lse.abs() * rows.p
    below = (~(label & (rows.z == rows.max[:, None])).any(-1, keepdim=True)).double()
    magnitude += g_entropy.abs() * rows.p * (entropy + below - log_p)
    magnitude += g_smooth.abs() * (class_weights.abs() + rows.p * total_size)
    scale = g_logp.abs() + g_lse.abs() + g_smooth.abs() * total_size
    scale = scale + g_entropy.abs() * (entropy + rows.log_sum[:, None] + 88)
    steepest = rows.slope.abs().amax(-1)
    return gradient * rows.slope, magnitude * rows.slope.abs(), scale[:, 0] * steepest


def solve(
    rows: SoftmaxRows,
    loss_of: LossOfRows,
    *,
    class_weights: Tensor | None = None,
    upstream: Tensor | None = None,
    more_errors: RowValues | None = None,
) -> Answer:
    """Loss and dL/dx. more_errors: of the values, besides those of the softmax itself (an LM head's).

    Errors of the values move the loss and its derivatives: both are evaluated with every value up and
    down by its error, all alike (errors of one sign add up in a sequence's mean) and at random.
    """
    vocab = rows.z.shape[1]
    weights = torch.ones(vocab).double() if class_weights is None else class_weights.double()
    values, errors = row_values(rows, weights), value_errors(rows, weights)
    if more_errors is not None:
        errors = RowValues(
            *(a + b for a, b in zip(vars(errors).values(), vars(more_errors).values(), strict=True))
        )
    loss, by = coefficients(loss_of, values, upstream)
    gradient, magnitude, scale = gradient_of(rows, by, weights)
    of_loss, of_by = torch.zeros_like(loss), [torch.zeros_like(v) for v in vars(by).values()]
    generator = torch.Generator().manual_seed(0)
    for pattern in range(6):
        random = torch.randint(0, 2, rows.max.shape, generator=generator) * 2 - 1
        sign = random if pattern > 1 else torch.full_like(random, 1 - 2 * pattern)
        moved = RowValues(
            *(
                v + sign * e
                for v, e in zip(vars(values).values(), vars(errors).values(), strict=True)
            )
        )
        moved_loss, moved_by = coefficients(loss_of, moved, upstream)
        of_loss = torch.maximum(of_loss, (moved_loss - loss).abs())
        of_by = [
            torch.maximum(most, (a - b).abs())
            for most, a, b in zip(of_by, vars(moved_by).values(), vars(by).values(), strict=True)
        ]
    # A handful of float32 operations between the values and the coefficients.
    of_by = [e + 2.0**-22 * v.abs() for e, v in zip(of_by, vars(by).values(), strict=True)]
    blur = gradient_of(rows, RowValues(*of_by), weights)[1]
    terms = sum(
        (v * d).abs() for v, d in zip(vars(values).values(), vars(by).values(), strict=True)
    )
    spread = sum(
        (e * d).abs() for e, d in zip(vars(errors).values(), vars(by).values(), strict=True)
    )
    if loss.dim() == 0:
        terms, spread = terms.sum(), spread.sum()
    elif upstream is not None:
        undo = torch.where(upstream == 0, 0.0, 1 / upstream.abs())
        terms, spread = terms * undo, spread * undo
    return Answer(
        loss, 2.0**22 * (of_loss + spread) + terms, Gradient(gradient, magnitude, blur, scale)
    )


# ----------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class CrossEntropy:
    """Options of cross_entropy (docs/users/losses.md), of the rows in use alone. token_weights [n]."""

    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    num_items: float | None = None

    def loss_of(
        self, labels: Tensor, class_weights: Tensor | None, vocab: int, token_weights: Tensor | None
    ) -> LossOfRows:
        c = torch.ones(vocab).double() if class_weights is None else class_weights.double()
        w = torch.ones(len(labels)).double() if token_weights is None else token_weights.double()
        smoothing = self.label_smoothing

        def loss(values: RowValues) -> Tensor:
            per_row = (1 - smoothing) * c[labels] * -values.logp
            if smoothing > 0:
                per_row = per_row - smoothing / vocab * values.smooth
            per_row, z_part = w * per_row, self.z_loss * w * values.lse.square()
            if self.reduction == "none":
                return per_row + z_part
            if self.reduction == "sum":
                return (per_row + z_part).sum()
            if self.num_items is not None:
                return (per_row + z_part).sum() / self.num_items
            return per_row.sum() / (w * c[labels]).sum() + z_part.sum() / w.sum()

        return loss


@dataclass(frozen=True)
class Policy:
    """Options of policy_loss by the names of docs/users/losses.md; [B, T] tensors, advantages [B, 1] or [B, T]."""

    kind: str = "clip"
    ratio_level: str = "token"
    aggregation: str = "seq_mean_token_mean"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    dual_clip: float | None = None
    cap_low: float | None = None
    cispo_cap: str = "raw"
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    beta: float = 0.0
    kl_importance: bool = False
    num_items: float | None = None
    max_length: int | None = None

    def per_token(
        self,
        logp: Tensor,
        old: Tensor,
        advantages: Tensor,
        mask: Tensor,
        sampler_ratio: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """l, times the sampler's ratio, and rho."""
        log_ratio = logp - old
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        if self.ratio_level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1, keepdim=True) / count).expand_as(logp)
        rho = torch.exp(log_ratio)
        if self.kind == "clip":
            first = rho if self.delta is None else rho.clamp(max=self.delta)
            clipped = rho.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            loss = -torch.minimum(first * advantages, clipped * advantages)
            if self.dual_clip is not None:
                loss = torch.where(advantages < 0, loss.minimum(-self.dual_clip * advantages), loss)
        elif self.kind == "cispo":
            cap = self.epsilon_high + (1 if self.cispo_cap == "one_plus" else 0)
            loss = -rho.clamp(min=self.cap_low, max=cap).detach() * advantages * logp
        elif self.kind == "sapo":
            tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
            loss = -4 / tau * torch.sigmoid(tau * (rho - 1)) * advantages
        else:
            loss = -self.phi(logp - old, advantages, mask, sampler_ratio) * advantages * logp
        if sampler_ratio is not None and self.kind != "vespo":
            loss = loss * sampler_ratio
        return loss, rho

    def phi(
        self, log_ratio: Tensor, advantages: Tensor, mask: Tensor, sampler_ratio: Tensor | None
    ) -> Tensor:
        """vespo's weight, detached, [B, 1] or [B, T]."""
        low = torch.log(torch.tensor(1e-8, dtype=torch.float64)).item()
        log_w = (mask * log_ratio.detach().clamp(-20, 20)).sum(-1, keepdim=True)
        if sampler_ratio is not None:
            log_w = log_w + (mask * sampler_ratio.log().clamp(low, 20)).sum(-1, keepdim=True)
        log_w = log_w.clamp(low, 20)
        k = torch.where(advantages >= 0, 2.0, 3.0).double()
        rate = torch.where(advantages >= 0, 3.0, 2.0).double()
        return torch.exp(rate + k * log_w - rate * log_w.exp())

    def aggregate(self, loss: Tensor, mask: Tensor) -> Tensor:
        per_sequence, count = (loss * mask).sum(-1), mask.sum(-1)
        if self.aggregation == "seq_mean_token_mean":
            return (per_sequence / count.clamp(min=1)).mean()
        if self.aggregation == "token_mean":
            return per_sequence.sum() / (self.num_items or count.sum().clamp(min=1))
        if self.aggregation == "seq_mean_token_sum_norm":
            return per_sequence.sum() / (len(loss) * (self.max_length or loss.shape[1]))
        if self.aggregation == "seq_mean_token_sum":
            return per_sequence.mean()
        assert self.aggregation == "none", self.aggregation
        return loss * mask

    def loss_of(
        self,
        mask: Tensor,
        advantages: Tensor,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
        sampler_ratio: Tensor | None = None,
    ) -> LossOfRows:
        """mask [B, T] bool: the rows in use, whose values the loss is given in the mask's order."""

        def loss(values: RowValues) -> Tensor:
            logp = torch.zeros(mask.shape).double().masked_scatter(mask, values.logp)
            old = logp.detach() if old_logp is None else old_logp.double()
            token, rho = self.per_token(logp, old, advantages.double(), mask, sampler_ratio)
            if self.beta != 0:
                assert ref_logp is not None
                d = ref_logp.double() - logp
                kl = torch.exp(d) - d - 1
                token = token + self.beta * (kl * rho if self.kl_importance else kl)
            total = self.aggregate(token, mask)
            return total[mask] if self.aggregation == "none" else total

        return loss
