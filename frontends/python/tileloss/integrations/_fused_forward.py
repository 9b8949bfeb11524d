"""The forward that ``tileloss.integrations.transformers.patch`` puts in place of a causal LM's own.

One function for every model: a ``ForwardPlan`` says which base model to call with what and what the logits would go through.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import ModelOutput

from tileloss.integrations._forward_plan import ForwardPlan
from tileloss.torch import cross_entropy, linear_cross_entropy
from tileloss.torch._tensors import FLOATS, autocast_dtype

STATE = "_tileloss_patch"  # the attribute of a patched model that holds its PatchState


@dataclass
class PatchState:
    """What ``patch`` leaves on a model."""

    plan: ForwardPlan
    forward: Callable[..., Any]
    # Set by make_compute_loss_func: training calls without labels answer with HiddenForLoss.
    hands_out_hidden: bool = False


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


def make_forward(plan: ForwardPlan, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward for ``plan``; ``original`` (unbound) still serves whatever needs logits."""

    @functools.wraps(original)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        state: PatchState | None = getattr(self, STATE, None)
        if state is None or not self.training:
            return original(self, *args, **kwargs)
        arguments, extra = _named_arguments(plan, args, kwargs)
        labels = arguments["labels"]
        if labels is None and not (state.hands_out_hidden and torch.is_grad_enabled()):
            return original(self, *args, **kwargs)

        return_dict = arguments.pop("return_dict", extra.pop("return_dict", None))
        check_model(self, plan)
        outputs = _call_base(self, plan, arguments, extra)
        hidden = _kept_hidden(self, plan, outputs.last_hidden_state, arguments)
        if labels is None:
            return HiddenForLoss(
                hidden=hidden,
                shift_labels=extra.get("shift_labels"),
                compute_dtype=autocast_dtype(hidden.device.type),
                head=_traces(_resolve(self, plan.head)),
            )

        loss = _loss(self, plan, hidden, _shifted(labels, hidden, extra), extra)
        fields = {field: getattr(outputs, source) for field, source in plan.output_fields.items()}
        if plan.router is not None and arguments["output_router_logits"]:
            fields["aux_loss"] = _router_loss(self, plan, outputs, arguments["attention_mask"])
            loss = loss + _resolve(self, plan.router.weight) * fields["aux_loss"].to(loss.device)
        output = plan.output_type(loss=loss, **fields)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    # accelerate unwraps a model down to the last __wrapped__, which would be the model's own forward.
    del forward.__wrapped__
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


def _traces(head: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Empty views of the head's parameters. DDP looks for what a step uses in the graph of the forward's outputs, and the head
    is used after the forward. A head that FSDP gathers when it is called needs none."""
    return tuple(p[:0] for p in head.parameters()) if type(head) is torch.nn.Linear else ()


def check_head_is_unchanged(model: PreTrainedModel, plan: ForwardPlan) -> None:
    """Raises ValueError where calling the head does more than multiply: that would be lost."""
    head = _resolve(model, plan.head)
    if "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks:
        what = "a forward of its own" if "forward" in head.__dict__ else "hooks"
        raise ValueError(
            f"{type(model).__name__}.{plan.head}: expected an LM head without hooks, got one with {what}; tileloss never calls it"
        )


def _is_linear(head: torch.nn.Module) -> bool:
    """Whether calling the head multiplies and no more: a torch.nn.Linear, or one that is a unit of FSDP2 by itself, whose class
    `fully_shard` has replaced with one derived from FSDPModule and Linear."""
    kind = type(head)
    if kind is torch.nn.Linear or not torch.distributed.is_available():
        return kind is torch.nn.Linear
    from torch.distributed.fsdp import FSDPModule

    return kind.__bases__ == (FSDPModule, torch.nn.Linear)


def check_model(model: PreTrainedModel, plan: ForwardPlan) -> None:
    """Raises ValueError where the head or the loss of this very model is not what the plan's formula says."""
    name = type(model).__name__
    head = _resolve(model, plan.head)
    if not _is_linear(head):
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        raise ValueError(
            f"{name}.{plan.head}: expected a plain torch.nn.Linear as the LM head, got {kind}"
        )
    if head.weight.dtype not in FLOATS:
        raise ValueError(
            f"{name}.{plan.head}: expected a weight in float32, bfloat16 or float16, got {head.weight.dtype}"
        )
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{name}.loss_function: expected transformers' ForCausalLMLoss, got {model.loss_function}; tileloss would replace it"
        )
    for path in (*plan.multipliers, *plan.divisors, *plan.hidden_divisors):
        if not isinstance(_resolve(model, path), int | float):
            kind = type(_resolve(model, path)).__name__
            raise ValueError(
                f"{name}.{path}: expected a number as a scale of the logits, got {kind}"
            )
    scale = _logit_scale(model, plan)
    if not (scale > 0 and math.isfinite(scale)):
        paths = ", ".join(plan.multipliers + plan.divisors + plan.hidden_divisors)
        raise ValueError(f"{name}.{paths}: expected a scale of the logits above 0, got {scale}")
    for path in plan.must_be_zero:
        if _resolve(model, path) != 0:
            raise ValueError(
                f"{name}.{path}: expected 0, got {_resolve(model, path)}; this term of its loss needs the logits"
            )
    if plan.hidden_divisors and head.bias is not None:
        raise ValueError(
            f"{name}.{plan.head}: expected a head without bias, as hidden states are scaled before it"
        )


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
    if isinstance(outputs, HiddenForLoss) and outputs.hidden is not None:
        plan = getattr(model, STATE).plan
        options["shift_labels"] = outputs.shift_labels
        shifted = _shifted(labels, outputs.hidden, options)
        return _loss(
            model,
            plan,
            outputs.hidden,
            shifted,
            options,
            label_smoothing=label_smoothing,
            compute_dtype=outputs.compute_dtype,
        )
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return cross_entropy(
        logits,
        _shifted(labels, logits, options),
        ignore_index=ignore_index,
        num_items=num_items,
        label_smoothing=label_smoothing,
    )


def _named_arguments(
    plan: ForwardPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call's arguments by the forward's own parameters, and the rest, which the forward takes as **kwargs."""
    if len(args) > len(plan.parameters):
        raise TypeError(
            f"forward takes {len(plan.parameters)} positional arguments but {len(args)} were given"
        )
    for name in tuple(plan.parameters)[: len(args)]:
        if name in kwargs:
            raise TypeError(f"forward got multiple values for argument {name!r}")
    arguments = {**plan.parameters, **dict(zip(plan.parameters, args, strict=False))}
    extra: dict[str, Any] = {}
    for name, value in kwargs.items():
        (arguments if name in plan.parameters else extra)[name] = value
    unknown = [name for name in extra if name != "return_dict"]
    if unknown and not plan.takes_kwargs:
        raise TypeError(f"forward got an unexpected keyword argument {unknown[0]!r}")
    return arguments, extra


def _call_base(
    model: PreTrainedModel, plan: ForwardPlan, arguments: dict[str, Any], extra: dict[str, Any]
) -> Any:
    for name, path in plan.config_defaults.items():
        if name in arguments and arguments[name] is None:
            arguments[name] = _resolve(model, path)
    keywords = {
        keyword: arguments[name]
        for keyword, name in plan.base_keywords.items()
        if name != "return_dict"
    }
    keywords |= plan.base_constants | (extra if plan.base_kwargs else {}) | {"return_dict": True}
    return _resolve(model, plan.base)(
        *(arguments[name] for name in plan.base_positional), **keywords
    )


def _kept_hidden(
    model: PreTrainedModel, plan: ForwardPlan, hidden: torch.Tensor, arguments: dict[str, Any]
) -> torch.Tensor:
    if plan.keep is not None and not (plan.keeps_only_whole and _is_cut(hidden, arguments)):
        hidden = plan.keep(hidden, arguments["logits_to_keep"])
    return hidden.to(_resolve(model, plan.head).weight.dtype) if plan.casts_to_head else hidden


def _is_cut(hidden: torch.Tensor, arguments: dict[str, Any]) -> bool:
    """Whether the base model has already dropped positions (Gemma 4 hands it logits_to_keep)."""
    ids = arguments["input_ids"]
    tokens: torch.Tensor = arguments["inputs_embeds"] if ids is None else ids
    return hidden.shape[1] != tokens.shape[1]


def _shifted(labels: torch.Tensor, scored: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Labels shifted by one as ForCausalLMLoss does, so that no hidden state is copied; of the shape of ``scored``'s rows."""
    shifted = options.get("shift_labels")
    if shifted is None:
        padded = torch.nn.functional.pad(labels, (0, 1), value=options.get("ignore_index", -100))
        shifted = padded[..., 1:]
    rows = scored.shape[:-1]
    if shifted.numel() != rows.numel():
        raise ValueError(
            f"labels: expected one for each of the {tuple(rows)} rows, got shape {tuple(shifted.shape)}"
        )
    return shifted.to(scored.device).reshape(rows)


def _loss(
    model: PreTrainedModel,
    plan: ForwardPlan,
    hidden: torch.Tensor,
    shifted: torch.Tensor,
    options: dict[str, Any],
    **more: Any,
) -> torch.Tensor:
    head = _resolve(model, plan.head)
    softcap = None if plan.softcap is None else _resolve(model, plan.softcap)

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(
            hidden,
            head.weight,
            shifted,
            linear_bias=head.bias,
            ignore_index=options.get("ignore_index", -100),
            num_items=options.get("num_items_in_batch"),
            logit_scale=_logit_scale(model, plan),
            softcap=0.0 if softcap is None else softcap,
            **more,
        )

    return loss_of(hidden) if type(head) is torch.nn.Linear else _call_as(head, loss_of, hidden)


def _call_as(
    head: torch.nn.Module, forward: Callable[..., torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Calls the head with another forward, within its hooks: FSDP's gather its parameters before, free them after, and reduce
    their gradients once that of ``hidden`` is there."""
    head.forward = forward
    try:
        loss: torch.Tensor = head(hidden)
        return loss
    finally:
        del head.forward


def _logit_scale(model: PreTrainedModel, plan: ForwardPlan) -> float:
    """What the logits are multiplied by; inf for a division by 0."""
    factor, divisor = 1.0, 1.0  # loops: torch.compile traces no generator in math.prod
    for path in plan.multipliers:
        factor *= _resolve(model, path)
    for path in plan.divisors + plan.hidden_divisors:
        divisor *= _resolve(model, path)
    return factor / divisor if divisor else math.inf


def _router_loss(
    model: PreTrainedModel, plan: ForwardPlan, outputs: Any, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    assert plan.router is not None
    counts = (_resolve(model, path) for path in plan.router.arguments)
    loss: torch.Tensor = plan.router.function(outputs.router_logits, *counts, attention_mask)
    return loss


def _resolve(model: PreTrainedModel, path: str) -> Any:
    """The value at an attribute path; ``get_text_config()`` is the one call that a path may hold."""
    value: Any = model
    for name in path.split("."):
        value = value.get_text_config() if name == "get_text_config()" else getattr(value, name)
    return value
