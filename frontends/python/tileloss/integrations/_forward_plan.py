"""Reads what a causal LM's forward does around its LM head, from its source.

The forwards of transformers' causal LMs are one sentence with few variants: call the base model, keep some positions, apply the
head, perhaps scale or soft-cap the logits, compute the loss, perhaps add a router loss, return. ``read_forward`` matches every
statement against the known variants (``_FORMS``) and answers with a ``ForwardPlan``, plain data from which one generic forward
(``_fused_forward``) does the same without logits. A statement that matches none is refused: a model is never trained on a guess.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class UnknownForward(ValueError):
    """A model's forward does something that the plan cannot express; the message quotes the statement."""


@dataclass(frozen=True)
class RouterLoss:
    """``weight * function(outputs.router_logits, *arguments, attention_mask)``, added when router logits are asked for."""

    function: Callable[..., Any]
    arguments: tuple[str, ...]  # attribute paths on the model
    weight: str


@dataclass(frozen=True)
class ForwardPlan:
    """What a forward does. Paths are attribute paths on the model, such as ``config.logits_scaling``."""

    parameters: dict[str, Any]  # the forward's own parameters in order, with their defaults
    takes_kwargs: bool
    config_defaults: dict[str, str]  # parameter -> path of the value that stands in for None
    base: str  # path of the module that gives the hidden states
    base_positional: tuple[str, ...]  # parameters handed to it by position,
    base_keywords: dict[str, str]  # by keyword (keyword -> parameter),
    base_constants: dict[str, Any]  # and constants
    base_kwargs: bool  # whether it gets **kwargs too
    keep: Callable[..., Any] | None  # (hidden, logits_to_keep) -> the hidden states that are scored
    keeps_only_whole: bool  # ... unless the base model has already left some out
    head: str
    casts_to_head: bool  # hidden states are cast to the head's dtype
    multipliers: tuple[str, ...]  # paths of factors on the logits,
    divisors: tuple[str, ...]  # and of divisors
    hidden_divisors: tuple[str, ...]  # and of divisors of the hidden states, before the head's bias
    softcap: str | None  # path; the value may be None: off
    must_be_zero: tuple[str, ...]  # paths of coefficients of terms that need logits
    router: RouterLoss | None
    output_type: type
    output_fields: dict[str, str]  # field of the output -> field of the base model's output


_PATH = r"self(?:\.\w+|\.get_text_config\(\))+"
_OUTPUT = r"(?P<outputs>\w+)(?:\[0\]|\.last_hidden_state)"
_LOSS = (
    r"loss = self\.loss_function\((?:logits=)?(?P<logits>\w+), (?:labels=)?labels, (?:vocab_size=)?self\.[\w.()]*vocab_size"
    r"(?:, pad_token_id=self\.config\.pad_token_id)?, \*\*kwargs\)"
)

# (stage, kind, pattern of the statement as ast.unparse prints it). Statements come in order of their stage; a stage may repeat
# where _REPEATS says so. The groups outputs, hidden and logits are the forward's variables and mean the same name throughout.
_FORMS: tuple[tuple[int, str, re.Pattern[str]], ...] = tuple(
    (stage, kind, re.compile(pattern))
    for stage, kind, pattern in (
        (
            0,
            "default",
            rf"(?P<name>\w+) = (?P=name) if (?P=name) is not None else (?P<path>{_PATH})",
        ),
        (1, "base", rf"(?P<outputs>\w+) = (?P<base>{_PATH})\(.*\)"),
        (2, "hidden", rf"(?P<hidden>\w+) = {_OUTPUT}(?: / (?P<divisor>{_PATH}))?"),
        (3, "divide_hidden", rf"(?P<hidden>\w+) = (?P=hidden) / (?P<divisor>{_PATH})"),
        (4, "keep", r"(?P<hidden>\w+) = slice_logits_to_keep\((?P=hidden), logits_to_keep\)"),
        (
            4,
            "keep_unless_kept",
            r"if (?P<hidden>\w+)\.shape\[1\] == \(input_ids if input_ids is not None else inputs_embeds\)\.shape\[1\]:\n"
            r"    (?P=hidden) = slice_logits_to_keep\((?P=hidden), logits_to_keep\)",
        ),
        (
            4,  # transformers 5.0 to 5.12
            "slice",
            r"slice_indices = slice\(-logits_to_keep, None\) if isinstance\(logits_to_keep, int\) else logits_to_keep",
        ),
        (
            5,
            "head",
            r"(?P<logits>\w+) = self\.(?P<head>\w+)\((?P<hidden>\w+)(?P<slice>\[:, slice_indices, :\])?"
            r"(?P<cast>\.to\((?:dtype=)?self\.(?P=head)\.weight\.dtype\))?\)"
            rf"(?:\.float\(\)|\.contiguous\(\))?(?: (?P<operator>[*/]) (?P<factor>{_PATH}))?",
        ),
        (6, "scale", rf"(?P<logits>\w+) = (?P=logits) (?P<operator>[*/]) (?P<factor>{_PATH})"),
        (
            7,
            "softcap",
            rf"if (?P<cap>{_PATH}) is not None:\n    (?P<logits>\w+) = (?P=logits)(?:\.float\(\))? / (?P=cap)\n"
            r"    (?P=logits) = torch\.tanh\((?P=logits)\)\n    (?P=logits) = (?P=logits) \* (?P=cap)",
        ),
        (
            7,
            "softcap",
            rf"if \((?P<variable>\w+) := (?P<cap>{_PATH})\) is not None:\n    (?P<logits>\w+) = (?P=logits) / (?P=variable)\n"
            r"    (?P=logits) = torch\.tanh\((?P=logits)\)\n    (?P=logits) = (?P=logits) \* (?P=variable)",
        ),
        (7, "cap_variable", rf"cap = (?P<cap>{_PATH})"),
        (
            8,
            "softcap_by_variable",
            r"(?P<logits>\w+) = nn\.functional\.tanh\((?P=logits) / cap\) \* cap",
        ),
        (9, "no_loss", r"loss = None"),
        (10, "loss", rf"if labels is not None:\n    {_LOSS}"),
        (
            10,
            "loss_with_z",
            rf"if labels is not None:\n    {_LOSS}\n    if (?P<zero>{_PATH}) > 0:\n"
            r"        z_loss = (?P=logits)\.logsumexp\(dim=-1\)\.to\(dtype=loss\.dtype\)\.pow\(2\)\.mean\(\)\n"
            r"        loss = loss \+ (?P=zero) \* z_loss",
        ),
        (11, "no_router", r"aux_loss = None"),
        (
            12,
            "router",
            r"if output_router_logits:\n    aux_loss = (?P<function>\w+)\((?P<outputs>\w+)\.router_logits, "
            rf"(?P<arguments>(?:{_PATH}, )*)attention_mask\)\n"
            rf"    if labels is not None:\n        loss \+= (?P<weight>{_PATH}) \* aux_loss\.to\(loss\.device\)",
        ),
        (
            13,
            "tuple",
            r"if not return_dict:\n    output = \((?P<logits>\w+),\) \+ (?P<outputs>\w+)\[\d+:\]\n"
            r"    return \(loss,\) \+ output if loss is not None else output",
        ),
        (14, "return", r"return \w+\(.*\)"),
    )
)
_REPEATS = (0, 3, 6)
_REQUIRED = ("base", "hidden", "head", "loss", "return")
_VARIABLES = ("outputs", "hidden", "logits")
_DECORATORS = ("can_return_tuple", "auto_docstring")


def read_forward(model_class: type[Any]) -> ForwardPlan:
    """The plan of ``model_class.forward``. Raises UnknownForward, naming class and statement, for what it does not know."""
    return _Reader(model_class).read()


class _Reader:
    def __init__(self, model_class: type[Any]) -> None:
        self.name = model_class.__name__
        self.function: Any = inspect.unwrap(model_class.forward, stop=_is_foreign_wrapper)
        self.found: dict[str, list[tuple[re.Match[str], ast.stmt]]] = {}
        self.variables: dict[str, str] = {}

    def read(self) -> ForwardPlan:
        self._match_statements(self._definition())
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        base_match, base_statement = self.found["base"][0]
        head = self.found["head"][0][0]
        factors = [
            (m["operator"], _relative(m["factor"]))
            for m in self._all("head", "scale")
            if m["factor"]
        ]
        positional, keywords, constants, base_kwargs = self._base_arguments(base_statement)
        return ForwardPlan(
            parameters={
                p.name: None if p.default is p.empty else p.default
                for p in parameters
                if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            },
            takes_kwargs=any(p.kind is p.VAR_KEYWORD for p in parameters),
            config_defaults={m["name"]: _relative(m["path"]) for m in self._all("default")},
            base=_relative(base_match["base"]),
            base_positional=positional,
            base_keywords=keywords,
            base_constants=constants,
            base_kwargs=base_kwargs,
            keep=self._keep(),
            keeps_only_whole="keep_unless_kept" in self.found,
            head=head["head"],
            casts_to_head=head["cast"] is not None,
            multipliers=tuple(path for operator, path in factors if operator == "*"),
            divisors=tuple(path for operator, path in factors if operator == "/"),
            hidden_divisors=tuple(
                _relative(m["divisor"])
                for m in self._all("hidden", "divide_hidden")
                if m["divisor"]
            ),
            softcap=next((_relative(m["cap"]) for m in self._softcaps()), None),
            must_be_zero=tuple(_relative(m["zero"]) for m in self._all("loss_with_z")),
            router=self._router(),
            output_type=self._global(ast.unparse(self._return_call().func)),
            output_fields=self._output_fields(),
        )

    def _definition(self) -> ast.FunctionDef:
        try:
            source = textwrap.dedent(inspect.getsource(self.function))
        except (OSError, TypeError) as error:
            raise UnknownForward(f"{self.name}.forward has no source to read ({error})") from error
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.FunctionDef)
        for decorator in definition.decorator_list:
            if ast.unparse(decorator) not in _DECORATORS:
                raise self._unknown(f"is decorated with @{ast.unparse(decorator)}")
        if _is_foreign_wrapper(self.function):
            raise self._unknown(f"is wrapped by a function of {_module(self.function)}")
        return definition

    def _match_statements(self, definition: ast.FunctionDef) -> None:
        stage = 0
        for statement in definition.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # the docstring
            if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                statement = ast.Assign(
                    targets=[statement.target], value=statement.value, lineno=statement.lineno
                )
            stage = self._match_statement(statement, stage)
        missing = [
            kind
            for kind in _REQUIRED
            if kind not in self.found and f"{kind}_with_z" not in self.found
        ]
        if missing:
            raise self._unknown(f"has no statement of the kind {', '.join(missing)}")

    def _match_statement(self, statement: ast.stmt, stage: int) -> int:
        """Files the statement under its kind; the stage at which the next one may stand."""
        text = ast.unparse(statement)
        for at, kind, pattern in _FORMS:
            match = pattern.fullmatch(text) if at >= stage else None
            if match and self._agrees(match):
                self.found.setdefault(kind, []).append((match, statement))
                return at if at in _REPEATS else at + 1
        raise self._unknown(f"has the statement `{text}` at a place where none such is known")

    def _agrees(self, match: re.Match[str]) -> bool:
        groups = match.groupdict()
        used = {v: groups[v] for v in _VARIABLES if groups.get(v) is not None}
        if any(self.variables.get(v, name) != name for v, name in used.items()):
            return False
        self.variables |= used
        return True

    def _all(self, *kinds: str) -> list[re.Match[str]]:
        return [match for kind in kinds for match, _ in self.found.get(kind, [])]

    def _softcaps(self) -> list[re.Match[str]]:
        by_variable = "softcap_by_variable" in self.found
        return self._all("softcap", "cap_variable") if by_variable else self._all("softcap")

    def _keep(self) -> Callable[..., Any] | None:
        if self.found["head"][0][0]["slice"]:
            return _index_positions
        return (
            self._global("slice_logits_to_keep") if self._all("keep", "keep_unless_kept") else None
        )

    def _base_arguments(
        self, statement: ast.stmt
    ) -> tuple[tuple[str, ...], dict[str, str], dict[str, Any], bool]:
        assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
        call = statement.value
        parameters = inspect.signature(self.function).parameters
        keywords: dict[str, str] = {}
        constants: dict[str, Any] = {}
        kwargs = False
        for keyword in call.keywords:
            if keyword.arg is None and ast.unparse(keyword.value) == "kwargs":
                kwargs = True
            elif keyword.arg and isinstance(keyword.value, ast.Constant):
                constants[keyword.arg] = keyword.value.value
            elif keyword.arg and ast.unparse(keyword.value) in parameters:
                keywords[keyword.arg] = ast.unparse(keyword.value)
            else:
                raise self._unknown(f"hands `{ast.unparse(keyword)}` to its base model")
        positional = tuple(ast.unparse(argument) for argument in call.args)
        for argument in positional:
            if argument not in parameters:
                raise self._unknown(f"hands `{argument}` to its base model")
        return positional, keywords, constants, kwargs

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

    def _output_fields(self) -> dict[str, str]:
        """Fields that come from the base model's output; loss, logits and aux_loss must be the forward's own variables."""
        call = self._return_call()
        own = {
            "loss": ("loss",),
            "logits": (self.variables["logits"],),
            "aux_loss": ("aux_loss", "None"),
        }
        fields = {}
        for keyword in call.keywords:
            text, field = ast.unparse(keyword.value), keyword.arg or "**"
            if text in own.get(field, ()):
                continue
            source, dot, name = text.rpartition(".")
            if not dot or source != self.variables["outputs"]:
                raise self._unknown(f"returns {field}={text}")
            fields[field] = name
        if call.args or not {"loss", "logits"} <= {keyword.arg for keyword in call.keywords}:
            raise self._unknown(f"returns `{ast.unparse(call)}`")
        return fields

    def _global(self, name: str) -> Any:
        return self.function.__globals__[name]

    def _unknown(self, what: str) -> UnknownForward:
        return UnknownForward(f"{self.name}.forward {what}")


def _is_foreign_wrapper(function: Any) -> bool:
    """Whether it wraps a forward (`functools.wraps`) and is none of the known decorators, whose wrappers stand in one module."""
    return hasattr(function, "__wrapped__") and _module(function) != "transformers.utils.generic"


def _module(function: Any) -> str:
    """Where its code stands: `functools.wraps` copies the __module__ of what is wrapped."""
    return str(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))


def _index_positions(hidden: Any, logits_to_keep: Any) -> Any:
    """The last ``logits_to_keep`` positions of hidden [B, T, H] (0: all), or those of an index tensor."""
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return hidden[:, kept, :]


def _relative(path: str) -> str:
    """``self.config.x`` -> ``config.x``."""
    return path.removeprefix("self.")
