"""What of the table stands in Python: arguments with their defaults, what docstrings say of them, values by name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence

from option_table import Function, Option, Table, TableError

# Not for callers: those of a vocabulary cut into shards, which the front ends find themselves.
_NOT_PUBLIC = ("vocab_start", "vocab_total")
_TYPES = {"double": "float", "scalar": "Number", "int64": "int", "flag": "bool"}
_OF_OPTIONS = r"of (\w+)(?: but ([\w, ]+))?"
_ARGUMENTS = re.compile(rf"# generated: arguments {_OF_OPTIONS}\n")
_BLOCK = re.compile(r"(?m)^(    Options\b[^\n]*:\n)(?:        [^\n]*\n)*")


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


REGIONS: dict[str, Callable[[Sequence[Option], Function], list[str]]] = {
    "arguments": arguments,
    "stubs": stubs,
    "values": values,
}


def region(what: str, table: Table) -> list[str]:
    """The lines of "NAME of FUNCTION" or "NAME of FUNCTION but OPTION, OPTION"; none where it is something else."""
    match = re.fullmatch(rf"(\w+) {_OF_OPTIONS}", what)
    if match is None or match[1] not in REGIONS:
        return []
    return REGIONS[match[1]](*_options(match[2], match[3], table))


def _options(name: str, without: str | None, table: Table) -> tuple[list[Option], Function]:
    functions = {function.name: function for function in table.functions}
    if name not in functions:
        raise TableError(f"no function {name}, there are {', '.join(functions)}")
    every = (*table.logit.named, *functions[name].struct.named)
    left_out = without.split(", ") if without else []
    if unknown := set(left_out) - {option.name for option in every}:
        raise TableError(f"{name} has no option {', '.join(sorted(unknown))}")
    public = [option for option in every if option.name not in (*_NOT_PUBLIC, *left_out)]
    return public, functions[name]


def _said(option: Option) -> str:
    has_names = option.choices and option.type != "flag"
    choices = f"one of {', '.join(option.choices)}" if has_names else ""
    default = f"None: {option.absent}" if option.has_absent else f"default {option.in_python}"
    parts = [option.doc, choices, option.range.text, default]
    return _entry(f"{option.name}: {'; '.join(filter(None, parts))}.")


def _entry(text: str) -> str:
    return textwrap.fill(text, 128, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"


def with_docstrings(path: str, text: str, table: Table) -> str:
    """A docstring's block "Options...:" is of the arguments that are generated before it."""

    def block(match: re.Match[str]) -> str:
        above = list(_ARGUMENTS.finditer(text, 0, match.start()))
        if not above:
            raise TableError(f"{path}: Options in a docstring before any generated arguments")
        options, function = _options(above[-1][1], above[-1][2], table)
        lines = [_said(option) for option in options]
        if function.presets:
            names = f"preset: {', '.join(function.presets)}: the method's name"
            lines.insert(
                0, _entry(f"{names}, and what it sets of these; one that is given counts.")
            )
        return match[1] + "".join(lines)

    return _BLOCK.sub(block, text)
