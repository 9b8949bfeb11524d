"""Models whose forward calls a whole causal LM and computes the loss of its logits itself (Llama 4 with pictures).

The model inside is patched and, while the one around it trains, answers with the hidden states of its head where its logits would
be. The forward around it runs as it stands, without labels, and hands them on; the loss is then computed from them. So all that
has to be known of that forward is that it does nothing with labels and logits but take the loss of them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from tileloss.integrations import _forward_source, _fused_forward, _loss_call
from tileloss.integrations._forward_forms import FORMS
from tileloss.integrations._forward_source import UnknownForward
from tileloss.integrations._fused_forward import STATE, Options
from tileloss.integrations._loss_call import LossCall

_CALL = re.compile(r"(?P<outputs>\w+) = self\.(?P<inner>\w+)\(.*\)")
_LOGITS = re.compile(r"logits = (?P<outputs>\w+)(?:\[0\]|\.logits)")
_REST = ("no_loss", "loss", "tuple", "return")  # after the logits, in this order


@dataclass(frozen=True)
class InnerState:
    """What ``patch`` leaves on a model around a causal LM."""

    options: Options
    inner: str  # its attribute
    patched_inner: bool  # by that call of patch: unpatch undoes it too


def read_inner(model_class: type[Any]) -> str:
    """The attribute of the causal LM inside. Raises UnknownForward if the class's forward is not of that kind."""
    function, wrappers = _forward_source.own_function(model_class.forward)
    definition = _forward_source.definition_of(function)
    _forward_source.decorators_of(function, definition, wrappers)
    statements = _forward_source.statements_of(definition)
    texts = [ast.unparse(statement) for statement in statements]
    at = next((n for n, text in enumerate(texts) if _LOGITS.fullmatch(text)), 0)
    call, logits = _CALL.fullmatch(texts[at - 1]) if at else None, _LOGITS.fullmatch(texts[at])
    if not call or not logits or call["outputs"] != logits["outputs"]:
        raise UnknownForward("does not take the logits of a model inside")
    kinds = [kind for text in texts[at + 1 :] for kind in _kinds(text) if kind in _REST]
    names = {n.id for s in statements[:at] for n in ast.walk(s) if isinstance(n, ast.Name)}
    returned = statements[-1].value if isinstance(statements[-1], ast.Return) else None
    if (
        kinds not in ([*_REST], [kind for kind in _REST if kind != "tuple"])
        or len(kinds) != len(texts) - at - 1
        or {"labels", "logits", "loss"} & names
        or not isinstance(returned, ast.Call)
        or not all(_is_handed_on(keyword) for keyword in returned.keywords)
        or returned.args
    ):
        raise UnknownForward("does more with labels and logits than to take the loss of them")
    return call["inner"]


def _kinds(text: str) -> list[str]:
    return [kind for _, kind, pattern in FORMS if pattern.fullmatch(text)]


def _is_handed_on(keyword: ast.keyword) -> bool:
    """Whether a field of the output is the loss or the logits, or has nothing to do with them."""
    names = {n.id for n in ast.walk(keyword.value) if isinstance(n, ast.Name)}
    own = keyword.arg in ("loss", "logits") and ast.unparse(keyword.value) == keyword.arg
    return own or not {"labels", "logits", "loss"} & names


def check_model(model: PreTrainedModel, inner: PreTrainedModel) -> None:
    """Raises ValueError where the loss of this very model is another, or where it has logits of another kind."""
    name = type(model).__name__
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{name}.loss_function: expected transformers' ForCausalLMLoss, got {model.loss_function}; tileloss would replace it"
        )
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"{name}: expected a causal LM inside, got {type(inner).__name__}")


def make_forward(path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a class that calls the causal LM at ``path``."""
    parameters = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        state: InnerState | None = getattr(self, STATE, None)
        if state is None:
            return original(self, *args, **kwargs)
        inner: PreTrainedModel = getattr(self, path)
        named = dict(zip(parameters, args, strict=False)) | kwargs
        name = type(self).__name__
        call = _loss_call.take(name, parameters, named, state.options.token_accuracy)
        if call.is_scored and state.options.skips_logits(self, call):
            return _without_logits(self, inner, original, call, named)
        with _answering(inner, "logits"):
            if call.is_scored and not call.is_known_unpatched():
                return _fused_forward.with_logits(self, original, None, call, named)
            return original(self, *args, **_loss_call.without_own(parameters, kwargs))

    _loss_call.dress(forward, original)
    return forward


def _without_logits(
    model: PreTrainedModel,
    inner: PreTrainedModel,
    original: Callable[..., Any],
    call: LossCall,
    named: dict[str, Any],
) -> Any:
    check_model(model, inner)
    labels, return_dict = named.pop("labels", None), named.pop("return_dict", None)
    with _answering(inner, "hidden"):
        output = original(model, **named, return_dict=True)
    fields = dict(output)
    hidden = fields.pop("logits")
    loss, accuracy = _fused_forward.losses_of_hidden(inner, hidden, labels, call)
    output = _fused_forward.output_of(type(output), accuracy, loss=loss, **fields)
    return _fused_forward.as_asked(model, output, return_dict)


class _answering:
    """While it is entered, the patched model inside computes no loss, and answers with logits, or with the hidden states of its
    head in their place."""

    def __init__(self, inner: PreTrainedModel, answer: str) -> None:
        self.inner, self.answer = inner, answer

    def __enter__(self) -> None:
        self._set(self.answer)

    def __exit__(self, *error: Any) -> None:
        self._set("")

    def _set(self, answer: str) -> None:
        state = getattr(self.inner, STATE, None)
        if state is not None:  # else it is not patched any more
            setattr(self.inner, STATE, dataclasses.replace(state, answer=answer))
