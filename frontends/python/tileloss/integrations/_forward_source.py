"""A forward's source made even: what its decorators do, and its statements with the differences of spelling taken out.

Statements before the call of the base model are not interpreted: they are compiled and run as they stand (``preparation``).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

# Decorators of transformers whose meaning is known, with the module that each has to be from. The first leave the function as it
# is but for its docstring. The others wrap it; they are put around the patched forward anew, so that it is called as the model's
# own is: with the config's defaults, renamed arguments, a tuple where one is asked for.
_DOCUMENT = {
    "auto_docstring": "transformers.utils.auto_docstring",
    "add_start_docstrings_to_model_forward": "transformers.utils.doc",
    "replace_return_docstrings": "transformers.utils.doc",
}
_WRAP = {
    "can_return_tuple": "transformers.utils.generic",
    "merge_with_config_defaults": "transformers.utils.generic",
    "capture_outputs": "transformers.utils.output_capturing",
    "deprecate_kwarg": "transformers.utils.deprecation",
}


class UnknownForward(ValueError):
    """A model's forward does something that the plan cannot express; the message quotes the statement."""


def own_function(function: Any) -> tuple[Any, list[str]]:
    """The function under the wrappers of transformers' decorators, and the modules of those wrappers from the outside."""
    modules = []
    while hasattr(function, "__wrapped__") and module_of(function) in _WRAP.values():
        modules.append(module_of(function))
        function = function.__wrapped__
    return function, modules


def module_of(function: Any) -> str:
    """Where its code stands: `functools.wraps` copies the __module__ of what is wrapped."""
    return str(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))


def definition_of(function: Any) -> ast.FunctionDef:
    """Raises UnknownForward if there is no source."""
    try:
        lines, first = inspect.getsourcelines(function)
        definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise UnknownForward(f"has no source to read ({error})") from error
    if not isinstance(definition, ast.FunctionDef):
        raise UnknownForward("has no source to read (it is no function definition)")
    ast.increment_lineno(definition, first - 1)
    return definition


def decorators_of(
    function: Any, definition: ast.FunctionDef, wrappers: list[str]
) -> tuple[Callable[..., Any], ...]:
    """The decorators that wrap the function, the outermost first; they have to be the ones that ``wrappers`` are from."""
    found: list[tuple[str, Callable[..., Any]]] = []
    for decorator in definition.decorator_list:
        text = ast.unparse(decorator)
        call = decorator if isinstance(decorator, ast.Call) else None
        name = ast.unparse(call.func if call else decorator)
        value = function.__globals__.get(name)
        module = (_DOCUMENT | _WRAP).get(name)
        if module is None or getattr(value, "__module__", None) != module:
            raise UnknownForward(f"is decorated with @{text}")
        if name in _WRAP:
            found.append((module, _called(value, call, text) if call else value))
    if [module for module, _ in found] != wrappers:
        raise UnknownForward(
            f"is wrapped by functions of {wrappers}, other than its decorators say"
        )
    return tuple(decorate for _, decorate in found)


def _called(decorator: Any, call: ast.Call, text: str) -> Any:
    try:
        args = [ast.literal_eval(argument) for argument in call.args]
        keywords = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except ValueError as error:
        raise UnknownForward(f"is decorated with @{text}") from error
    return decorator(*args, **keywords)


def renamed_by(definition: ast.FunctionDef) -> list[str]:
    """The parameters that a decorator knows as names of the past."""
    calls = (d for d in definition.decorator_list if isinstance(d, ast.Call) and d.args)
    return [ast.literal_eval(d.args[0]) for d in calls if ast.unparse(d.func) == "deprecate_kwarg"]


def statements_of(definition: ast.FunctionDef) -> list[ast.stmt]:
    """The body without docstring, annotations, names for a path on the model, and nested ways to write what others write flat."""
    parameters = {a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)}
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    body = _without_aliases([_plain(statement) for statement in body], parameters)
    body = _with_returned_call(body)
    flat = [part for statement in body for part in _split(statement)]
    return list(_with_softcaps(flat))


def _plain(statement: ast.stmt) -> ast.stmt:
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        plain = ast.Assign(targets=[statement.target], value=statement.value)
        return ast.copy_location(plain, statement)
    return statement


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, value) of ``name = value``."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return (statement.targets[0].id, statement.value) if len(statement.targets) == 1 else None
    return None


def _path(value: ast.expr) -> str | None:
    """The text of a path on the model, with ``?`` after one that may be missing, or None."""
    if (
        isinstance(value, ast.Call)
        and ast.unparse(value.func) == "getattr"
        and len(value.args) == 3
        and isinstance(value.args[1], ast.Constant)
        and ast.unparse(value.args[2]) == "None"
    ):
        path = _path(value.args[0])
        return f"{path}.{value.args[1].value!s}?" if path else None
    owner: Any = value
    while isinstance(owner, ast.Attribute) or ast.unparse(owner).endswith(".get_text_config()"):
        owner = owner.func if isinstance(owner, ast.Call) else owner.value
    return ast.unparse(value) if owner is not value and ast.unparse(owner) == "self" else None


class _Names(ast.NodeTransformer):
    """Puts paths in the place of the names that stand for them."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        path = self.paths.get(node.id)
        if path is None:
            return node
        if path.endswith("?"):  # no Python: the forms know it, a preparation refuses it
            return ast.copy_location(ast.Name(path, ast.Load()), node)
        return ast.copy_location(ast.parse(path, mode="eval").body, node)


def _without_aliases(body: list[ast.stmt], parameters: set[str]) -> list[ast.stmt]:
    """Without ``name = self.some.path`` where the name has no other meaning; the path stands wherever the name stood."""
    stores = [_stored(n) for s in body for n in ast.walk(s)]
    names, kept = _Names(), []
    for statement in body:
        name, value = _assigned(statement) or ("", None)
        path = _path(value) if value is not None else None
        if path is not None and name not in parameters and stores.count(name) == 1:
            names.paths[name] = path
        else:
            kept.append(names.visit(statement))
    return kept


def _stored(node: ast.AST) -> str | None:
    """The name that it assigns."""
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None


def _with_returned_call(body: list[ast.stmt]) -> list[ast.stmt]:
    """``name = call; return name`` at the end as ``return call``."""
    *rest, before, last = body if len(body) > 1 else [ast.Pass(), *body, ast.Pass()]
    name, value = _assigned(before) or ("", None)
    if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and last.value.id == name:
        return [*rest, ast.copy_location(ast.Return(value), before)]
    return body


def _split(statement: ast.stmt) -> list[ast.stmt]:
    """``x = f(outputs[0], ...)`` as ``hidden_states = outputs[0]`` and ``x = f(hidden_states, ...)``."""
    name, value = _assigned(statement) or ("", None)
    if not isinstance(value, ast.Call) or not value.args:
        return [statement]
    first = value.args[0]
    if not ast.unparse(first).endswith(("outputs[0]", "outputs.last_hidden_state")):
        return [statement]
    target = name if ast.unparse(value.func) == "slice_logits_to_keep" else "hidden_states"
    hidden = ast.copy_location(ast.Assign([ast.Name(target, ast.Store())], first), statement)
    value.args[0] = ast.copy_location(ast.Name(target, ast.Load()), first)
    return [hidden, statement]


def _with_softcaps(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The three statements of a soft-cap that is always on, as those of one that is on unless its cap is None."""
    at = 0
    while at < len(body):
        three = body[at : at + 3]
        if len(three) == 3 and ast.unparse(three[1]).endswith(" = torch.tanh(logits)"):
            divided = getattr(three[0], "value", None)
            if isinstance(divided, ast.BinOp) and isinstance(divided.op, ast.Div):
                test = ast.Compare(divided.right, [ast.IsNot()], [ast.Constant(None)])
                yield ast.copy_location(ast.If(test, three, []), three[0])
                at += 3
                continue
        yield body[at]
        at += 1


def preparation(
    function: Any, definition: ast.FunctionDef, statements: list[ast.stmt]
) -> Callable[..., dict[str, Any]] | None:
    """The statements as a function of the model and, by name, the forward's parameters and its ``kwargs``, a dict, that answers
    with the parameters that they change. None if there are no statements.

    Raises UnknownForward unless all they do is to change parameters or to raise.
    """
    if not statements:
        return None
    parameters = [p.arg for p in [*definition.args.args, *definition.args.kwonlyargs]]
    if definition.args.kwarg is not None and definition.args.kwarg.arg != "kwargs":
        raise UnknownForward(f"takes **{definition.args.kwarg.arg}, where **kwargs was expected")
    changed: dict[str, None] = {}
    for statement, node in itertools.chain.from_iterable(
        ((s, n) for n in ast.walk(s)) for s in statements
    ):
        name = _stored(node)
        if name in parameters:
            changed[str(name)] = None
        elif _does_more(node) or name is not None:
            raise UnknownForward(
                f"has the statement `{ast.unparse(statement)}` at a place where none such is known"
            )
    names = [*parameters, "kwargs"]
    answer = ast.Dict(
        [ast.Constant(n) for n in changed], [ast.Name(n, ast.Load()) for n in changed]
    )
    run = ast.FunctionDef(
        name="prepare",
        args=ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, []),
        body=[*statements, ast.Return(answer)],
        decorator_list=[],
    )
    return compiled(run, function)


def compiled(definition: ast.FunctionDef, function: Any) -> Callable[..., Any]:
    """The function of that definition, among the globals of ``function``; its lines stay those of the source."""
    module = ast.fix_missing_locations(ast.Module([definition], []))
    space: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, space)
    made: Callable[..., Any] = space[definition.name]
    return made


def _does_more(node: ast.AST) -> bool:
    """Whether it ends the forward, writes to something else than a name, or needs the class around the forward."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    unknown = (
        ast.Return,
        ast.Yield,
        ast.YieldFrom,
        ast.Await,
        ast.Global,
        ast.Nonlocal,
        ast.Delete,
    )
    return isinstance(node, unknown) or (
        isinstance(node, ast.Name) and (node.id == "super" or node.id.endswith("?"))
    )
