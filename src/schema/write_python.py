"""What of the table stands in Python: arguments with their defaults, what docstrings say of them, values by name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from option_table import Function, Option, Table, TableError

_TYPES = {"double": "float", "scalar": "Number", "int64": "int", "flag": "bool"}
_ARGUMENTS = re.compile(r"# generated: arguments of (\w+)(?: but ([\w, ]+))?\n")
_BLOCK = re.compile(r"(?m)^(    (Options|Tensors)\b[^\n]*:\n)(?:        [^\n]*\n)*")
_SHAPES = {"N": "[...] or flat [N]", "B+1": "[B+1]"}
_DTYPES = {"float32": "converted to float32", "numbers": "any numbers", "integers": "integers"}


def _argument(option: Option, function: Function, value: str = "") -> str:
    """name: type = default. With presets each is None where it was not given."""
    kind, default = _TYPES.get(option.type, "str"), option.default
    if option.has_absent or function.presets:
        return f"{option.name}: {kind} | None = {value or 'None'}"
    if isinstance(default, str):
        default = f'"{default}"'
    elif kind in ("float", "Number"):
        default = float(default or 0)
    return f"{option.name}: {kind} = {value or default}"


def arguments(options: Sequence[Option], function: Function) -> list[str]:
    """Of a signature, a line each."""
    return [f"{_argument(option, function)}," for option in options]


def stubs(options: Sequence[Option], function: Function) -> list[str]:
    """The same of an overload, which is for type checkers alone."""
    lines = [""]
    for part in (f"{_argument(option, function, '...')}," for option in options):
        if len(lines[-1]) + 1 + len(part) > 126:
            lines.append("")
        lines[-1] = f"{lines[-1]} {part}".strip()
    return lines


def values(options: Sequence[Option], function: Function) -> list[str]:
    """Entries of a dictionary."""
    return [f'"{option.name}": {option.name},' for option in options]


def _said(option: Option) -> str:
    has_names = option.choices and option.type != "flag"
    choices = f"one of {', '.join(option.choices)}" if has_names else ""
    default = f"None: {option.absent}" if option.has_absent else f"default {option.in_python}"
    parts = [option.doc, choices, option.range.text, default]
    return _entry(f"{option.name}: {'; '.join(filter(None, parts))}.")


def _tensors(function: Function) -> list[str]:
    """What may go with the rows."""
    return [
        _entry(f"{t.name}: {_SHAPES[t.shape]}, {_DTYPES[t.dtypes]}; {t.doc}.")
        for t in function.tensors
        if t.role == "input" and t.shape in _SHAPES and not t.required
    ]


def row_outputs(table: Table) -> str:
    """Fields of what logprobs gives; a comment stands above its line where it would make that too long for ruff."""
    text = ""
    for tensor in (t for section in table.arguments for t in section.members):
        if tensor.role == "row_output" and not tensor.group:
            field = f"    {tensor.name}: Tensor | None = None"
            said = f"# {tensor.dtypes.replace('uint8', 'bool')}: {tensor.doc}"
            fits = len(field) + 2 + len(said) <= 100
            text += f"{field}  {said}\n" if fits else f"    {said}\n{field}\n"
    return text


def _entry(text: str) -> str:
    return textwrap.fill(text, 128, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"


def with_docstrings(path: str, text: str, table: Table) -> str:
    """A docstring's blocks "Options...:" and "Tensors...:" are of the function whose arguments are generated before them."""

    def block(match: re.Match[str]) -> str:
        above = list(_ARGUMENTS.finditer(text, 0, match.start()))
        if not above:
            raise TableError(f"{path}: {match[2]} in a docstring before any generated arguments")
        options, function = table.options_of(above[-1][1], above[-1][2])
        if match[2] == "Tensors":
            return match[1] + "".join(_tensors(function))
        lines = [_said(option) for option in options]
        if function.presets:
            names = f"preset: {', '.join(function.presets)}: the method's name"
            lines.insert(
                0, _entry(f"{names}, and what it sets of these; one that is given counts.")
            )
        return match[1] + "".join(lines)

    return _BLOCK.sub(block, text)
