"""The forward that ``tileloss.integrations.transformers.patch`` puts in place of a causal LM's own.

One function for every model: a ``ForwardPlan`` says which base model to call with what and what the logits would go through.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from tileloss.integrations import _heads
from tileloss.integrations._forward_plan import MASKED, MEAN, SHIFTED, ForwardPlan
from tileloss.integrations._heads import HeadPlan
from tileloss.integrations._model_checks import check_model, logit_scale, resolve
from tileloss.torch import cross_entropy, linear_cross_entropy
from tileloss.torch._arguments import autocast_dtype

STATE = "_tileloss_patch"  # the attribute of a patched model that holds its PatchState


@dataclass
class PatchState:
    """What ``patch`` leaves on a model."""

    plan: ForwardPlan
    head: HeadPlan
    forward: Callable[..., Any]
    # Set by make_compute_loss_func: training calls without labels answer with HiddenForLoss.
    hands_out_hidden: bool = False
    # Set during a call by the model around it, which trains: the answer has hidden states in the place of logits.
    hidden_for_logits: bool = False


@dataclass
class HiddenForLoss(ModelOutput):
    """What a patched model answers in training without labels once a compute_loss_func wants to compute the loss itself.

    ``compute_dtype`` is autocast's at the time of the forward: the loss function is called outside of autocast, and accelerate
    turns the bfloat16 tensors of an output into float32 ones on the way.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None  # [B, T, H]
    shift_labels: torch.Tensor | None = None
    compute_dtype: torch.dtype | None = None
    # Read by nobody: see _traces.
    head: tuple[torch.Tensor, ...] | None = None

    def __getitem__(self, key: Any) -> Any:
        if key == "logits":
            raise KeyError(
                "logits: make_compute_loss_func was called for this model, which therefore answers with hidden states in "
                "training; unpatch() it, or give Trainer that loss function"
            )
        return super().__getitem__(key)


def make_forward(
    plan: ForwardPlan, head: HeadPlan, original: Callable[..., Any]
) -> Callable[..., Any]:
    """The forward for ``plan`` and ``head``; ``original`` (unbound) still serves whatever needs logits."""

    def fused(self: PreTrainedModel, **kwargs: Any) -> Any:
        return _without_logits(self, plan, head, kwargs)

    for decorate in reversed(plan.decorators):
        fused = decorate(fused)

    @functools.wraps(original)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        state: PatchState | None = getattr(self, STATE, None)
        if state is None or not (self.training or state.hidden_for_logits):
            return original(self, *args, **kwargs)
        named = _named(plan, args, kwargs)
        hands_out = state.hidden_for_logits or (state.hands_out_hidden and torch.is_grad_enabled())
        if named.get("labels") is None and not hands_out:
            return original(self, *args, **kwargs)
        return fused(self, **named)

    # accelerate unwraps a model down to the last __wrapped__, which would be the model's own forward.
    del forward.__wrapped__
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


def _without_logits(
    model: PreTrainedModel, plan: ForwardPlan, head: HeadPlan, kwargs: dict[str, Any]
) -> Any:
    check_model(model, plan, head)
    arguments, extra = _arguments(plan, kwargs)
    return_dict = extra.pop("return_dict", None)
    if "return_dict" in arguments:
        return_dict = arguments["return_dict"]
        arguments["return_dict"] = True  # for the base model
    popped = extra.pop("shift_labels", None) if plan.pops_shift_labels else None
    if plan.prepare is not None:
        arguments |= plan.prepare(model, kwargs=extra, **arguments)
    outputs = _call_base(model, plan, arguments, extra)
    options = _loss_options(plan, extra, popped)
    hidden = _kept_hidden(model, plan, head, outputs.last_hidden_state, arguments)
    labels = arguments["labels"]
    if labels is None and not getattr(model, STATE).hidden_for_logits:
        return HiddenForLoss(
            hidden=_heads.hidden_of_linear(model, head, hidden),
            shift_labels=extra.get("shift_labels"),
            compute_dtype=autocast_dtype(hidden.device.type),
            head=_traces(head.linear(model)),
        )

    fields = {field: getattr(outputs, source) for field, source in plan.output_fields.items()}
    fields |= dict.fromkeys(plan.output_hidden, hidden)
    if labels is None:
        hidden = _heads.hidden_of_linear(model, head, hidden)
        return plan.output_type(logits=hidden, **fields)
    scored = _next_labels(labels, hidden, options, shifts=plan.loss == SHIFTED)
    loss_of = _loss_of(model, plan, head, scored, options)
    loss = _heads.run_to_linear(model, head, hidden, loss_of)
    if plan.router is not None and arguments["output_router_logits"]:
        fields["aux_loss"] = _router_loss(model, plan, outputs, arguments["attention_mask"])
        loss = loss + resolve(model, plan.router.weight) * fields["aux_loss"].to(loss.device)
    output = plan.output_type(loss=loss, **fields)
    if plan.returns_tuple and not (
        model.config.return_dict if return_dict is None else return_dict
    ):
        return output.to_tuple()
    return output


def _loss_options(
    plan: ForwardPlan, extra: dict[str, Any], popped: torch.Tensor | None
) -> dict[str, Any]:
    """What of the call's **kwargs reaches the loss."""
    if plan.loss == MEAN:
        return {}
    options = dict(extra) if popped is None else extra | {"shift_labels": popped}
    if plan.loss == MASKED:
        options.pop("shift_labels", None)
    return options


def loss_of_hidden(
    model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """transformers' ForCausalLMLoss of what a patched model has given in the place of logits."""
    state: PatchState = getattr(model, STATE)
    scored = _next_labels(labels, hidden, options, shifts=True)
    loss_of = _loss_of(model, state.plan, state.head, scored, options)
    return _heads.run_at_linear(model, state.head, hidden, loss_of)


def _traces(head: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Empty views of the head's parameters. DDP looks for what a step uses in the graph of the forward's outputs, and the head
    is used after the forward. A head that FSDP gathers when it is called needs none."""
    return tuple(p[:0] for p in head.parameters()) if type(head) is torch.nn.Linear else ()


def smoothed_loss(
    model: PreTrainedModel,
    outputs: Any,
    labels: torch.Tensor,
    num_items: torch.Tensor | int | None,
    label_smoothing: float,
    ignore_index: int,
) -> torch.Tensor:
    """Label-smoothed loss of a model's output: from the hidden states where they are there, else from its logits."""
    options = {"num_items_in_batch": num_items, "ignore_index": ignore_index}
    state: PatchState = getattr(model, STATE)
    shifts = state.plan.loss in (SHIFTED, MEAN)  # as LabelSmoother does for every causal LM
    if isinstance(outputs, HiddenForLoss) and outputs.hidden is not None:
        options["shift_labels"] = outputs.shift_labels
        shifted = _next_labels(labels, outputs.hidden, options, shifts)
        more = {"label_smoothing": label_smoothing, "compute_dtype": outputs.compute_dtype}
        loss_of = _loss_of(model, state.plan, state.head, shifted, options, **more)
        return _heads.run_at_linear(model, state.head, outputs.hidden, loss_of)
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return cross_entropy(
        logits,
        _next_labels(labels, logits, options, shifts),
        ignore_index=ignore_index,
        num_items=num_items,
        label_smoothing=label_smoothing,
    )


def _named(plan: ForwardPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by the names of the forward's own parameters."""
    if len(args) > len(plan.parameters):
        raise TypeError(
            f"forward takes {len(plan.parameters)} positional arguments but {len(args)} were given"
        )
    named = dict(kwargs)
    for name, value in zip(plan.parameters, args, strict=False):
        if name in kwargs:
            raise TypeError(f"forward got multiple values for argument {name!r}")
        if name in plan.renamed and value is not None:
            raise TypeError(f"{name}: expected by keyword, got it by position; it has another name")
        named[name] = value
    unknown = [name for name in named if name not in plan.parameters and name != "return_dict"]
    if unknown and not plan.takes_kwargs:
        raise TypeError(f"forward got an unexpected keyword argument {unknown[0]!r}")
    return named


def _arguments(plan: ForwardPlan, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The forward's own parameters, and the rest, which it takes as **kwargs."""
    arguments: dict[str, Any] = dict(plan.parameters)
    extra: dict[str, Any] = {}
    for name, value in kwargs.items():
        (arguments if name in plan.parameters else extra)[name] = value
    return arguments, extra


def _call_base(
    model: PreTrainedModel, plan: ForwardPlan, arguments: dict[str, Any], extra: dict[str, Any]
) -> Any:
    keywords = {keyword: arguments[name] for keyword, name in plan.base_keywords.items()}
    keywords |= plan.base_constants | (extra if plan.base_kwargs else {})
    if "return_dict" not in plan.base_positional:
        keywords["return_dict"] = True
    return resolve(model, plan.base)(
        *(arguments[name] for name in plan.base_positional), **keywords
    )


def _kept_hidden(
    model: PreTrainedModel,
    plan: ForwardPlan,
    head: HeadPlan,
    hidden: torch.Tensor,
    arguments: dict[str, Any],
) -> torch.Tensor:
    if plan.keep is not None and not (plan.keeps_only_whole and _is_cut(hidden, arguments)):
        hidden = plan.keep(hidden, arguments["logits_to_keep"])
    return hidden.to(head.linear(model).weight.dtype) if plan.casts_to_head else hidden


def _is_cut(hidden: torch.Tensor, arguments: dict[str, Any]) -> bool:
    """Whether the base model has already dropped positions (Gemma 4 hands it logits_to_keep)."""
    ids = arguments["input_ids"]
    tokens: torch.Tensor = arguments["inputs_embeds"] if ids is None else ids
    return hidden.shape[1] != tokens.shape[1]


def _next_labels(
    labels: torch.Tensor, scored: torch.Tensor, options: dict[str, Any], shifts: bool
) -> torch.Tensor:
    """Labels of the shape of ``scored``'s rows; shifted by one as ForCausalLMLoss does, so that no hidden state is copied, unless
    the forward has them as they are to be."""
    own = options.get("shift_labels")
    if own is None and shifts:
        padded = torch.nn.functional.pad(labels, (0, 1), value=options.get("ignore_index", -100))
        own = padded[..., 1:]
    elif own is None:
        own = labels
    rows = scored.shape[:-1]
    if own.numel() != rows.numel():
        raise ValueError(
            f"labels: expected one for each of the {tuple(rows)} rows, got shape {tuple(own.shape)}"
        )
    return own.to(scored.device).reshape(rows)


def _loss_of(
    model: PreTrainedModel,
    plan: ForwardPlan,
    head: HeadPlan,
    labels: torch.Tensor,
    options: dict[str, Any],
    **more: Any,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loss of the hidden states that the head's Linear would get."""
    softcap = None if plan.softcap is None else resolve(model, plan.softcap)
    vocab = None if plan.vocab is None else resolve(model, plan.vocab)

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        linear = head.linear(model)
        return linear_cross_entropy(
            hidden,
            linear.weight,
            labels,
            linear_bias=linear.bias,
            ignore_index=options.get("ignore_index", -100),
            num_items=options.get("num_items_in_batch"),
            logit_scale=logit_scale(model, plan),
            softcap=0.0 if softcap is None else softcap,
            valid_vocab=None if vocab is None else min(vocab, linear.weight.shape[0]),
            **more,
        )

    return loss_of


def _router_loss(
    model: PreTrainedModel, plan: ForwardPlan, outputs: Any, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    assert plan.router is not None
    counts = (resolve(model, path) for path in plan.router.arguments)
    loss: torch.Tensor = plan.router.function(outputs.router_logits, *counts, attention_mask)
    return loss
