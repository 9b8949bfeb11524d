"""Who takes part on a GPU alone: kernels of other packages, and what the GPU itself can do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from comparison.contestants import Loss, Output, Step, contestant, torch_loss
from comparison.inputs import EPSILON, Inputs, Shape

# ------------------------------------------------------------------------------------------------------------- roofs


def roof(
    group: str, name: str, work: Callable[[Shape], tuple[float, str]]
) -> Callable[[Callable[[Inputs], Callable[[], object]]], None]:
    """Registers a function of the inputs that returns what is timed. ``work``: as Contestant's."""

    def register(make: Callable[[Inputs], Callable[[], object]]) -> None:
        def setup(inputs: Inputs) -> Step:
            run, nothing = make(inputs), torch.zeros(())

            def step() -> Output:
                run()
                return nothing, ()

            return step

        contestant(group, name, work=work)(setup)

    return register


def logits_bytes(times: int) -> Callable[[Shape], tuple[float, str]]:
    """bfloat16 logits, read or written so often."""
    return lambda shape: (2.0 * times * shape.tokens * shape.vocab, "GB/s")


@roof("roofs", "copy", logits_bytes(2))
def _(inputs: Inputs) -> Callable[[], object]:
    assert inputs.logits is not None and inputs.pristine is not None
    to, source = inputs.logits.detach(), inputs.pristine
    return lambda: to.copy_(source)


@roof("roofs", "read", logits_bytes(1))
def _(inputs: Inputs) -> Callable[[], object]:
    assert inputs.pristine is not None
    # As numbers of 32 bits: the fewest instructions a byte.
    whole = inputs.pristine.flatten()[: inputs.pristine.numel() // 2 * 2].view(torch.float32)
    return lambda: torch.amax(whole)


def product(shape: Shape) -> tuple[float, str]:
    return 2.0 * shape.tokens * shape.vocab * shape.hidden, "TFLOP/s"


def matrices(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [N, H], head [V, H], and such as dlogits are, [N, V]."""
    assert inputs.hidden is not None and inputs.head is not None
    hidden, head = inputs.hidden.detach(), inputs.head.detach()
    return hidden, head, hidden @ head.T


@roof("roofs_linear", "logits = hidden head^T", product)
def _(inputs: Inputs) -> Callable[[], object]:
    hidden, head, logits = matrices(inputs)
    return lambda: torch.mm(hidden, head.T, out=logits)


@roof("roofs_linear", "dhidden = dlogits head", product)
def _(inputs: Inputs) -> Callable[[], object]:
    hidden, head, dlogits = matrices(inputs)
    to = torch.empty_like(hidden)
    return lambda: torch.mm(dlogits, head, out=to)


@roof("roofs_linear", "dhead = dlogits^T hidden", product)
def _(inputs: Inputs) -> Callable[[], object]:
    hidden, head, dlogits = matrices(inputs)
    to = torch.empty_like(head)
    return lambda: torch.mm(dlogits.T, hidden, out=to)


# ------------------------------------------------------------------------------------------------------- other packages


@torch_loss("cross_entropy", "Liger", in_place=True)
def _(inputs: Inputs) -> Loss:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return lambda logits: liger_cross_entropy(logits, inputs.labels)


def register_quack(name: str, in_place: bool) -> None:
    @torch_loss("cross_entropy", name, in_place=in_place)
    def _(inputs: Inputs) -> Loss:
        from quack.cross_entropy import cross_entropy

        return lambda logits: cross_entropy(logits, inputs.labels, inplace_backward=in_place)


register_quack("QuACK", in_place=False)
register_quack("QuACK, in place", in_place=True)


class LogitsWithAnotherRow:
    """A copy of the logits, with a row more in each sequence, over which a gradient is written."""

    is_given_away = True

    def __init__(self, inputs: Inputs) -> None:
        assert inputs.pristine is not None
        self._rows = inputs.sequence(inputs.pristine)
        self.logits = torch.cat([self._rows, self._rows[:, :1]], 1).requires_grad_()
        self.place = self.logits.data_ptr()

    def restore(self) -> None:
        self.logits.detach()[:, :-1].copy_(self._rows)


@contestant("grpo", "Liger", in_place=True)
def _(inputs: Inputs) -> Step:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    inputs.own_logits = LogitsWithAnotherRow(inputs)
    logits = inputs.own_logits.logits
    labels, old_logp = inputs.sequence(inputs.labels), inputs.sequence(inputs.old_logp)
    given = {"temperature": 1.0, "beta": 0.0, "eps_low": EPSILON, "eps_high": EPSILON}

    def step() -> Output:
        loss, _ = triton_grpo_loss(
            logits,
            old_logp,
            None,
            labels,
            inputs.advantages,
            loss_type="grpo",
            reduce=True,
            **given,
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss, (gradient[:, :-1],)

    return step


@torch_loss("linear_cross_entropy", "Liger")
def _(inputs: Inputs) -> Loss:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda hidden, head: liger_fused_linear_cross_entropy(hidden, head, inputs.labels)


@torch_loss("linear_cross_entropy", "Cut Cross-Entropy")
def _(inputs: Inputs) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, head: linear_cross_entropy(hidden, head, inputs.labels)


@torch_loss("linear_cross_entropy", "QuACK")
def _(inputs: Inputs) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, head: chunked_linear_cross_entropy(hidden, head, inputs.labels)
