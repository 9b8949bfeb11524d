"""Who takes part: one registration each. To add one, write a function of the inputs that returns its loss, or its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from comparison.inputs import (
    EPSILON,
    Inputs,
    LossOfLogp,
    Shape,
    cross_entropy_of_logp,
    grpo_of_logp,
)

# A loss of the group's operands: the logits, or hidden states and head.
Loss = Callable[..., torch.Tensor]
# A forward and a backward: the loss, and the gradients of the operands in order.
Output = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
Step = Callable[[], Output]
Setup = Callable[[Inputs], Step]


@dataclass(frozen=True)
class Contestant:
    """`name` is unique in its group. `in_place`: the gradient lies where the logits lay, which is checked.

    `tolerance`: of the gradient, relative in the Frobenius norm, and of the loss, relative, unless that has its
    own. `max_rounds`: for those that take tens of seconds a step. `quarter_of`: the contestant that has four
    times its memory. `work`: of a roof, how much a step does, in what its rate is given in, 1e9 "GB/s" or 1e12 "TFLOP/s".
    """

    name: str
    group: str
    setup: Setup
    in_place: bool = False
    tolerance: float = 0.05
    max_rounds: int | None = None
    quarter_of: str | None = None
    loss_tolerance: float | None = None
    work: Callable[[Shape], tuple[float, str]] | None = None

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass(frozen=True)
class Group:
    """Contestants that do the same work on the same inputs: a loss of the labels' log-probabilities, or a divergence from a
    teacher, of TRL's `beta` (comparison/distillation.py). `whole_model`: a whole model's step, whose memory is counted with the
    gradients, as they are what an optimizer finds."""

    name: str
    title: str
    loss_of_logp: LossOfLogp | None = None
    beta: float | None = None
    linear: bool = False
    policy: bool = False
    whole_model: bool = False
    contestants: list[Contestant] = field(default_factory=list)

    @property
    def memory(self) -> str:
        return "memory above the model" if self.whole_model else "memory above inputs and outputs"


GROUPS = {
    group.name: group
    for group in (
        # What a device can do at best: no losses, and nothing to check.
        Group("roofs", "roofs of logits"),
        Group("roofs_linear", "roofs of the LM head", linear=True),
        Group("training_step", "a training step", cross_entropy_of_logp, whole_model=True),
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


def register_for(device: str) -> None:
    """Who takes part on this device alone."""
    if device == "cpu":
        import comparison.jax_contestants
        import comparison.tensor_parallel
    else:
        import comparison.device_contestants  # noqa: F401


OURS = 0.01  # what a bfloat16 gradient is off by, three times


def contestant(group: str, name: str, **more: Any) -> Callable[[Setup], Setup]:
    """Registers a function of the inputs that returns a step. ``more``: of Contestant."""

    def register(setup: Setup) -> Setup:
        GROUPS[group].contestants.append(Contestant(name, group, setup, **more))
        return setup

    return register


def torch_loss(
    group: str, name: str, **more: Any
) -> Callable[[Callable[[Inputs], Loss]], Callable[[Inputs], Loss]]:
    """Registers a function of the inputs that returns a loss of the operands."""

    def register(loss_of: Callable[[Inputs], Loss]) -> Callable[[Inputs], Loss]:
        contestant(group, name, **more)(lambda inputs: step_of(inputs, loss_of(inputs)))
        return loss_of

    return register


def by_key(key: str) -> Contestant:
    """Of "group/name"."""
    group, name = key.split("/", 1)
    return next(entry for entry in GROUPS[group].contestants if entry.name == name)


def compiled(function: Loss) -> Loss:
    """torch.compile for these very shapes, which is when it is fastest."""
    return torch.compile(function, dynamic=False)


def step_of(inputs: Inputs, loss: Loss) -> Step:
    """autograd.grad, not backward: no .grad, so that nothing is copied or added."""
    operands = inputs.operands

    def step() -> Output:
        value = loss(*operands)
        return value, torch.autograd.grad(value, operands)

    return step


def register_torch(
    group: str,
    loss_of: Callable[[Inputs, torch.dtype], Loss],
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
) -> None:
    """torch eager and torch.compile, in the logits' type and in float32."""
    for name in ("torch eager", "torch.compile"):
        for dtype in dtypes:

            def loss(inputs: Inputs, name: str = name, dtype: torch.dtype = dtype) -> Loss:
                eager = loss_of(inputs, dtype)
                return eager if name == "torch eager" else compiled(eager)

            suffix = ", float32 logits" if dtype == torch.float32 else ""
            torch_loss(group, name + suffix)(loss)


# ----------------------------------------------------------------------------------------------------- cross-entropy


def register_ours(name: str, **options: bool) -> None:
    in_place = "inplace_backward" in options

    @torch_loss("cross_entropy", f"TileLoss, {name}", in_place=in_place, tolerance=OURS)
    def _(inputs: Inputs) -> Loss:
        from tileloss.torch import cross_entropy

        return lambda logits: cross_entropy(logits, inputs.labels, **options)


register_ours("in place", inplace_backward=True)
register_ours("gradient in the forward", grad_in_forward=True, inplace_backward=True)
register_ours("fresh gradient")
register_torch(
    "cross_entropy",
    lambda inputs, dtype: lambda logits: F.cross_entropy(logits.to(dtype), inputs.labels),
)


# -------------------------------------------------------------------------------------------------------------- GRPO


@torch_loss("grpo", "TileLoss, in place", in_place=True, tolerance=OURS)
def _(inputs: Inputs) -> Loss:
    from tileloss.torch import policy_loss

    labels, old_logp = inputs.sequence(inputs.labels), inputs.sequence(inputs.old_logp)
    return lambda logits: policy_loss(
        inputs.sequence(logits),
        labels,
        inputs.advantages,
        old_logp=old_logp,
        preset="grpo",
        epsilon_low=EPSILON,
        epsilon_high=EPSILON,
        inplace_backward=True,
    )


def torch_grpo(inputs: Inputs, dtype: torch.dtype) -> Loss:
    """log_softmax in `dtype`, the label's entry, ratio, clip. (TRL's selective_log_softmax does as much, one
    sequence after the other.)"""

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logp = F.log_softmax(logits.to(dtype), -1).gather(-1, inputs.labels[:, None])[:, 0]
        return grpo_of_logp(inputs, logp.float())

    return loss


register_torch("grpo", torch_grpo)


# ------------------------------------------------------------------------------------- cross-entropy with the LM head


def our_linear_cross_entropy(inputs: Inputs) -> Loss:
    from tileloss.torch import linear_cross_entropy

    budget = inputs.workspace_bytes
    return lambda hidden, head: linear_cross_entropy(
        hidden, head, inputs.labels, workspace_bytes=budget
    )


torch_loss("linear_cross_entropy", "TileLoss", tolerance=OURS)(our_linear_cross_entropy)
torch_loss(
    "linear_cross_entropy",
    "TileLoss, a quarter of torch.compile's memory",
    tolerance=OURS,
    quarter_of="linear_cross_entropy/torch.compile",
)(our_linear_cross_entropy)
register_torch(
    "linear_cross_entropy",
    lambda inputs, _: lambda hidden, head: F.cross_entropy(F.linear(hidden, head), inputs.labels),
    dtypes=(torch.bfloat16,),
)


# The same work as torch eager: two rounds show that.
@torch_loss("linear_cross_entropy", "torch linear_cross_entropy", max_rounds=2)
def _(inputs: Inputs) -> Loss:
    return lambda hidden, head: F.linear_cross_entropy(hidden, head, inputs.labels)


# Its loss is a sum of 64 chunks at the LM head of Qwen2.5-1.5B, made in bfloat16: 5 % off.
@torch_loss(
    "linear_cross_entropy",
    "torch linear_cross_entropy, chunked",
    max_rounds=1,
    loss_tolerance=0.25,
)
def _(inputs: Inputs) -> Loss:
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, head: F.linear_cross_entropy(hidden, head, inputs.labels, options=options)


@torch_loss("linear_cross_entropy", "TRL chunked", max_rounds=3)
def _(inputs: Inputs) -> Loss:
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    # As add_fused_lm_head calls it for SFT: log-probabilities alone, no bias, no softcap.
    chunk, outputs = _CHUNKED_LOGPROB_CHUNK_SIZE, ("log_probs",)

    def loss(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logp = _ChunkedLogProbFunction.apply(
            hidden, head, None, inputs.labels, 1.0, chunk, None, 1.0, outputs
        )[0]
        return -logp.mean()

    return loss
