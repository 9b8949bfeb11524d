"""What the contestants of a group are given, and what their answers must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 7
LOGIT_STD = 2.0
SAMPLES = 32  # rows and classes whose gradients are checked
EPSILON = 0.2  # GRPO's clip range
CHUNK = 64  # rows that are float64 at a time


@dataclass(frozen=True)
class Shape:
    """tokens N, vocab V, hidden H."""

    tokens: int
    vocab: int
    hidden: int

    @property
    def sequences(self) -> int:
        """B of the [B, T, V] that policy losses are given: 8, or 1 where 8 does not divide N."""
        return 8 if self.tokens % 8 == 0 else 1


class OwnLogits:
    """The logits in memory of XLA's own, which alone can be given away: a copy, put back after each step as torch's are."""

    def __init__(self, pristine: torch.Tensor) -> None:
        self.pristine = jax_array(pristine)
        self.restore()

    def restore(self) -> None:
        import jax.numpy as jnp

        self.array = jnp.array(self.pristine, copy=True).block_until_ready()
        self.place: int = self.array.unsafe_buffer_pointer()

    @property
    def is_given_away(self) -> bool:
        return self.array.is_deleted()


def jax_array(tensor: torch.Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(tensor.detach())


@dataclass
class Inputs:
    """Everything bfloat16 but labels (int64) and what is per token or sequence (float32).

    logits [N, V] with `pristine` a copy to restore it from, or hidden [N, H] and head [V, H], or a model; labels [N], of a
    model its tokens too, [B, T]; advantages [B]; old_logp [N]. `teacher`: other logits, or hidden and head, of the same shapes,
    which nothing writes. `workspace_bytes` is the budget of the contestant that has one.
    """

    shape: Shape
    labels: torch.Tensor
    advantages: torch.Tensor
    old_logp: torch.Tensor
    logits: torch.Tensor | None = None
    pristine: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    head: torch.Tensor | None = None
    teacher: Inputs | None = None
    workspace_bytes: int | None = None
    own_logits: Any = None  # an OwnLogits, or the like, of the contestants that have them
    model: PreTrainedModel | None = None

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The logits, or hidden states and head."""
        return tuple(x for x in (self.logits, self.hidden, self.head) if x is not None)

    def restore(self) -> None:
        """Undoes what an in-place backward wrote."""
        if self.own_logits is not None and self.own_logits.is_given_away:
            self.own_logits.restore()
        elif self.logits is not None and self.pristine is not None:
            self.logits.detach().copy_(self.pristine)

    def places(self) -> set[int]:
        """Where the operands lie: a gradient there needs no memory of its own."""
        places = {tensor.data_ptr() for tensor in self.operands}
        return places | ({self.own_logits.place} if self.own_logits is not None else set())

    def sequence(self, per_token: torch.Tensor) -> torch.Tensor:
        """[N, ...] as [B, T, ...]."""
        return per_token.view(self.shape.sequences, -1, *per_token.shape[1:])


LossOfLogp = Callable[[Inputs, torch.Tensor], torch.Tensor]


def new_generator() -> torch.Generator:
    """Of the same numbers every time, on the device where tensors are made."""
    return torch.Generator(torch.get_default_device()).manual_seed(SEED)


def cross_entropy_of_logp(_inputs: Inputs, logp: torch.Tensor) -> torch.Tensor:
    """-mean(logp), logp [N]."""
    return -logp.mean()


def grpo_of_logp(inputs: Inputs, logp: torch.Tensor) -> torch.Tensor:
    """mean over sequences and their tokens of -min(r A, clip(r) A), r = exp(logp - old_logp)."""
    ratio = inputs.sequence(torch.exp(logp - inputs.old_logp.to(logp.dtype)))
    advantages = inputs.advantages.to(logp.dtype)[:, None]
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    return -torch.min(ratio * advantages, clipped * advantages).mean(-1).mean()


def make_inputs(shape: Shape, *, linear: bool, policy: bool, distils: bool = False) -> Inputs:
    """The same numbers every time on a device. Each page is written here: no contestant pays its first touch.

    old_logp is that of a model a step away: ratios lie inside, outside and on both sides of the clip range.
    """
    generator = new_generator()

    def normal(*size: int, std: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype).normal_(0, std, generator=generator)

    labels = torch.randint(0, shape.vocab, (shape.tokens,), generator=generator)
    advantages = normal(shape.sequences, std=1.0, dtype=torch.float32)
    old_logp = normal(shape.tokens, std=0.25, dtype=torch.float32)
    inputs = Inputs(shape, labels, advantages, old_logp)
    teacher = replace(inputs)
    for side in (inputs, teacher) if distils else (inputs,):
        if linear:
            side.hidden = normal(shape.tokens, shape.hidden, std=1.0)
            side.head = normal(shape.vocab, shape.hidden, std=LOGIT_STD * shape.hidden**-0.5)
        else:
            side.pristine = normal(shape.tokens, shape.vocab, std=LOGIT_STD)
    if distils:
        inputs.teacher = teacher
    if inputs.pristine is not None:
        inputs.logits = inputs.pristine.clone()
    for tensor in inputs.operands:
        tensor.requires_grad_()
    if policy:
        inputs.old_logp += true_logp(inputs)[0].float()
    return inputs


def row_chunks(inputs: Inputs) -> Iterator[slice]:
    """All rows, some at a time; with an LM head, which is converted anew for each chunk, more of them."""
    chunk = CHUNK if inputs.pristine is not None else inputs.shape.tokens // 8 + 1
    for begin in range(0, inputs.shape.tokens, chunk):
        yield slice(begin, begin + chunk)


def true_logp(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """logp and lse of each token, float64 [N]."""
    logp, lse = (torch.empty(inputs.shape.tokens, dtype=torch.float64) for _ in range(2))
    for rows in row_chunks(inputs):
        z = logits_of(inputs, rows, None)
        lse[rows] = torch.logsumexp(z, -1)
        logp[rows] = z.gather(-1, inputs.labels[rows, None])[:, 0] - lse[rows]
    return logp, lse


@dataclass(frozen=True)
class Truth:
    """The loss, and its gradient at some places, computed in float64.

    scale: what an error of the loss is relative to: |loss|, or where its terms cancel sum |dL/dlogp|.
    rows, classes: indices [SAMPLES]. dlogits [SAMPLES, V] at `rows`, or dhidden [SAMPLES, H] at `rows` and
    dhead [SAMPLES, H] at `classes`, half of which are labels. Of a model: dhead [2 SAMPLES, H] at `classes`, first those that are
    labels, and `body`, the gradients of all other parameters in order.
    """

    loss: float
    scale: float
    rows: torch.Tensor
    classes: torch.Tensor
    dlogits: torch.Tensor | None = None
    dhidden: torch.Tensor | None = None
    dhead: torch.Tensor | None = None
    body: tuple[torch.Tensor, ...] | None = None


def make_truth(inputs: Inputs, loss_of_logp: LossOfLogp) -> Truth:
    """By the definition: dL/dz_ij = dL/dlogp_i ([j = label] - p_ij)."""
    logp, lse = true_logp(inputs)
    logp.requires_grad_()
    loss = loss_of_logp(inputs, logp)
    (dlogp,) = torch.autograd.grad(loss, logp)
    value, scale = loss.item(), max(abs(loss.item()), dlogp.abs().sum().item())
    generator = new_generator()
    rows = torch.randperm(inputs.shape.tokens, generator=generator)[:SAMPLES]
    others = torch.randint(0, inputs.shape.vocab, (SAMPLES // 2,), generator=generator)
    classes = torch.cat([inputs.labels[rows][::2], others])

    def gradient_at(rows: torch.Tensor | None, classes: torch.Tensor | None) -> torch.Tensor:
        chosen = slice(None) if rows is None else rows
        columns = torch.arange(inputs.shape.vocab) if classes is None else classes
        p = torch.exp(logits_of(inputs, rows, classes) - lse[chosen, None])
        return dlogp[chosen, None] * ((inputs.labels[chosen, None] == columns).double() - p)

    return sampled_truth(inputs, value, scale, (rows, classes), gradient_at)


def sampled_truth(
    inputs: Inputs,
    loss: float,
    scale: float,
    places: tuple[torch.Tensor, torch.Tensor],
    gradient_at: Callable[[torch.Tensor | None, torch.Tensor | None], torch.Tensor],
) -> Truth:
    """``places``: rows and classes. ``gradient_at``: the gradient of the logits at such; None: at all."""
    rows, classes = places
    dlogits = gradient_at(rows, None)
    if inputs.hidden is None or inputs.head is None:
        return Truth(loss, scale, rows, classes, dlogits=dlogits)
    dhidden = dlogits @ inputs.head.detach().double()
    # Every row's column, not whole rows.
    dhead = gradient_at(None, classes).T @ inputs.hidden.detach().double()
    return Truth(loss, scale, rows, classes, dhidden=dhidden, dhead=dhead)


def relative(output: torch.Tensor, truth: torch.Tensor) -> float:
    """||output - truth|| / ||truth||."""
    return ((output.double() - truth).norm() / truth.norm()).item()


def logits_of(
    inputs: Inputs, rows: torch.Tensor | slice | None, classes: torch.Tensor | None
) -> torch.Tensor:
    """Exact logits in float64 of chosen rows, or of chosen classes with an LM head; None: of all."""
    if inputs.pristine is not None:
        return inputs.pristine[rows].double()
    assert inputs.hidden is not None and inputs.head is not None
    hidden, head = inputs.hidden.detach(), inputs.head.detach()
    return (hidden if rows is None else hidden[rows]).double() @ (
        head if classes is None else head[classes]
    ).double().T
