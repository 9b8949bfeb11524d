"""Whether one model is what the plan of its class says: its head, its loss function, the numbers in its config."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from tileloss.integrations import _head_wrappers
from tileloss.integrations._forward_plan import GIVEN, MASKED, SHIFTED, ForwardPlan
from tileloss.integrations._heads import HeadPlan
from tileloss.torch._arguments import FLOATS

_LOSSES = {SHIFTED: ForCausalLMLoss, GIVEN: ForCausalLMLoss, MASKED: ForMaskedLMLoss}


def plan_of(model: PreTrainedModel, plan: ForwardPlan) -> ForwardPlan:
    """The plan of its class with the loss that this model's config chooses for `loss_function`."""
    masked = plan.loss == SHIFTED and model.loss_function is ForMaskedLMLoss
    return dataclasses.replace(plan, loss=MASKED) if masked else plan


def check_head_is_unchanged(model: PreTrainedModel, head: HeadPlan) -> None:
    """Raises ValueError where calling the head does more than its source says: that would be lost."""
    for path, module in head.named_modules(model):
        what = _head_wrappers.unknown_around(module)
        if what is not None:
            raise ValueError(
                f"{type(model).__name__}.{path}: expected an LM head without hooks, got one with {what}; tileloss never calls it"
            )


def check_model(model: PreTrainedModel, plan: ForwardPlan, head: HeadPlan) -> None:
    """Raises ValueError where the head or the loss of this very model is not what the plan's formula says."""
    name = type(model).__name__
    linear, path = head.linear(model), head.linear_path
    if not _head_wrappers.is_linear(linear):
        raise ValueError(f"{name}.{path}: {_head_wrappers.not_linear(linear)}")
    for _, module in head.named_modules(model):
        _head_wrappers.check_adapters(f"{name}.{path}", module)
    _head_wrappers.refuse_zero3(f"{name}.{path}", linear.weight)
    if linear.weight.dtype not in FLOATS:
        raise ValueError(
            f"{name}.{path}: expected a weight in float32, bfloat16 or float16, got {linear.weight.dtype}"
        )
    expected = _LOSSES.get(plan.loss)
    if expected is not None and model.loss_function is not expected:
        raise ValueError(
            f"{name}.loss_function: expected transformers' {expected.__name__}, got {model.loss_function}; "
            "tileloss would replace it"
        )
    if plan.vocab_of_view is not None:
        vocab = resolve(model, plan.vocab_of_view)
        if linear.weight.shape[0] != vocab:
            raise ValueError(
                f"{name}.{plan.vocab_of_view}: expected the {linear.weight.shape[0]} rows of the LM head, got {vocab}"
            )
    _check_numbers(model, plan)
    if plan.hidden_divisors and linear.bias is not None:
        raise ValueError(
            f"{name}.{path}: expected a head without bias, as hidden states are scaled before it"
        )


def _check_numbers(model: PreTrainedModel, plan: ForwardPlan) -> None:
    name = type(model).__name__
    scales = (*plan.multipliers, *plan.divisors, *plan.hidden_divisors)
    for path in scales:
        value = resolve(model, path)
        if not isinstance(value, int | float) and not (value is None and path.endswith("?")):
            raise ValueError(
                f"{name}.{path.removesuffix('?')}: expected a number as a scale of the logits, got {type(value).__name__}"
            )
    scale = logit_scale(model, plan)
    if not (scale > 0 and math.isfinite(scale)):
        paths = ", ".join(path.removesuffix("?") for path in scales)
        raise ValueError(f"{name}.{paths}: expected a scale of the logits above 0, got {scale}")
    cap = None if plan.softcap is None else resolve(model, plan.softcap)
    if cap is not None and not (isinstance(cap, int | float) and cap > 0):
        path = str(plan.softcap).removesuffix("?")
        raise ValueError(f"{name}.{path}: expected a soft-cap above 0 or None, got {cap}")
    for path in plan.must_be_zero:
        if resolve(model, path) != 0:
            raise ValueError(
                f"{name}.{path}: expected 0, got {resolve(model, path)}; this term of its loss needs the logits"
            )


def logit_scale(model: PreTrainedModel, plan: ForwardPlan) -> float:
    """What the logits are multiplied by; inf for a division by 0."""
    factor, divisor = 1.0, 1.0  # loops: torch.compile traces no generator in math.prod
    for path in plan.multipliers:
        value = resolve(model, path)
        factor *= 1.0 if value is None else value
    for path in plan.divisors + plan.hidden_divisors:
        value = resolve(model, path)
        divisor *= 1.0 if value is None else value
    return factor / divisor if divisor else math.inf


def resolve(model: PreTrainedModel, path: str) -> Any:
    """The value at an attribute path; ``get_text_config()`` is the one call that a path may hold. None if the last attribute of a
    path that ends in ``?`` is not there."""
    value: Any = model
    for name in path.split("."):
        if name == "get_text_config()":
            value = value.get_text_config()
        elif name.endswith("?"):
            value = getattr(value, name[:-1], None)
        else:
            value = getattr(value, name)
    return value
