"""The loss of what a patched forward has made: of hidden states, or of logits where somebody asks for those too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from tileloss.integrations._forward_plan import ForwardPlan
from tileloss.integrations._heads import HeadPlan
from tileloss.integrations._loss_call import LossCall
from tileloss.integrations._model_checks import logit_scale, resolve
from tileloss.torch import cross_entropy, logprobs

# The loss; where it was asked for the share of the labels whose token is the likeliest.
Losses = tuple[torch.Tensor, torch.Tensor | None]


class Rows:
    """What the rows of hidden states or logits are compared with, and weighed by, brought to their places."""

    def __init__(
        self, labels: torch.Tensor | None, scored: torch.Tensor, call: LossCall, shifts: bool
    ) -> None:
        self.call, self.device, self.shape = call, scored.device, scored.shape[:-1]
        given = labels if call.shift_labels is None else call.shift_labels
        self.shifts = shifts and call.shift_labels is None
        self.labels = self._next("labels", given, call.ignore_index)
        self.weights = self._weights(given)

    def _weights(self, labels: torch.Tensor | None) -> torch.Tensor | None:
        weights = self.call.token_weights
        if weights is None:
            return None
        assert labels is not None
        if weights.shape != labels.shape:
            raise ValueError(
                f"token_weights: expected the labels' shape {list(labels.shape)}, got {list(weights.shape)}"
            )
        return self._next("token_weights", weights, 0)

    def _next(self, name: str, values: Any, filler: int) -> torch.Tensor:
        """Of the rows' shape; shifted by one as ForCausalLMLoss does, so that no hidden state is copied, unless they are as they
        are to be."""
        own = values
        if self.shifts:
            own = torch.nn.functional.pad(values, (0, 1), value=filler)[..., 1:]
        if own.numel() != self.shape.numel():
            raise ValueError(
                f"{name}: expected one for each of the {tuple(self.shape)} rows, got shape {tuple(own.shape)}"
            )
        moved: torch.Tensor = own.to(self.device).reshape(self.shape)
        return moved

    def to(self, device: torch.device) -> Rows:
        """Where the head is, if the model lies on several devices."""
        self.labels = self.labels.to(device)
        self.weights = None if self.weights is None else self.weights.to(device)
        return self

    @property
    def options(self) -> dict[str, Any]:
        return {
            "ignore_index": self.call.ignore_index,
            "num_items": self.call.num_items,
            "token_weights": self.weights,
            "label_smoothing": self.call.label_smoothing,
        }

    def share(self, correct: torch.Tensor | None) -> torch.Tensor | None:
        """Of the labels that count, of how many the token is the likeliest."""
        if correct is None:
            return None
        counted = self.labels != self.call.ignore_index
        return (correct & counted).sum() / counted.sum().clamp(min=1)


def of_hidden(
    model: PreTrainedModel,
    plan: ForwardPlan,
    head: HeadPlan,
    rows: Rows,
    adds_to_main_grad: bool,
    **how: Any,
) -> Callable[[torch.Tensor], Losses]:
    """The losses of the hidden states that the head's Linear would get."""
    softcap = None if plan.softcap is None else resolve(model, plan.softcap)
    vocab = None if plan.vocab is None else resolve(model, plan.vocab)
    transform = {
        "logit_scale": logit_scale(model, plan),
        "softcap": 0.0 if softcap is None else softcap,
    }

    def losses(hidden: torch.Tensor) -> Losses:
        matrices = head.matrices(model, hidden)
        if vocab is not None:
            transform["valid_vocab"] = min(vocab, matrices.weight.shape[0])
        here = rows.to(hidden.device)
        added = {"linear_weight_grad": matrices.main_grad()} if adds_to_main_grad else {}
        loss = matrices.cross_entropy(
            hidden, here.labels, **transform, **here.options, **added, **how
        )
        if not rows.call.token_accuracy:
            return loss, None
        with torch.no_grad():
            ignored = rows.call.ignore_index
            correct = matrices.correct(
                hidden.detach(), here.labels, ignore_index=ignored, **transform, **how
            )
        return loss, here.share(correct)

    return losses


def of_logits(
    logits: torch.Tensor, labels: torch.Tensor | None, call: LossCall, shifts: bool
) -> Losses:
    """The losses of logits as a forward gives them: scaled and capped already."""
    rows = Rows(labels, logits, call, shifts)
    loss = cross_entropy(logits, rows.labels, **rows.options)
    if not call.token_accuracy:
        return loss, None
    found = logprobs(
        logits.detach(), rows.labels, outputs=("correct",), ignore_index=call.ignore_index
    )
    return loss, rows.share(found.correct)


def router_loss(
    model: PreTrainedModel, plan: ForwardPlan, outputs: Any, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    assert plan.router is not None
    counts = (resolve(model, path) for path in plan.router.arguments)
    loss: torch.Tensor = plan.router.function(outputs.router_logits, *counts, attention_mask)
    return loss
