"""Weights for tokens in TRL's SFTTrainer, which has none of its own: a batch may hold `token_weights`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tileloss.integrations import _loss_call
from tileloss.integrations._trl_checks import INTEGRATION

Function = Callable[..., Any]


def with_token_weights(own: Function) -> Function:
    """Stands in for `SFTTrainer.compute_loss`: with `token_weights`, of labels' shape, in the batch its loss is

        sum_i w_i (-log p_i) / num_items_in_batch, or else by the labels that are not -100,

    and TRL's own without. The metrics, of entropy and accuracy, know no weights.

    Raises:
        ValueError: weights of another shape, or beside what makes another loss of the labels (dft, label smoothing, a
            compute_loss_func, sequence parallelism). TypeError: weights under another name.
    """

    @functools.wraps(own)
    def compute_loss(
        self: Any,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        _loss_call.refuse_others("SFTTrainer", (), inputs)
        weights = inputs.pop("token_weights", None)
        if weights is None:
            return own(self, model, inputs, return_outputs, num_items_in_batch)
        _refuse_other_losses(self)

        def weighted(**given: Any) -> Any:
            outputs = model(**given)
            places = weights if given.get("shift_labels") is not None else weights[:, 1:]
            return _with_weights(outputs, places)

        return own(self, weighted, inputs, return_outputs, num_items_in_batch)

    return compute_loss


def _with_weights(outputs: Any, weights: Tensor) -> Any:
    """The loss is the sum of the log-probabilities, which are 0 where there is no label."""
    if weights.shape != outputs.log_probs.shape:
        raise ValueError(
            f"{INTEGRATION}: token_weights: expected the labels' shape, {list(outputs.log_probs.shape)} of the next tokens, got "
            f"{list(weights.shape)}"
        )
    return dataclasses.replace(outputs, log_probs=outputs.log_probs * weights.to(outputs.log_probs))


def _refuse_other_losses(trainer: Any) -> None:
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for what, is_there in (
        (f"loss_type={trainer.args.loss_type!r}", trainer.args.loss_type != "nll"),
        ("compute_loss_func", trainer.compute_loss_func is not None),
        ("label_smoothing_factor", trainer.label_smoother is not None),
        ("sequence parallelism", parallelism is not None and parallelism.sp_enabled),
    ):
        if is_there:
            raise ValueError(
                f"{INTEGRATION}: token_weights: expected a batch without them beside {what}, whose loss has no place for them"
            )
