"""The forward that ``tileloss.integrations.transformers.patch`` puts in place of a causal LM's own.

One function for every model: a ``ForwardPlan`` says which base model to call with what and what the logits would go through.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from tileloss.integrations import _heads, _loss_call, _losses
from tileloss.integrations._forward_plan import MEAN, SHIFTED, ForwardPlan
from tileloss.integrations._heads import HeadPlan
from tileloss.integrations._loss_call import LossCall
from tileloss.integrations._losses import Losses, Rows
from tileloss.integrations._model_checks import check_model, plan_of, resolve
from tileloss.torch._arguments import autocast_dtype

STATE = "_tileloss_patch"  # the attribute of a patched model that holds its PatchState


@dataclass(frozen=True)
class Options:
    """What the caller of ``patch`` chose."""

    token_accuracy: bool = False
    logits_in_evaluation: bool = True
    main_grad: bool = False

    def skips_logits(self, model: PreTrainedModel, call: LossCall) -> bool:
        if call.skip_logits is None:
            return model.training or not self.logits_in_evaluation
        return bool(call.skip_logits)


@dataclass(frozen=True)
class PatchState:
    """What ``patch`` leaves on a model. Copies of a model share it."""

    options: Options
    plan: ForwardPlan | None = (
        None  # None where the model comes from a pickle: found again at the first call
    )
    head: HeadPlan | None = None
    # Set by make_compute_loss_func: training calls without labels answer with HiddenForLoss.
    hands_out_hidden: bool = False
    # Set during a call by the model around it, whose matter the loss is: it wants "logits", or "hidden" states in their place.
    answer: str = ""

    def hands_out(self, model: PreTrainedModel, named: dict[str, Any]) -> bool:
        """Whether the forward answers a call with hidden states of which the loss is made later."""
        if self.answer == "hidden":
            return True
        asked = self.hands_out_hidden and model.training and torch.is_grad_enabled()
        return asked and named.get("labels") is None and named.get("skip_logits") is not False

    def __reduce__(self) -> Any:
        return PatchState, (self.options, None, None, self.hands_out_hidden)

    def __deepcopy__(self, memo: Any) -> PatchState:
        return self


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
    token_weights: torch.Tensor | None = None
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
    """The forward of a class with that plan; ``original`` (unbound) still serves whatever needs logits."""
    _with_accuracy(plan.output_type)  # torch.compile makes no class

    def fused(self: PreTrainedModel, _loss_call: LossCall, **kwargs: Any) -> Any:
        return _without_logits(self, _loss_call, kwargs)

    for decorate in reversed(plan.decorators):
        fused = decorate(fused)

    @functools.wraps(original)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        state: PatchState | None = getattr(self, STATE, None)
        if state is None or state.answer == "logits":
            return original(self, *args, **kwargs)
        if state.plan is None:
            state = found_again(self, plan)
        assert state.plan is not None
        name, named = type(self).__name__, _named(plan, args, kwargs)
        hands_out = state.hands_out(self, named)
        wants_accuracy = state.options.token_accuracy and not hands_out
        call = _loss_call.take(name, plan.parameters, named, wants_accuracy, hands_out)
        if not hands_out and call.is_scored:
            call = _loss_call.of_plan(name, state.plan, call)
        if hands_out or (call.is_scored and state.options.skips_logits(self, call)):
            _check_keywords(plan, args, named)
            return fused(self, _loss_call=call, **named)
        if call.is_scored and not call.is_known_unpatched():
            return with_logits(self, original, state.plan, call, named)
        return original(self, *args, **_loss_call.without_own(plan.parameters, kwargs))

    _loss_call.dress(forward, original)
    return forward


def found_again(model: PreTrainedModel, plan: ForwardPlan) -> PatchState:
    """The state of a model that comes from a pickle."""
    plan = plan_of(model, plan)
    state = dataclasses.replace(
        getattr(model, STATE), plan=plan, head=_heads.find_head(model, plan)
    )
    setattr(model, STATE, state)
    return state


def _without_logits(model: PreTrainedModel, call: LossCall, kwargs: dict[str, Any]) -> Any:
    state: PatchState = getattr(model, STATE)
    plan, head = state.plan, state.head
    assert plan is not None and head is not None
    check_model(model, plan, head)
    arguments, extra = _arguments(plan, kwargs)
    return_dict = extra.pop("return_dict", None)
    if "return_dict" in arguments:
        return_dict = arguments["return_dict"]
        arguments["return_dict"] = True  # for the base model
    if plan.pops_shift_labels:
        extra.pop("shift_labels", None)
    if plan.prepare is not None:
        arguments |= plan.prepare(model, kwargs=extra, **arguments)
    outputs = _call_base(model, plan, arguments, extra)
    hidden = _kept_hidden(model, plan, head, outputs.last_hidden_state, arguments)
    if call.is_handed_out and state.answer != "hidden":
        head.check_after_forward(model)
        return HiddenForLoss(
            hidden=_heads.hidden_of_linear(model, head, hidden),
            shift_labels=call.shift_labels,
            token_weights=call.token_weights,
            compute_dtype=autocast_dtype(hidden.device.type),
            head=_traces(model, head),
        )

    fields = {field: getattr(outputs, source) for field, source in plan.output_fields.items()}
    fields |= dict.fromkeys(plan.output_hidden, hidden)
    if state.answer == "hidden":
        hidden = _heads.hidden_of_linear(model, head, hidden)
        return plan.output_type(logits=hidden, **fields)
    rows = Rows(arguments["labels"], hidden, call, plan.loss == SHIFTED)
    losses = _losses.of_hidden(model, plan, head, rows, state.options.main_grad)
    loss, accuracy = _heads.run_to_linear(model, head, hidden, losses)
    if plan.router is not None and arguments["output_router_logits"]:
        fields["aux_loss"] = _losses.router_loss(model, plan, outputs, arguments["attention_mask"])
        loss = loss + resolve(model, plan.router.weight) * fields["aux_loss"].to(loss.device)
    output = output_of(plan.output_type, accuracy, loss=loss, **fields)
    return as_asked(model, output, return_dict) if plan.returns_tuple else output


def with_logits(
    model: PreTrainedModel,
    original: Callable[..., Any],
    plan: ForwardPlan | None,
    call: LossCall,
    named: dict[str, Any],
) -> Any:
    """What the model's own forward answers, logits among it, with a loss that it does not know."""
    return_dict = named.pop("return_dict", None)
    outputs = original(model, **named, return_dict=True)
    fields = dict(outputs)
    fields.pop("loss", None)
    shifts = plan is None or plan.loss == SHIFTED
    loss, accuracy = _losses.of_logits(outputs.logits, named.get("labels"), call, shifts)
    if plan is not None and plan.router is not None and fields.get("aux_loss") is not None:
        loss = loss + resolve(model, plan.router.weight) * fields["aux_loss"].to(loss.device)
    return as_asked(model, output_of(type(outputs), accuracy, loss=loss, **fields), return_dict)


def output_of(kind: type, accuracy: torch.Tensor | None, **fields: Any) -> Any:
    """An output of that type; of one derived from it, which has `token_accuracy` too, where that was asked for."""
    if accuracy is None:
        return kind(**fields)
    return _with_accuracy(kind)(token_accuracy=accuracy, **fields)


_accurate: dict[type, type] = {}


def _with_accuracy(kind: type) -> type:
    if kind not in _accurate:
        field = ("token_accuracy", "torch.Tensor | None", None)
        space = {"__module__": __name__}
        _accurate[kind] = dataclasses.make_dataclass(
            kind.__name__, [field], bases=(kind,), namespace=space
        )
    return _accurate[kind]


def as_asked(model: PreTrainedModel, output: Any, return_dict: bool | None) -> Any:
    wants_dict = model.config.return_dict if return_dict is None else return_dict
    return output if wants_dict else output.to_tuple()


def losses_of_hidden(
    model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor | None, call: LossCall
) -> Losses:
    """transformers' ForCausalLMLoss of what a patched model has given in the place of logits."""
    state: PatchState = getattr(model, STATE)
    assert state.plan is not None and state.head is not None
    rows = Rows(labels, hidden, call, shifts=True)
    losses = _losses.of_hidden(model, state.plan, state.head, rows, state.options.main_grad)
    found: Losses = _heads.run_at_linear(model, state.head, hidden, losses)
    return found


def _traces(model: PreTrainedModel, head: HeadPlan) -> tuple[torch.Tensor, ...]:
    """Empty views of the head's parameters. DDP looks for what a step uses in the graph of the forward's outputs, and the head
    is used after the forward. A head that FSDP gathers when it is called, or that is offloaded, needs none."""
    if type(head.linear(model)) is not torch.nn.Linear:
        return ()
    return tuple(p[:0] for p in head.parameters(model) if not p.is_meta)


def smoothed_loss(
    model: PreTrainedModel,
    outputs: Any,
    labels: torch.Tensor,
    num_items: torch.Tensor | int | None,
    label_smoothing: float,
    ignore_index: int,
) -> torch.Tensor:
    """Label-smoothed loss of a model's output: from the hidden states where they are there, else from its logits."""
    state: PatchState = getattr(model, STATE)
    plan, head = state.plan, state.head
    assert plan is not None and head is not None
    call = LossCall(ignore_index=ignore_index, num_items=num_items, label_smoothing=label_smoothing)
    shifts = plan.loss in (SHIFTED, MEAN)  # as LabelSmoother does for every causal LM
    if isinstance(outputs, HiddenForLoss) and outputs.hidden is not None:
        call = call._replace(shift_labels=outputs.shift_labels, token_weights=outputs.token_weights)
        rows = Rows(labels, outputs.hidden, call, shifts)
        adds, dtype = state.options.main_grad, outputs.compute_dtype
        losses = _losses.of_hidden(model, plan, head, rows, adds, compute_dtype=dtype)
        loss: torch.Tensor = _heads.run_at_linear(model, head, outputs.hidden, losses)[0]
        return loss
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return _losses.of_logits(logits, labels, call, shifts)[0]


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
        named[name] = value
    return named


def _check_keywords(plan: ForwardPlan, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    for name, value in zip(plan.parameters, args, strict=False):
        if name in plan.renamed and value is not None:
            raise TypeError(f"{name}: expected by keyword, got it by position; it has another name")
    unknown = [name for name in named if name not in plan.parameters and name != "return_dict"]
    if unknown and not plan.takes_kwargs:
        raise TypeError(f"forward got an unexpected keyword argument {unknown[0]!r}")


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
