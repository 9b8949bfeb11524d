"""Trains Hugging Face causal LMs without logits.

transformers computes a causal LM's loss from logits, and calls its loss hook only after the LM head has made
them. ``patch(model)`` replaces the forward of one model: in training with labels the loss comes from the hidden
states and the head's weight (``tileloss.torch.linear_cross_entropy``), the head is never called, and
``outputs.logits`` is None. Without labels, and in eval, the model's own forward runs and returns logits as ever, so
``generate`` and metrics see no difference.

transformers itself is imported on the first call, not with this module.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# The suite runs with 5.23.0; its comparisons of losses and gradients were also run with 5.0.0, 5.12.0 and 5.22.0. A later
# 5.x is let in, because patch reads the forward of the very model that it is given and refuses what it does not know; the
# major version stands for what it cannot read, the meaning of ForCausalLMLoss among it.
_FROM_VERSION, _BELOW_VERSION = 5, 6


def patch(model: PreTrainedModel) -> PreTrainedModel:
    """Makes ``model(..., labels=...)`` compute its loss without logits while ``model.training``; returns the model.

    The loss is that of transformers' ForCausalLMLoss: labels [B, T] are shifted by one (``shift_labels`` are taken as they are),
    ``ignore_index`` (-100) rows are skipped and never read, the mean is over the remaining rows or ``num_items_in_batch``. The
    config's soft-cap and logit scale, the head's bias, tied embeddings and the router loss of mixtures of experts are respected,
    and labels that a model's own forward does not shift (Bart, Whisper, ...). Logits are not rounded to the
    model's dtype on the way, as transformers' are. With every label ignored the loss is 0, where transformers gives NaN.

    A model already patched is left as it is. ``unpatch`` undoes it. Only this instance changes; patch it before it is wrapped
    (Trainer, accelerate, DDP, torch.compile), before or after ``fully_shard``.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: its version is not one that this was tested with.
        TypeError: model is not a transformers PreTrainedModel.
        ValueError: the model's forward, head or loss function is not one that can be done without logits; the message quotes
            the statement or names the attribute. The model is then unchanged.
    """
    _require_transformers()
    from tileloss.integrations import _forward_plan, _fused_forward, _heads, _model_checks
    from tileloss.integrations._forward_source import UnknownForward

    _require_model(model)
    state = getattr(model, _fused_forward.STATE, None)
    if state is not None and _reaches(model.forward, state.forward):
        return model
    if "forward" in model.__dict__:
        raise ValueError(
            "model: expected its own forward, got one replaced on this instance; patch it before wrapping it "
            "(accelerator.unwrap_model(model, keep_fp32_wrapper=False) removes accelerate's)"
        )
    try:
        plan = _model_checks.plan_of(model, _forward_plan.read_forward(type(model)))
    except UnknownForward as error:
        return _patch_around(model, error)
    head = _heads.find_head(model, plan)
    _model_checks.check_model(model, plan, head)
    _model_checks.check_head_is_unchanged(model, head)
    forward = _fused_forward.make_forward(plan, head, type(model).forward)
    setattr(model, _fused_forward.STATE, _fused_forward.PatchState(plan, head, forward))
    model.forward = types.MethodType(forward, model)
    return model


def _patch_around(model: PreTrainedModel, error: ValueError) -> PreTrainedModel:
    """Patches a model whose loss is of the logits of a causal LM inside, and that one; raises ``error`` if it is none."""
    from tileloss.integrations import _fused_forward, _inner_forward
    from tileloss.integrations._forward_source import UnknownForward

    try:
        path = _inner_forward.read_inner(type(model))
    except UnknownForward:
        raise error from None
    inner = getattr(model, path)
    _inner_forward.check_model(model, inner)
    already = hasattr(inner, _fused_forward.STATE)
    patch(inner)
    forward = _inner_forward.make_forward(model, path)
    setattr(model, _fused_forward.STATE, _inner_forward.InnerState(path, forward, not already))
    model.forward = types.MethodType(forward, model)
    return model


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """Gives ``model`` its own forward back and returns it; without effect on a model that is not patched.

    If the forward was wrapped after ``patch`` (accelerate does), the wrapper stays and runs the model's own forward from now on.

    Raises TypeError if model is not a transformers PreTrainedModel: of a wrapper, unpatch the model inside.
    """
    from tileloss.integrations import _fused_forward

    _require_model(model)
    state = model.__dict__.pop(_fused_forward.STATE, None)
    if (
        state is not None
        and getattr(model.__dict__.get("forward"), "__func__", None) is state.forward
    ):
        del model.forward
    if getattr(state, "patched_inner", False):
        unpatch(getattr(model, state.inner))
    return model


def make_compute_loss_func(
    model: PreTrainedModel, *, label_smoothing: float = 0.0, ignore_index: int = -100
) -> Callable[..., torch.Tensor]:
    """A ``compute_loss_func`` for ``transformers.Trainer`` that smooths labels without logits: ``model`` must be patched.

    ``Trainer(model, args, compute_loss_func=make_compute_loss_func(model, label_smoothing=0.1))`` gives the loss of
    ``TrainingArguments(label_smoothing_factor=0.1)``: (1 - s) * (-log p_y) + s/V * sum_j (-log p_j), over the mean of the
    unignored rows or ``num_items_in_batch`` (transformers' LabelSmoother, which needs logits). As there, a router loss is not
    part of it.

    Trainer takes the labels out of the model's inputs when it has such a function. So from now on, until ``unpatch``, a call of
    this model in training, with gradients and without labels returns hidden states in place of logits. In eval the function
    computes the same loss from the logits.

    Raises ValueError if the model is not patched. A label_smoothing outside [0, 1] is refused at the first call.
    """
    from tileloss.integrations import _fused_forward

    state = getattr(model, _fused_forward.STATE, None)
    if state is None:
        raise ValueError(
            f"model: expected one that tileloss has patched, got an unpatched {type(model).__name__}"
        )
    if not isinstance(state, _fused_forward.PatchState):
        raise ValueError(
            f"model: expected one whose own forward has the head, got {type(model).__name__}, which calls a causal LM inside"
        )
    state.hands_out_hidden = True

    def compute_loss(
        outputs: Any,
        labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        if labels is None:
            raise ValueError("labels: expected a tensor, got None; the batch has no labels")
        return _fused_forward.smoothed_loss(
            model, outputs, labels, num_items_in_batch, label_smoothing, ignore_index
        )

    return compute_loss


def _require_model(model: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers PreTrainedModel, got {type(model).__name__}; of a wrapper, take the model inside"
        )


def _reaches(forward: Any, ours: Callable[..., Any]) -> bool:
    """Whether ``ours`` is the model's forward, or lies under wrappers of it."""
    while getattr(forward, "__func__", forward) is not ours:
        if not hasattr(forward, "__wrapped__"):
            return False
        forward = forward.__wrapped__
    return True


def _require_transformers() -> None:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "tileloss.integrations.transformers needs the package transformers: pip install transformers"
        ) from error
    if not _FROM_VERSION <= int(transformers.__version__.split(".")[0]) < _BELOW_VERSION:
        raise RuntimeError(
            f"transformers: expected a version from {_FROM_VERSION}.0 to below {_BELOW_VERSION}.0, "
            f"which tileloss was tested with, got {transformers.__version__}"
        )
