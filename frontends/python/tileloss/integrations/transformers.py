"""Trains Hugging Face causal LMs without logits.

transformers computes a causal LM's loss from logits, and calls its loss hook only after the LM head has made
them. ``patch(model)`` replaces the forward of one model: in training with labels the loss comes from the hidden
states and the head's weight (``tileloss.torch.linear_cross_entropy``), the head is never called, and
``outputs.logits`` is None. Without labels, and in eval, the model's own forward runs and returns logits as ever, so
``generate`` and metrics see no difference.

transformers itself is imported on the first call, not with this module.
"""

from __future__ import annotations

import dataclasses
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


def patch(
    model: PreTrainedModel,
    *,
    token_accuracy: bool = False,
    logits_in_evaluation: bool = True,
    main_grad: bool = False,
) -> PreTrainedModel:
    """Makes ``model(..., labels=...)`` compute its loss without logits while ``model.training``; returns the model.

    The loss is that of transformers' ForCausalLMLoss: labels [B, T] are shifted by one (``shift_labels`` are taken as they are),
    ``ignore_index`` (-100) rows are skipped and never read, the mean is over the remaining rows or ``num_items_in_batch``. The
    config's soft-cap and logit scale, the head's bias, tied embeddings and the router loss of mixtures of experts are respected,
    and labels that a model's own forward does not shift (Bart, Whisper, ...). Logits are not rounded to the
    model's dtype on the way, as transformers' are. With every label ignored the loss is 0, where transformers gives NaN.

    A call may also give ``token_weights``, ``label_smoothing``, ``return_token_accuracy`` and ``skip_logits``; every argument
    that concerns the loss is used or refused by name (docs/users/huggingface.md).

    Of a model already patched only the options change. ``unpatch`` undoes it. Only this instance changes: its class becomes one
    of the same name that is derived from its own. Patch it before it is wrapped (Trainer, DDP, torch.compile), before or after
    ``fully_shard``, accelerate's `dispatch_model` and `cpu_offload`.

    Args:
        token_accuracy: a call with labels answers with ``token_accuracy`` too, the share of the labels that count whose token is
            the likeliest. It costs one product with the head.
        logits_in_evaluation: False: a call with labels gives no logits in eval either, unless it has ``skip_logits=False``.
        main_grad: each backward of a call without logits adds the head's gradient, not rounded, to the weight's attribute
            ``main_grad``, float32 and of its shape, as Megatron-LM's; the weight gets no ``.grad`` of that loss. Its embedding,
            where the two are tied, still does. A call that would train a head without one is refused (docs/users/memory.md,
            "Micro-batches from PyTorch").

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: its version is not one that this was tested with.
        TypeError: model is not a transformers PreTrainedModel.
        ValueError: the model's forward, head or loss function is not one that can be done without logits; the message quotes
            the statement or names the attribute. The model is then unchanged.
        NotImplementedError: DeepSpeed ZeRO-3 partitions the head.
    """
    _require_transformers()
    from tileloss.integrations import _patched_class
    from tileloss.integrations._fused_forward import STATE, Options

    _require_model(model)
    options = Options(token_accuracy, logits_in_evaluation, main_grad)
    state = getattr(model, STATE, None)
    if state is not None and _patched_class.reaches(model.forward, type(model).forward):
        setattr(model, STATE, dataclasses.replace(state, options=options))
        if getattr(state, "patched_inner", False):
            patch(getattr(model, state.inner), main_grad=main_grad)
        return model
    dispatched = _patched_class.is_dispatched(model)
    if "forward" in model.__dict__ and not dispatched:
        _patched_class.drop_own_forward(model)
    kind = _patched_class.patched_class(type(model))
    made = _state_around if isinstance(kind.tileloss_plan, str) else _state_of
    setattr(model, STATE, made(model, kind.tileloss_plan, options))
    model.__class__ = kind
    if dispatched:
        model._old_forward = types.MethodType(kind.forward, model)
    return model


def _state_of(model: PreTrainedModel, plan: Any, options: Any) -> Any:
    from tileloss.integrations import _fused_forward, _heads, _model_checks

    plan = _model_checks.plan_of(model, plan)
    head = _heads.find_head(model, plan)
    _model_checks.check_model(model, plan, head)
    _model_checks.check_head_is_unchanged(model, head)
    return _fused_forward.PatchState(options, plan, head)


def _state_around(model: PreTrainedModel, path: str, options: Any) -> Any:
    """Of a model whose loss is of the logits of a causal LM inside; patches that one."""
    from tileloss.integrations import _fused_forward, _inner_forward

    inner = getattr(model, path)
    _inner_forward.check_model(model, inner)
    already = hasattr(inner, _fused_forward.STATE)
    if already and getattr(inner, _fused_forward.STATE).options.main_grad != options.main_grad:
        raise ValueError(
            f"main_grad: expected what the {type(inner).__name__} inside is patched with, got {options.main_grad}"
        )
    if not already:
        patch(inner, main_grad=options.main_grad)
    return _inner_forward.InnerState(options, path, not already)


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """Gives ``model`` its own forward back and returns it; without effect on a model that is not patched.

    If the forward was wrapped after ``patch`` (accelerate does), the wrapper stays and runs the model's own forward from now on.

    Raises TypeError if model is not a transformers PreTrainedModel: of a wrapper, unpatch the model inside.
    """
    from tileloss.integrations import _fused_forward

    _require_model(model)
    state = model.__dict__.pop(_fused_forward.STATE, None)
    own = type(model).__dict__.get("tileloss_own")
    if own is not None:
        model.__class__ = own
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
    setattr(model, _fused_forward.STATE, dataclasses.replace(state, hands_out_hidden=True))

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
