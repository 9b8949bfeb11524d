"""Reads what a causal LM's forward does around its LM head, from its source.

The forwards of transformers' causal LMs are one sentence with few variants: call the base model, keep some positions, apply the
head, perhaps scale or soft-cap the logits, compute the loss, perhaps add a router loss, return. ``read_forward`` matches every
statement from the call of the base model on against the known variants (``_forward_forms``) and answers with a ``ForwardPlan``,
plain data from which one generic forward (``_fused_forward``) does the same without logits. A statement that matches none is
refused: a model is never trained on a guess.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloss.integrations import _forward_source
from tileloss.integrations._forward_forms import FORMS, REPEATS, REQUIRED, VARIABLES
from tileloss.integrations._forward_source import UnknownForward

# ForwardPlan.loss: which of transformers' losses, of which labels.
SHIFTED = "ForCausalLMLoss"  # labels shifted by one, or the call's shift_labels
GIVEN = "ForCausalLMLoss of labels as they are"
MASKED = "ForMaskedLMLoss"  # labels as they are, where the model's loss_type says so
MEAN = "torch.nn.CrossEntropyLoss"  # of labels as they are; no option of the call reaches it


@dataclass(frozen=True)
class RouterLoss:
    """``weight * function(outputs.router_logits, *arguments, attention_mask)``, added when router logits are asked for."""

    function: Callable[..., Any]
    arguments: tuple[str, ...]  # attribute paths on the model
    weight: str


@dataclass(frozen=True)
class ForwardPlan:
    """What a forward does. Paths are attribute paths on the model, such as ``config.logits_scaling``; the value of one that ends
    in ``?`` may be None or missing, and its step is then left out."""

    parameters: dict[str, Any]  # the forward's own parameters in order, with their defaults
    takes_kwargs: bool
    decorators: tuple[Callable[..., Any], ...]  # transformers' own around it, the outermost first
    renamed: tuple[str, ...]  # parameters that a decorator renames, where given by keyword
    prepare: Callable[..., dict[str, Any]] | None  # what is done to the arguments first
    pops_shift_labels: bool  # the base model does not get them
    base: str  # path of the module that gives the hidden states
    base_positional: tuple[str, ...]  # parameters handed to it by position,
    base_keywords: dict[str, str]  # by keyword (keyword -> parameter),
    base_constants: dict[str, Any]  # and constants
    base_kwargs: bool  # whether it gets **kwargs too
    keep: Callable[..., Any] | None  # (hidden, logits_to_keep) -> the hidden states that are scored
    keeps_only_whole: bool  # ... unless the base model has already left some out
    before_head: str | None  # path of a module that the hidden states go through before the head
    head: str
    casts_to_head: bool  # hidden states are cast to the head's dtype
    multipliers: tuple[str, ...]  # paths of factors on the logits,
    divisors: tuple[str, ...]  # and of divisors
    hidden_divisors: tuple[str, ...]  # and of divisors of the hidden states, before the head's bias
    softcap: str | None  # path; the value may be None: off
    vocab: str | None  # path of how many columns of the logits there are; None, or a None: all
    loss: str
    vocab_of_view: str | None  # path of the size to which MEAN's logits are folded
    must_be_zero: tuple[str, ...]  # paths of coefficients of terms that need logits
    router: RouterLoss | None
    returns_tuple: bool  # by hand, if return_dict asks for it
    output_type: type
    output_fields: dict[str, str]  # field of the output -> field of the base model's output
    output_hidden: tuple[str, ...]  # fields of the output that are the scored hidden states


def read_forward(model_class: type[Any]) -> ForwardPlan:
    """The plan of ``model_class.forward``. Raises UnknownForward, naming class and statement, for what it does not know."""
    try:
        return _Reader(model_class.forward).read()
    except UnknownForward as error:
        raise UnknownForward(f"{model_class.__name__}.forward {error}") from error.__cause__


class _Reader:
    def __init__(self, forward: Any) -> None:
        self.function, self.wrappers = _forward_source.own_function(forward)
        module = _forward_source.module_of(self.function)
        if module.startswith("liger_kernel"):
            raise UnknownForward(
                f"is Liger's, {module}: of the two, use one (fused_linear_cross_entropy=False keeps Liger's other kernels)"
            )
        if hasattr(self.function, "__wrapped__"):
            raise UnknownForward(f"is wrapped by a function of {module}")
        self.signature = inspect.signature(self.function).parameters
        self.found: dict[str, list[tuple[re.Match[str], ast.stmt]]] = {}
        self.variables: dict[str, str] = {}
        self.preparation: list[ast.stmt] = []

    def read(self) -> ForwardPlan:
        definition = _forward_source.definition_of(self.function)
        decorators = _forward_source.decorators_of(self.function, definition, self.wrappers)
        self._match_statements(_forward_source.statements_of(definition))
        parameters = list(self.signature.values())[1:]
        base_match, base_statement = self.found["base"][0]
        head = self._one("head", "head_after_module")
        factors = [
            (m["operator"], _relative(m["factor"]) + maybe)
            for kind, maybe in (("head", ""), ("scale", ""), ("scale_unless_none", "?"))
            for m in self._all(kind)
            if m["factor"]
        ]
        positional, keywords, constants, base_kwargs = self._base_arguments(base_statement)
        loss, vocab_of_view = self._loss()
        fields, hidden_fields = self._output_fields()
        return ForwardPlan(
            parameters={
                p.name: None if p.default is p.empty else p.default
                for p in parameters
                if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            },
            takes_kwargs=any(p.kind is p.VAR_KEYWORD for p in parameters),
            decorators=decorators,
            renamed=tuple(_forward_source.renamed_by(definition)),
            prepare=_forward_source.preparation(self.function, definition, self.preparation),
            pops_shift_labels="pop_shift_labels" in self.found,
            base=_relative(base_match["base"]),
            base_positional=positional,
            base_keywords=keywords,
            base_constants=constants,
            base_kwargs=base_kwargs,
            keep=self._keep(),
            keeps_only_whole="keep_unless_kept" in self.found,
            before_head=head.groupdict().get("before"),
            head=head["head"],
            casts_to_head=head.groupdict().get("cast") is not None,
            multipliers=tuple(path for operator, path in factors if operator == "*"),
            divisors=tuple(path for operator, path in factors if operator == "/"),
            hidden_divisors=tuple(
                _relative(m["divisor"])
                for m in self._all("hidden", "divide_hidden")
                if m["divisor"]
            ),
            softcap=next((_relative(m["cap"]) for m in self._all("softcap")), None),
            vocab=next((_relative(m["vocab"]) for m in self._all("cut")), None),
            loss=loss,
            vocab_of_view=vocab_of_view,
            must_be_zero=tuple(_relative(m["zero"]) for m in self._all("loss_with_z")),
            router=self._router(),
            returns_tuple="tuple" in self.found,
            output_type=self._global(ast.unparse(self._return_call().func)),
            output_fields=fields,
            output_hidden=hidden_fields,
        )

    def _match_statements(self, statements: list[ast.stmt]) -> None:
        stage = 0
        for statement in statements:
            stage = self._match_statement(statement, stage)
        missing = [kinds[0] for kinds in REQUIRED if not any(k in self.found for k in kinds)]
        if missing:
            raise UnknownForward(f"has no statement of the kind {', '.join(missing)}")

    def _match_statement(self, statement: ast.stmt, stage: int) -> int:
        """Files the statement under its kind; the stage at which the next one may stand."""
        text = ast.unparse(statement)
        for at, kind, pattern in FORMS:
            match = pattern.fullmatch(text) if at >= stage else None
            if match and self._agrees(match):
                self.found.setdefault(kind, []).append((match, statement))
                return at if at in REPEATS else at + 1
        if "base" in self.found:
            raise UnknownForward(f"has the statement `{text}` at a place where none such is known")
        self.preparation.append(statement)
        return stage

    def _agrees(self, match: re.Match[str]) -> bool:
        groups = match.groupdict()
        used = {v: groups[v] for v in VARIABLES if groups.get(v) is not None}
        if any(self.variables.get(v, name) != name for v, name in used.items()):
            return False
        if any(name in self.signature for name in used.values()):
            return False  # what changes a parameter is no call of the base model
        self.variables |= used
        return True

    def _all(self, *kinds: str) -> list[re.Match[str]]:
        return [match for kind in kinds for match, _ in self.found.get(kind, [])]

    def _one(self, *kinds: str) -> re.Match[str]:
        return self._all(*kinds)[0]

    def _keep(self) -> Callable[..., Any] | None:
        if any(head["slice"] for head in self._all("head")):
            return _index_positions
        return (
            self._global("slice_logits_to_keep") if self._all("keep", "keep_unless_kept") else None
        )

    def _base_arguments(
        self, statement: ast.stmt
    ) -> tuple[tuple[str, ...], dict[str, str], dict[str, Any], bool]:
        assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
        call = statement.value
        keywords: dict[str, str] = {}
        constants: dict[str, Any] = {}
        kwargs = False
        for keyword in call.keywords:
            if keyword.arg is None and ast.unparse(keyword.value) == "kwargs":
                kwargs = True
            elif keyword.arg and isinstance(keyword.value, ast.Constant):
                constants[keyword.arg] = keyword.value.value
            elif keyword.arg and ast.unparse(keyword.value) in self.signature:
                keywords[keyword.arg] = ast.unparse(keyword.value)
            else:
                raise UnknownForward(f"hands `{ast.unparse(keyword)}` to its base model")
        positional = tuple(ast.unparse(argument) for argument in call.args)
        for argument in positional:
            if argument not in self.signature:
                raise UnknownForward(f"hands `{argument}` to its base model")
        return positional, keywords, constants, kwargs

    def _loss(self) -> tuple[str, str | None]:
        """Which loss it is, and for torch's own the size to which the logits are folded."""
        if "loss_of_torch" in self.found:
            if self._global("CrossEntropyLoss") is not torch.nn.CrossEntropyLoss:
                raise UnknownForward("has a CrossEntropyLoss that is not torch.nn's")
            return MEAN, self._one("loss_of_torch")["view"]
        if ("loss_of_popped" in self.found) != ("pop_shift_labels" in self.found):
            raise UnknownForward("takes shift_labels out of its arguments, and not into its loss")
        given = self._all("loss_of_given", "loss_of_popped")
        return (GIVEN if given else SHIFTED), None

    def _router(self) -> RouterLoss | None:
        if "router" not in self.found:
            return None
        match = self._all("router")[0]
        arguments = tuple(_relative(path) for path in match["arguments"].split(", ") if path)
        function = self._global(match["function"])
        return RouterLoss(function=function, arguments=arguments, weight=_relative(match["weight"]))

    def _return_call(self) -> ast.Call:
        statement = self.found["return"][0][1]
        assert isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call)
        return statement.value

    def _output_fields(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Fields that come from the base model's output, and those that are the scored hidden states; loss, logits and aux_loss
        must be the forward's own variables."""
        call = self._return_call()
        own = {
            "loss": ("loss",),
            "logits": (self.variables["logits"],),
            "aux_loss": ("aux_loss", "None"),
        }
        fields, hidden = {}, []
        for keyword in call.keywords:
            text, field = ast.unparse(keyword.value), keyword.arg or "**"
            if text in own.get(field, ()):
                continue
            if text == self.variables["hidden"] and self._plain_hidden():
                hidden.append(field)
                continue
            source, dot, name = text.rpartition(".")
            if not dot or source != self.variables["outputs"]:
                raise UnknownForward(f"returns {field}={text}")
            fields[field] = name
        if call.args or not {"loss", "logits"} <= {keyword.arg for keyword in call.keywords}:
            raise UnknownForward(f"returns `{ast.unparse(call)}`")
        return fields, tuple(hidden)

    def _plain_hidden(self) -> bool:
        """Whether the forward's variable is what the plan scores, not what is yet to be divided, cast or cut for the head."""
        divided = any(m["divisor"] for m in self._all("hidden", "divide_hidden"))
        return not divided and not any(m["slice"] or m["cast"] for m in self._all("head"))

    def _global(self, name: str) -> Any:
        return self.function.__globals__[name]


def _index_positions(hidden: Any, logits_to_keep: Any) -> Any:
    """The last ``logits_to_keep`` positions of hidden [B, T, H] (0: all), or those of an index tensor."""
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return hidden[:, kept, :]


def _relative(path: str) -> str:
    """``self.config.x`` -> ``config.x``."""
    return path.removeprefix("self.")
