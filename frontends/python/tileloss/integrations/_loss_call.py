"""What of a call's arguments concerns the loss: taken here, or refused by name. Nothing of it may vanish.

``labels``, ``shift_labels``, ``ignore_index`` and ``num_items_in_batch`` stay among the arguments too, which the base model gets
as it does unpatched. Those of ``OWN`` are TileLoss's, no forward of transformers knows them, and they are taken out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from tileloss.integrations._forward_plan import MASKED, MEAN, ForwardPlan

OWN = ("token_weights", "label_smoothing", "skip_logits", "return_token_accuracy")

# What other losses and kernels call their options; a forward that takes any keyword would swallow them.
INSTEAD = {
    "loss_weights": "token_weights, of labels' shape, multiplies the losses of tokens",
    "loss_weight": "token_weights, of labels' shape, multiplies the losses of tokens",
    "loss_scale": "token_weights, of labels' shape, multiplies the losses of tokens",
    "loss_mask": "a label of -100 leaves its token out, token_weights weighs it",
    "class_weights": "tileloss.torch.linear_cross_entropy has class weights",
    "ce_weight": "tileloss.torch.linear_cross_entropy has class weights",
    "z_loss": "tileloss.torch.linear_cross_entropy has it",
    "lse_square_scale": "tileloss.torch.linear_cross_entropy has it, as z_loss",
    "return_z_loss": "tileloss.torch.linear_cross_entropy has z_loss",
    "return_predicted_tokens": "tileloss.torch.linear_logprobs has argmax",
    "use_token_scaling": "tileloss.torch.linear_cross_entropy takes token_weights",
    "reduction": "the loss is a mean; tileloss.torch.linear_cross_entropy has other reductions",
    "num_logits_to_keep": "it is called logits_to_keep",
}


class LossCall(NamedTuple):
    """A call's arguments that concern its loss."""

    shift_labels: torch.Tensor | None = None
    ignore_index: int = -100
    num_items: Any = None
    token_weights: torch.Tensor | None = None
    label_smoothing: float = 0.0
    skip_logits: bool | None = None
    token_accuracy: bool = False
    has_labels: bool = False  # beside or without shift_labels
    is_handed_out: bool = False  # the loss is made of what the forward answers

    @property
    def is_scored(self) -> bool:
        return self.has_labels or self.shift_labels is not None

    def is_known_unpatched(self) -> bool:
        """Whether the model's own forward gives what is asked for."""
        asked = self.token_weights, self.label_smoothing or None, self.token_accuracy or None
        return self.has_labels and all(value is None for value in asked)


def take(
    name: str,
    declared: Collection[str],
    arguments: dict[str, Any],
    token_accuracy: bool,
    hands_out: bool = False,
) -> LossCall:
    """The loss's arguments of a call of the model ``name``. Those of ``OWN`` are taken out of ``arguments``, but for the ones
    that the model's forward itself has among ``declared``. ``hands_out``: the loss is made of what the forward answers.

    Raises:
        ValueError: an argument that would have no effect. TypeError: one that has another name here, or none.
    """
    refuse_others(f"{name}.forward", declared, arguments)
    own = {key: arguments.pop(key, None) for key in OWN if key not in declared}
    has_labels, shift_labels = arguments.get("labels") is not None, arguments.get("shift_labels")
    is_scored = has_labels or shift_labels is not None
    given = [key for key, value in own.items() if _asks(value)]
    if given and not is_scored and not hands_out:
        raise ValueError(
            f"{name}.forward: {given[0]}: expected labels or shift_labels beside it, got neither"
        )
    for key in ("label_smoothing", "return_token_accuracy"):
        if hands_out and key in given:
            raise ValueError(
                f"{name}.forward: {key}: expected none, as make_compute_loss_func's function computes the loss, got {own[key]}"
            )
    kept = arguments.get("logits_to_keep")
    if is_scored and _asks(kept) and "logits_to_keep" not in declared:
        raise TypeError(
            f"{name}.forward: unexpected argument 'logits_to_keep': this model keeps all positions; label others -100"
        )
    ignore_index = arguments.get("ignore_index")
    return LossCall(
        shift_labels=shift_labels,
        ignore_index=-100 if ignore_index is None else ignore_index,
        num_items=arguments.get("num_items_in_batch"),
        token_weights=own.get("token_weights"),
        label_smoothing=own.get("label_smoothing") or 0.0,
        skip_logits=own.get("skip_logits"),
        token_accuracy=is_scored and (token_accuracy or bool(own.get("return_token_accuracy"))),
        has_labels=has_labels,
        is_handed_out=hands_out,
    )


def refuse_others(where: str, declared: Collection[str], arguments: dict[str, Any]) -> None:
    """Raises TypeError for an argument of the loss that has another name here, or none."""
    for name, instead in INSTEAD.items():
        if arguments.get(name) is not None and name not in declared:
            raise TypeError(
                f"{where}: unexpected argument {name!r}: tileloss has no such argument; {instead}"
            )


def without_own(declared: Collection[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords as the model's own forward takes them."""
    return {key: value for key, value in kwargs.items() if key not in OWN or key in declared}


def dress(forward: Callable[..., Any], original: Callable[..., Any]) -> None:
    """The look of the model's own forward, and those of ``OWN`` by which Trainer keeps a data set's columns. (Not
    label_smoothing: transformers takes what has "label" in its name for labels.)"""
    # accelerate unwraps a model down to the last __wrapped__, which would be the model's own forward.
    del forward.__wrapped__  # type: ignore[attr-defined]
    signature = inspect.signature(original)
    *others, last = signature.parameters.values()
    rest = [last] if last.kind is last.VAR_KEYWORD else []
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in OWN
        if "label" not in name and name not in signature.parameters
    ]
    parameters = [*others, *own, *rest] if rest else [*others, last, *own]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


def _asks(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or bool(value)


def of_plan(name: str, plan: ForwardPlan, call: LossCall) -> LossCall:
    """The call as the loss of that kind of forward takes it.

    Raises ValueError for an argument that means nothing to that loss.
    """
    if plan.loss not in (MASKED, MEAN):
        return call
    if call.shift_labels is not None:
        raise ValueError(
            f"{name}.forward: shift_labels: expected None, as this model's labels are not shifted; give them as labels"
        )
    if plan.loss == MASKED:
        return call
    if call.ignore_index != -100:
        raise ValueError(
            f"{name}.forward: ignore_index: expected -100, that of this model's own torch.nn.CrossEntropyLoss(), "
            f"got {call.ignore_index}"
        )
    if call.num_items is not None and not torch.compiler.is_compiling():
        warnings.warn(
            f"{name}.forward: num_items_in_batch: this model's own loss, torch.nn.CrossEntropyLoss(), does not take it: "
            "patched or not, it is the mean over the labels of each batch",
            stacklevel=2,
        )
    return call._replace(num_items=None)
