"""What of the table stands in Python, arguments and docstrings, and what docs/users say of options."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from option_table import Enum, Function, Option, Struct, Table, TableError
from write_c import packed

_TYPES = {"double": "float", "scalar": "Number", "int64": "int", "flag": "bool"}
_ARGUMENTS = re.compile(r"# generated: (?:arguments|signature) of (\w+)(?: but ([\w, ]+))?\n")
_BLOCK = re.compile(r"(?m)^(    (Options|Tensors|Values of (\w+))\b[^\n]*:\n)(?:        [^\n]*\n)*")


def _argument(option: Option, function: Function, value: str = "") -> str:
    """name: type = default. With presets each is None where it was not given."""
    kind, default = _TYPES.get(option.type, "str"), option.default
    if option.absent or function.presets:
        kind, default = f"{kind} | None", None
    elif kind in ("float", "Number"):
        default = float(default or 0)
    text = f'"{default}"' if isinstance(default, str) else str(default)
    return f"{option.name}: {kind} = {value or text},"


def options(options: Sequence[Option], function: Function, value: str = "") -> list[str]:
    """Of a signature, a line each."""
    return [_argument(option, function, value) for option in options]


def arguments(given: Sequence[Option], function: Function, value: str = "") -> list[str]:
    """The same, with the tensors that may go with the rows, and the preset, before them."""
    names = [f"{tensor.name}: Tensor" for tensor in function.row_inputs]
    names += ["preset: str"] if function.presets else []
    before = [f"{name} | None = {value or None}," for name in names]
    return before + options(given, function, value)


def signature(options: Sequence[Option], function: Function) -> list[str]:
    """The same, as many on a line as fit."""
    return packed(arguments(options, function), 126)


def stubs(options: Sequence[Option], function: Function) -> list[str]:
    """The same of an overload, which is for type checkers alone."""
    return packed(arguments(options, function, "..."), 126)


def names(options: Sequence[Option], function: Function) -> list[str]:
    """The same of a call that hands them on."""
    given = [line.partition(":")[0] for line in arguments(options, function)]
    return packed([f"{name}={name}," for name in given], 118)


def values(options: Sequence[Option], function: Function) -> list[str]:
    """Entries of a dictionary, of all inputs but the logits and of the options, in PyTorch's names."""
    inputs = [
        t for t in function.tensors if t.role == "input" and not t.type and t.name != "logits"
    ]
    found = [(tensor.name, tensor.in_torch or tensor.name) for tensor in inputs]
    found += [(option.name, option.name) for option in options]
    return [f'"{name}": {given},' for name, given in found]


def names_in_torch(table: Table) -> str:
    """Entries of a dictionary by the ABI's names."""
    renamed = [tensor for tensor in table.tensors if tensor.in_torch]
    return "".join(f'    "{tensor.name}": "{tensor.in_torch}",\n' for tensor in renamed)


def row_outputs(table: Table) -> str:
    """Fields of what logprobs gives; a comment stands above its line where it would make that too long for ruff."""
    text = ""
    for tensor in (tensor for _, members in table.sections for tensor in members):
        if tensor.role == "row_output" and not tensor.group:
            field = f"    {tensor.name}: Tensor | None = None"
            said = f"# {tensor.dtypes.name.replace('uint8', 'bool')}: {tensor.doc}"
            fits = len(field) + 2 + len(said) <= 100
            text += f"{field}  {said}\n" if fits else f"    {said}\n{field}\n"
    return text


def _entry(name: str, *parts: str) -> str:
    text = f"{name}: {'; '.join(filter(None, parts))}."
    return textwrap.fill(text, 128, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"


def _option(option: Option, in_jax: bool) -> str:
    choices = f"one of {', '.join(option.choices)}" if option.enum else ""
    default = f"default {option.in_python or option.default}"
    if option.absent:
        default = f"None: {option.absent}"
    traced = ("traceable" if option.type == "scalar" else "static") if in_jax else ""
    return _entry(option.name, option.doc, choices, option.range, default, option.condition, traced)


def _entries(
    what: str, named: str, options: Sequence[Option], function: Function, in_jax: bool
) -> list[str]:
    if what == "Tensors":  # that may go with the rows
        return [
            _entry(t.name, f"{t.shape.in_python}, {t.dtypes.in_python}", t.doc)
            for t in function.row_inputs
        ]
    if what != "Options":
        for option in options:
            if option.name == named and option.enum:
                return [_entry(value.name, value.doc) for value in option.enum.values]
        raise TableError(f"{function.name} has no option {named} with values")
    entries = [_option(option, in_jax) for option in options]
    if function.presets:
        said = "a method's name, which sets these; an option that is given overrides it"
        about = " ".join(function.presets_doc.split())
        entries.insert(0, _entry("preset", f"{', '.join(function.presets)}: {said}", about))
    return entries


def with_docstrings(text: str, table: Table, in_jax: bool) -> str:
    """A docstring's blocks "Options...:" are of the function whose arguments are generated before them. JAX's say which options
    may be traced."""

    def block(match: re.Match[str]) -> str:
        above = list(_ARGUMENTS.finditer(text, 0, match.start()))
        if not above:
            raise TableError(f"{match[2]} in a docstring before any generated arguments")
        options, function = table.options_of(above[-1][1], above[-1][2])
        return match[1] + "".join(_entries(match[2], match[3], options, function, in_jax))

    return _BLOCK.sub(block, text)


def metrics_table(metrics: Enum) -> str:
    rows = [f"| `{each.name}` | {each.doc} |\n" for each in metrics.values]
    return "".join(["| metric | what it is |\n|---|---|\n", *rows])


def option_table(struct: Struct) -> str:
    """Of docs/users."""
    text = "| option | values | default | what it is |\n|---|---|---|---|\n"
    for option in struct.named:
        kind = "an integer" if option.type == "int64" else "a number"
        values = ", ".join(f"`{choice}`" for choice in option.choices)
        values = values or f"{kind} {option.range}".strip()
        default = [f"`{option.default_text}`"] if option.default is not None else []
        default += [option.absent] if option.absent else []
        said = "; ".join(filter(None, [option.doc, option.condition]))
        text += f"| `{option.name}` | {values} | {': '.join(default)} | {said} |\n"
    return text
