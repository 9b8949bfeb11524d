"""Who takes part: one registration each. To add one, write a function of the inputs that returns its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from comparison.inputs import EPSILON, Inputs, LossOfLogp, cross_entropy_of_logp, grpo_of_logp

# A forward and a backward: the loss, and the gradients of the group's inputs in order.
Output = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
Step = Callable[[], Output]
Setup = Callable[[Inputs], Step]


@dataclass(frozen=True)
class Contestant:
    """`name` is unique in its group. `in_place`: the gradient lies where the logits lay, which is checked.

    `tolerance`: of the gradient, relative in the Frobenius norm, and of the loss, relative, unless that has its
    own. `max_rounds`: for those that take tens of seconds a step. `quarter_of`: the contestant that has four
    times its memory.
    """

    name: str
    group: str
    setup: Setup
    in_place: bool = False
    tolerance: float = 0.05
    max_rounds: int | None = None
    quarter_of: str | None = None
    loss_tolerance: float | None = None

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass(frozen=True)
class Group:
    """Contestants that do the same work on the same inputs: a loss of the labels' log-probabilities, or a divergence from a
    teacher, of TRL's `beta` (comparison/distillation.py). `of_model`: a whole model's step, whose memory is counted with the
    gradients, as they are what an optimizer finds."""

    name: str
    title: str
    loss_of_logp: LossOfLogp | None = None
    beta: float | None = None
    linear: bool = False
    policy: bool = False
    of_model: bool = False
    contestants: list[Contestant] = field(default_factory=list)

    @property
    def memory(self) -> str:
        return "memory above the model" if self.of_model else "memory above inputs and outputs"


GROUPS = {
    group.name: group
    for group in (
        Group("training_step", "a training step", cross_entropy_of_logp, of_model=True),
        Group("cross_entropy", "cross-entropy from logits", cross_entropy_of_logp),
        Group("grpo", "GRPO from logits", grpo_of_logp, policy=True),
        Group(
            "linear_cross_entropy",
            "cross-entropy with the LM head",
            cross_entropy_of_logp,
            linear=True,
        ),
        Group("distillation_kl", "distillation by forward KL", beta=0.0),
        Group("distillation_jsd", "distillation by JSD", beta=0.5),
        Group("linear_distillation", "distillation with two LM heads", beta=0.0, linear=True),
    )
}
OURS = 0.01  # what a bfloat16 gradient is off by, three times


def contestant(
    group: str,
    name: str,
    *,
    in_place: bool = False,
    tolerance: float = 0.05,
    max_rounds: int | None = None,
    quarter_of: str | None = None,
    loss_tolerance: float | None = None,
) -> Callable[[Setup], Setup]:
    """Registers a setup function."""

    def register(setup: Setup) -> Setup:
        entry = Contestant(
            name, group, setup, in_place, tolerance, max_rounds, quarter_of, loss_tolerance
        )
        GROUPS[group].contestants.append(entry)
        return setup

    return register


def by_key(key: str) -> Contestant:
    """Of "group/name"."""
    group, name = key.split("/", 1)
    return next(entry for entry in GROUPS[group].contestants if entry.name == name)


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.compile for these very shapes, which is when it is fastest."""
    return torch.compile(function, dynamic=False)


def logits_step(inputs: Inputs, loss: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    """Of a loss of the logits. autograd.grad, not backward: no .grad, so that nothing is copied or added."""
    logits = inputs.logits
    assert logits is not None

    def step() -> Output:
        value = loss(logits)
        return value, torch.autograd.grad(value, (logits,))

    return step


def linear_step(inputs: Inputs, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
    """Of a loss of hidden and head: both gradients."""
    hidden, head = inputs.hidden, inputs.head
    assert hidden is not None and head is not None

    def step() -> Output:
        value = loss(hidden, head)
        return value, torch.autograd.grad(value, (hidden, head))

    return step


# ----------------------------------------------------------------------------------------------------- cross-entropy


def our_cross_entropy(inputs: Inputs, **options: bool) -> Step:
    from tileloss.torch import cross_entropy

    return logits_step(inputs, lambda logits: cross_entropy(logits, inputs.labels, **options))


@contestant("cross_entropy", "TileLoss, in place", in_place=True, tolerance=OURS)
def _(inputs: Inputs) -> Step:
    return our_cross_entropy(inputs, inplace_backward=True)


@contestant("cross_entropy", "TileLoss, gradient in the forward", in_place=True, tolerance=OURS)
def _(inputs: Inputs) -> Step:
    return our_cross_entropy(inputs, grad_in_forward=True, inplace_backward=True)


@contestant("cross_entropy", "TileLoss, fresh gradient", tolerance=OURS)
def _(inputs: Inputs) -> Step:
    return our_cross_entropy(inputs)


def torch_cross_entropy(inputs: Inputs) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logits: F.cross_entropy(logits, inputs.labels)


def torch_cross_entropy_float32(inputs: Inputs) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logits: F.cross_entropy(logits.float(), inputs.labels)


@contestant("cross_entropy", "torch eager")
def _(inputs: Inputs) -> Step:
    return logits_step(inputs, torch_cross_entropy(inputs))


@contestant("cross_entropy", "torch eager, float32 logits")
def _(inputs: Inputs) -> Step:
    return logits_step(inputs, torch_cross_entropy_float32(inputs))


@contestant("cross_entropy", "torch.compile")
def _(inputs: Inputs) -> Step:
    return logits_step(inputs, compiled(torch_cross_entropy(inputs)))


@contestant("cross_entropy", "torch.compile, float32 logits")
def _(inputs: Inputs) -> Step:
    return logits_step(inputs, compiled(torch_cross_entropy_float32(inputs)))


# -------------------------------------------------------------------------------------------------------------- GRPO


@contestant("grpo", "TileLoss, in place", in_place=True, tolerance=OURS)
def _(inputs: Inputs) -> Step:
    from tileloss.torch import policy_loss

    labels, old_logp = inputs.sequence(inputs.labels), inputs.sequence(inputs.old_logp)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            inputs.sequence(logits),
            labels,
            inputs.advantages,
            old_logp=old_logp,
            preset="grpo",
            epsilon_low=EPSILON,
            epsilon_high=EPSILON,
            inplace_backward=True,
        )

    return logits_step(inputs, loss)


def torch_grpo(inputs: Inputs, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """log_softmax in `dtype`, the label's entry, ratio, clip. (TRL's selective_log_softmax does as much, one
    sequence after the other.)"""

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logp = F.log_softmax(logits.to(dtype), -1).gather(-1, inputs.labels[:, None])[:, 0]
        return grpo_of_logp(inputs, logp.float())

    return loss


@contestant("grpo", "torch eager")
def _(inputs: Inputs) -> Step:
    return logits_step(inputs, torch_grpo(inputs, torch.bfloat16))


@contestant("grpo", "torch eager, float32 logits")
def _(inputs: Inputs) -> Step:
    return logits_step(inputs, torch_grpo(inputs, torch.float32))


@contestant("grpo", "torch.compile")
def _(inputs: Inputs) -> Step:
    return logits_step(inputs, compiled(torch_grpo(inputs, torch.bfloat16)))


@contestant("grpo", "torch.compile, float32 logits")
def _(inputs: Inputs) -> Step:
    return logits_step(inputs, compiled(torch_grpo(inputs, torch.float32)))


# ------------------------------------------------------------------------------------- cross-entropy with the LM head


def our_linear_cross_entropy(inputs: Inputs, workspace_bytes: int | None) -> Step:
    from tileloss.torch import linear_cross_entropy

    def loss(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, head, inputs.labels, workspace_bytes=workspace_bytes)

    return linear_step(inputs, loss)


@contestant("linear_cross_entropy", "TileLoss", tolerance=OURS)
def _(inputs: Inputs) -> Step:
    return our_linear_cross_entropy(inputs, None)


@contestant(
    "linear_cross_entropy",
    "TileLoss, a quarter of torch.compile's memory",
    tolerance=OURS,
    quarter_of="linear_cross_entropy/torch.compile",
)
def _(inputs: Inputs) -> Step:
    return our_linear_cross_entropy(inputs, inputs.workspace_bytes)


def torch_linear_cross_entropy(
    inputs: Inputs,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda hidden, head: F.cross_entropy(F.linear(hidden, head), inputs.labels)


@contestant("linear_cross_entropy", "torch eager")
def _(inputs: Inputs) -> Step:
    return linear_step(inputs, torch_linear_cross_entropy(inputs))


@contestant("linear_cross_entropy", "torch.compile")
def _(inputs: Inputs) -> Step:
    return linear_step(inputs, compiled(torch_linear_cross_entropy(inputs)))


# The same work as torch eager: two rounds show that.
@contestant("linear_cross_entropy", "torch linear_cross_entropy", max_rounds=2)
def _(inputs: Inputs) -> Step:
    return linear_step(
        inputs, lambda hidden, head: F.linear_cross_entropy(hidden, head, inputs.labels)
    )


# Its loss is a sum of 64 chunks at the LM head of Qwen2.5-1.5B, made in bfloat16: 5 % off.
@contestant(
    "linear_cross_entropy",
    "torch linear_cross_entropy, chunked",
    max_rounds=1,
    loss_tolerance=0.25,
)
def _(inputs: Inputs) -> Step:
    options = torch.nn.LinearCrossEntropyOptions()
    return linear_step(
        inputs,
        lambda hidden, head: F.linear_cross_entropy(hidden, head, inputs.labels, options=options),
    )


@contestant("linear_cross_entropy", "TRL chunked", max_rounds=3)
def _(inputs: Inputs) -> Step:
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    # As add_fused_lm_head calls it for SFT: log-probabilities alone, no bias, no softcap.
    chunk, outputs = _CHUNKED_LOGPROB_CHUNK_SIZE, ("log_probs",)

    def loss(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logp = _ChunkedLogProbFunction.apply(
            hidden, head, None, inputs.labels, 1.0, chunk, None, 1.0, outputs
        )[0]
        return -logp.mean()

    return linear_step(inputs, loss)
