"""The LM head of a model: the Linear that makes the logits, and what the hidden states go through on the way to it.

Most heads are one ``torch.nn.Linear``. Of some (BERT, RoBERTa, ...) it is the last step of a module's forward, which is read from
its source: the steps before it are compiled and run as they stand.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import tileloss.torch
from tileloss.integrations import _forward_source, _head_wrappers
from tileloss.integrations._forward_plan import ForwardPlan
from tileloss.integrations._forward_source import UnknownForward

Transform = Callable[[Any, torch.Tensor], torch.Tensor]
Step = tuple[torch.nn.Module, Transform]
Function = Callable[[torch.Tensor], Any]


class Matrices(NamedTuple):
    """What the hidden states are multiplied by."""

    place: str  # the Linear's path, for messages
    weight: Any
    bias: Any
    low_rank: Any  # what LoRA adds, or None
    is_cut: bool  # over the ranks of transformers' tensor parallelism

    def main_grad(self) -> torch.Tensor | None:
        """The weight's, to which its gradient is to be added; None where it gets none.

        Raises ValueError where it has none: what FSDP gathers and what peft merges are not the parameter that has.
        """
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return None
        found: torch.Tensor | None = getattr(self.weight, "main_grad", None)
        if found is None:
            raise ValueError(
                f"{self.place}.weight.main_grad: expected a float32 tensor of the weight's shape, to which "
                "patch(main_grad=True) adds its gradient, got none"
            )
        if (found.dtype, found.shape) != (torch.float32, self.weight.shape):
            raise ValueError(
                f"{self.place}.weight.main_grad: expected float32 {list(self.weight.shape)}, "
                f"got {found.dtype} {list(found.shape)}"
            )
        return found

    def cross_entropy(self, hidden: torch.Tensor, labels: torch.Tensor, **how: Any) -> torch.Tensor:
        loss: torch.Tensor = self._functions().linear_cross_entropy(
            hidden, self.weight, labels, linear_bias=self.bias, **self._of_low_rank(), **how
        )
        return loss

    def correct(self, hidden: torch.Tensor, labels: torch.Tensor, **how: Any) -> torch.Tensor:
        """Whether each label is the likeliest token."""
        rows = self._functions().linear_logprobs(
            hidden,
            self.weight,
            labels,
            linear_bias=self.bias,
            outputs=("correct",),
            **self._of_low_rank(),
            **how,
        )
        correct: torch.Tensor = rows.correct
        return correct

    def _of_low_rank(self) -> dict[str, Any]:
        if self.low_rank is not None and self.is_cut:
            raise ValueError(
                f"{self.place}: expected no LoRA on an LM head that tensor parallelism cuts, got an active adapter"
            )
        return {} if self.low_rank is None else {"low_rank": self.low_rank}

    def _functions(self) -> Any:
        if not self.is_cut:
            return tileloss.torch
        from tileloss.torch import distributed

        return distributed


@dataclass(frozen=True)
class HeadPlan:
    """Where the head is: what the forward calls, and each module within it down to the Linear."""

    before: str | None  # path of a module that comes before all of them
    path: str  # of what the forward calls
    names: tuple[str, ...]  # of the submodule in which the one before it ends
    transforms: tuple[Transform, ...]  # what that one does before it calls it

    @property
    def linear_path(self) -> str:
        return ".".join((self.path, *self.names))

    def steps(self, model: torch.nn.Module) -> tuple[list[Step], Any]:
        """The modules on the way to the Linear, each with its transform, and the Linear."""
        module, steps = model.get_submodule(self.path), []
        for name, transform in zip(self.names, self.transforms, strict=True):
            steps.append((module, transform))
            module = getattr(module, name)
        while (inner := _head_wrappers.inner_of(module)) is not None:
            steps.append((module, _as_it_is))
            module = inner
        return steps, module

    def linear(self, model: torch.nn.Module) -> Any:
        return self.steps(model)[1]

    def matrices(self, model: torch.nn.Module, hidden: torch.Tensor) -> Matrices:
        """Where the Linear would be called, as what stands around it may bring them only then."""
        steps, linear = self.steps(model)
        weight, place = linear.weight, f"{type(model).__name__}.{self.linear_path}"
        _head_wrappers.refuse_meta(place, weight, hidden)
        _head_wrappers.refuse_fsdp1(place, weight)
        low_rank = None
        for module, _ in steps:
            weight = _head_wrappers.with_trained_tokens(module, weight, linear.bias)
            low_rank = low_rank or _head_wrappers.low_rank_of(module, hidden)
        return Matrices(place, weight, linear.bias, low_rank, _head_wrappers.is_cut(linear))

    def parameters(self, model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
        """The Linear's, and those of what is wrapped around it alone."""
        steps, linear = self.steps(model)
        outer = next((module for module, transform in steps if transform is _as_it_is), linear)
        return iter(outer.parameters())

    def check_after_forward(self, model: torch.nn.Module) -> None:
        """Raises ValueError if the Linear is not to be used after the model's forward."""
        steps, linear = self.steps(model)
        place, modules = f"{type(model).__name__}.{self.linear_path}", (m for m, _ in steps)
        _head_wrappers.refuse_fsdp1(place, linear.weight, modules)

    def named_modules(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        """(path, module) of those that are on the way to the Linear, and of it."""
        steps, linear = self.steps(model)
        paths = [".".join((self.path, *self.names[:n])) for n in range(len(self.names) + 1)]
        modules = [*(module for module, _ in steps), linear]
        return itertools.zip_longest(paths, modules, fillvalue=self.linear_path)  # type: ignore[arg-type]


def find_head(model: torch.nn.Module, plan: ForwardPlan) -> HeadPlan:
    """Goes down from the module that the forward calls to a Linear; stays where a module's forward cannot be read, and
    ``check_model`` then refuses what it finds there."""
    head = HeadPlan(plan.before_head, plan.head, (), ())
    while not isinstance(module := head.linear(model), torch.nn.Linear):
        try:
            name, transform = _last_step(type(module).forward)
        except UnknownForward:
            break
        head = HeadPlan(head.before, head.path, (*head.names, name), (*head.transforms, transform))
    return head


def run_to_linear(
    model: torch.nn.Module, head: HeadPlan, hidden: torch.Tensor, function: Function
) -> Any:
    """``function`` of the hidden states that the Linear would get, where the Linear would be called."""
    if head.before is not None:
        hidden = model.get_submodule(head.before)(hidden)
    steps, linear = head.steps(model)
    return _run([*steps, (linear, _as_it_is)], hidden, function)


def hidden_of_linear(model: torch.nn.Module, head: HeadPlan, hidden: torch.Tensor) -> torch.Tensor:
    """The hidden states that the Linear would get."""
    if head.before is not None:
        hidden = model.get_submodule(head.before)(hidden)
    found: torch.Tensor = _run(head.steps(model)[0] if head.names else [], hidden, _same)
    return found


def run_at_linear(
    model: torch.nn.Module, head: HeadPlan, hidden: torch.Tensor, function: Function
) -> Any:
    """``function`` of hidden states that have come as far as the Linear."""
    steps, linear = head.steps(model)
    wrappers = [step for step in steps if step[1] is _as_it_is]
    return _run([*wrappers, (linear, _as_it_is)], hidden, function)


def _run(steps: list[Step], hidden: torch.Tensor, function: Function) -> Any:
    """Each module's transform within the one before it, then the function within the last."""
    if not steps:
        return function(hidden)
    (module, transform), *inner = steps

    def forward(hidden: torch.Tensor) -> Any:
        return _run(inner, transform(module, hidden), function)

    return _head_wrappers.runs_as(module, forward, hidden)


def _same(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def _as_it_is(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return hidden


@functools.cache
def _last_step(function: Callable[..., Any]) -> tuple[str, Transform]:
    """(name of the submodule whose result the module's forward returns, what the forward gives to it).

    Raises UnknownForward where the forward is not a row of assignments that ends so, or where it takes more than one tensor.
    """
    definition = _forward_source.definition_of(function)
    if hasattr(function, "__wrapped__") or definition.decorator_list:
        raise UnknownForward("is decorated")
    body = [s for s in definition.body if not _is_docstring(s)]
    if len(body) > 1 and ast.unparse(body[-1]) == f"return {_target(body[-2])}":
        body[-2:] = [ast.copy_location(ast.Return(body[-2].value), body[-2])]  # type: ignore[attr-defined]
    *before, last = body
    call = last.value if isinstance(last, ast.Return) else None
    takes = [argument.arg for argument in definition.args.args]
    others = [a.arg for a in (definition.args.vararg, definition.args.kwarg) if a]
    if (
        not isinstance(call, ast.Call)
        or len(takes) != 2
        or definition.args.kwonlyargs
        or any(isinstance(n, ast.Name) and n.id in ("super", *others) for n in ast.walk(definition))
        or not (isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self")
        or len(call.args) != 1
        or call.keywords
        or not all(_target(statement) for statement in before)
    ):
        raise UnknownForward("does not end in the call of a module")
    run = ast.FunctionDef(
        name="transform",
        args=ast.arguments([], [ast.arg(name) for name in takes], None, [], [], None, []),
        body=[*before, ast.copy_location(ast.Return(call.args[0]), last)],
        decorator_list=[],
    )
    return call.func.attr, _forward_source.compiled(run, function)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _target(statement: ast.stmt) -> str | None:
    """``name`` of ``name = ...``."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None
