"""The losses by their definitions (docs/users/losses.md) in float64, for autograd to differentiate: the names and arguments are
those of tileloss.torch. `check` of checks.py and the tests of tileloss.jax compare with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policy_definition import PRESETS, PolicyDefinition, Tokens
from tileloss._core.functions import FUNCTIONS
from tileloss.torch import DistillationRows, RowOutputs


def transformed(
    x: Tensor, logit_scale: float = 1.0, softcap: float = 0.0, temperature: Any = 1.0
) -> Tensor:
    """z of the logits."""
    z = logit_scale * x
    return (softcap * torch.tanh(z / softcap) if softcap else z) / temperature


NOWHERE = -1e30  # z of a column that is not allowed: p is 0, and nothing becomes -inf - -inf


def unpacked(allowed: Tensor | None, x: Tensor, columns: int | None = None) -> Tensor:
    """bool [..., columns]: which columns of logits x are allowed."""
    columns = x.shape[-1] if columns is None else columns
    if allowed is None:
        return torch.ones(columns, dtype=torch.bool)
    bits = (allowed[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    found = bits.bool().flatten(-2)[..., :columns]
    return found if found.dim() == 1 else found.reshape(*x.shape[:-1], columns)


def row_outputs(
    x: Tensor,
    labels: Tensor | None,
    mask: Tensor | None = None,
    *,
    allowed: Tensor | None = None,
    temperature: Any = 1.0,
    temperature_on: str = "logits",
    valid_vocab: int | None = None,
    ignore_index: int = -100,
    **transform: float,
) -> tuple[RowOutputs, Tensor, Tensor, Tensor]:
    """The row outputs; z, which rows are in use, and their labels, of which a row may have several: [..., K]. Rows that are not
    in use, and empty slots, are 0 everywhere."""
    given = torch.full(x.shape[:-1], ignore_index - 1) if labels is None else labels.long()
    y = given if given.dim() == x.dim() else given[..., None]
    is_there = y != ignore_index
    used = is_there.any(-1) if mask is None else is_there.any(-1) & (mask != 0)
    is_there = is_there & used[..., None]
    y = torch.zeros_like(y) if labels is None else y.where(is_there, 0)
    on_logits = temperature_on == "logits"
    x = x[..., :valid_vocab].masked_fill(~used[..., None], 0)
    is_in = unpacked(allowed, x)
    z = transformed(
        x.masked_fill(~is_in, 0), **transform, temperature=temperature if on_logits else 1.0
    )
    mean = (z * is_in).sum(-1) / is_in.sum(-1)
    z = z.masked_fill(~is_in, NOWHERE)
    log_p = z.log_softmax(-1)
    logp = log_p.gather(-1, y) / (1.0 if on_logits else temperature) * is_there
    if given.dim() < x.dim():
        logp, y = logp[..., 0], y[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    argmax = z.argmax(-1).where(used, -1)
    sums = (z.logsumexp(-1), entropy, torch.logsumexp(2 * log_p, -1), mean)
    lse, entropy, collision, mean = (each * used for each in sums)
    correct = argmax == y if y.shape == argmax.shape else None
    return RowOutputs(logp, lse, entropy, argmax, correct, collision, mean), z, used, y


def logprobs(x: Tensor, target: Tensor, *, outputs: Any = ("logp",), **options: Any) -> RowOutputs:
    rows = row_outputs(x, target, **options)[0]._asdict()
    return RowOutputs(**{name: rows[name] for name in outputs})


def reduced(rows: Tensor, weights: Tensor, reduction: str, num_items: Any = None) -> Tensor:
    if reduction == "none":
        return rows
    items = weights.sum() if num_items is None else num_items
    return rows.sum() if reduction == "sum" or items == 0 else rows.sum() / items


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: Any = None,
    **options: Any,
) -> Tensor:
    is_soft = target.is_floating_point()
    rows, z, used, y = row_outputs(x, None if is_soft else target, mask, **options)
    classes, is_in = z.shape[-1], unpacked(options.get("allowed"), z)
    smooth = label_smoothing / is_in.sum(-1, keepdim=True).double() * is_in
    c = torch.ones(classes).double() if weight is None else weight[:classes]
    w = used.double() if token_weights is None else token_weights.view(used.shape) * used
    if is_soft:
        q = (1 - label_smoothing) * target[..., :classes] + smooth
        return reduced(w * -(c * q * z.log_softmax(-1)).sum(-1), w, reduction, num_items)
    nll = (1 - label_smoothing) * c[y] * -rows.logp
    if label_smoothing:
        nll = nll - (smooth * c * z.log_softmax(-1)).sum(-1)
    of_z = reduced(z_loss * w * rows.lse.square(), w, reduction, num_items)
    return reduced(w * nll, w * c[y], reduction, num_items) + of_z


def policy_loss(
    x: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    sequence_offsets: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sampler_logp: Tensor | None = None,
    preset: str = "grpo",
    **options: Any,
) -> Tensor:
    names = [name for name in (*FUNCTIONS["logprobs"].options, "allowed") if name in options]
    transform = {name: options.pop(name) for name in names}
    rows, _, used, _ = row_outputs(x, target, mask, **transform)
    if sequence_offsets is None:
        lengths = torch.full(used.shape[:1], used.shape[1])
    else:
        lengths = sequence_offsets.long().diff()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths).view(used.shape)
    if advantages.shape != used.shape:
        advantages = advantages.flatten()[sequence]
    given = (advantages, old_logp, ref_logp, sampler_logp)
    longest = int(lengths.max()) if len(lengths) else 0
    tokens = Tokens(
        sequence[used], len(lengths), longest, *(t if t is None else t[used] for t in given)
    )
    loss = PolicyDefinition(tokens, {**PRESETS[preset], **options})(
        rows.logp[used], rows.entropy[used]
    )
    return torch.zeros(used.shape).double().masked_scatter(used, loss) if loss.dim() else loss


def divergence_of(log_p: Tensor, log_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Over the last dimension."""
    p, q = log_p.exp(), log_q.exp()

    def mixed(share_of_q: float) -> Tensor:
        return (share_of_q * q + (1 - share_of_q) * p).clamp_min(1e-300).log()

    forward, reverse = q * (log_q - log_p), p * (log_p - log_q)
    terms = {
        "forward_kl": forward,
        "reverse_kl": reverse,
        "jeffreys": forward + reverse,
        "jsd": beta * q * (log_q - mixed(beta)) + (1 - beta) * p * (log_p - mixed(beta)),
        "skew_forward_kl": q * (log_q - mixed(beta)),
        "skew_reverse_kl": p * (log_p - mixed(1 - beta)),
        "total_variation": (p - q).abs() / 2,
    }
    return terms[kind].sum(-1)


def _distilled(
    x: Tensor,
    log_q: Tensor,
    pair: Any,
    target: Tensor | None,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    label_weight: Any = 0.0,
    divergence_weight: Any = 1.0,
    temperature: Any = 1.0,
    label_temperature: Any = None,
    scale_by_temperature_squared: bool = False,
    mask: Tensor | None = None,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    num_items: Any = None,
    outputs: Any = (),
    **options: Any,
) -> Any:
    """``pair``: of log p and log q, over all classes, to those that the divergence is of."""
    of_label, *_ = row_outputs(
        x, target, mask, temperature=label_temperature or temperature, **options
    )
    rows, z, used, _ = row_outputs(x, target, mask, temperature=temperature, **options)
    found = divergence_of(*pair(z.log_softmax(-1), log_q), divergence, beta) * used
    scale = temperature**2 if scale_by_temperature_squared else 1.0
    w = used.double() if token_weights is None else token_weights.view(used.shape) * used
    loss = w * (label_weight * -of_label.logp + divergence_weight * scale * found)
    loss = reduced(loss, w, reduction, num_items)
    if not outputs:
        return loss
    values = {
        "divergence": found,
        "logp": of_label.logp,
        "lse": rows.lse,
        "entropy": rows.entropy,
        "teacher_entropy": -(log_q.exp() * log_q).sum(-1) * used,
        "agreement": (z.argmax(-1) == log_q.argmax(-1)) & used,
    }
    names = (outputs,) if isinstance(outputs, str) else outputs
    return loss, DistillationRows(**{name: values[name] for name in names})


def distillation(
    x: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    teacher_temperature: Any = None,
    **options: Any,
) -> Any:
    scale = options.get("logit_scale", 1.0) if teacher_logit_scale is None else teacher_logit_scale
    softcap = options.get("softcap", 0.0) if teacher_softcap is None else teacher_softcap
    temperature = teacher_temperature or options.get("temperature", 1.0)
    teacher = teacher[..., : options.get("valid_vocab")]
    is_in = unpacked(options.get("allowed"), teacher)
    of_teacher = transformed(teacher.masked_fill(~is_in, 0), scale, softcap, temperature)
    log_q = of_teacher.masked_fill(~is_in, NOWHERE).log_softmax(-1)
    return _distilled(x, log_q, lambda log_p, log_q: (log_p, log_q), target, **options)


def sparse_distillation(
    x: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    target: Tensor | None = None,
    *,
    tail: str = "lump",
    **options: Any,
) -> Any:
    """No id is missing."""
    is_in = unpacked(options.get("allowed"), x).expand(x.shape)
    teacher_logprobs = teacher_logprobs.masked_fill(~is_in.gather(-1, teacher_ids.long()), NOWHERE)

    def pair(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        ids = teacher_ids.long()
        known = log_p.gather(-1, ids)
        if tail == "renormalise":
            return known.log_softmax(-1), log_q.log_softmax(-1)
        if tail == "lump":
            others = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, ids, False)
            rest = log_p.masked_fill(~others, -1e300).logsumexp(-1, keepdim=True)
            left = torch.log1p(-log_q.exp().sum(-1, keepdim=True))
            return torch.cat([known, rest], -1), torch.cat([log_q, left], -1)
        return known, log_q

    return _distilled(x, teacher_logprobs, pair, target, **options)
