"""What of the table stands in Python, arguments and docstrings, and what docs/users say of options."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from option_table import Enum, Function, Option, Struct, Table, TableError

_TYPES = {"double": "float", "scalar": "float | Array", "int64": "int", "flag": "bool"}
# Which function's arguments a public function takes.
TAKES = re.compile(r"\*\*options: Unpack\[(\w+)Arguments\[")
_BLOCK = re.compile(r"(?m)^(    (Options|Tensors|Values of (\w+))\b[^\n]*:\n)(?:        [^\n]*\n)*")
# The only one that a divergence knows is that of the logits.
_NOT_IN_PYTHON = {name: "temperature_on" for name in ("distillation", "sparse_distillation")}


def options(options: Sequence[Option], function: Function) -> list[str]:
    """Fields of a TypedDict. With presets each is None where it was not given."""
    types = {option.name: _TYPES.get(option.type, "str") for option in options}
    absent = {option.name for option in options if option.absent or function.presets}
    left_out = _NOT_IN_PYTHON.get(function.name)
    none = {name: " | None" * (name in absent) for name in types}
    return [f"{name}: {kind}{none[name]}" for name, kind in types.items() if name != left_out]


def row_inputs(_: Sequence[Option], function: Function) -> list[str]:
    """The tensors that may go with the rows, and the preset."""
    names = [f"{tensor.name}: Array | None" for tensor in function.row_inputs]
    return names + ["preset: str | None"] * bool(function.presets)


def names_in_torch(table: Table) -> str:
    """Entries of a dictionary by the ABI's names."""
    renamed = [tensor for tensor in table.tensors if tensor.in_torch]
    return "".join(f'    "{tensor.name}": "{tensor.in_torch}",\n' for tensor in renamed)


def rows(function: Function) -> str:
    """Fields of what it gives of each row; a comment stands above its line where it would make that too long for ruff."""
    text = ""
    for tensor in function.rows:
        field = f"    {tensor.name}: Tensor | None = None"
        dtype, doc = tensor.dtypes.name.replace("uint8", "bool"), tensor.doc.removeprefix("out: ")
        said = f"# {dtype}: {doc}"
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
    """A docstring's blocks "Options...:" are of the function whose arguments are taken before them. JAX's say which options may
    be traced."""

    def block(match: re.Match[str]) -> str:
        above = TAKES.findall(text, 0, match.start())
        if not above:
            raise TableError(f"{match[2]} in a docstring before any arguments")
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", above[-1]).lower()
        options, function = table.options_of(name, _NOT_IN_PYTHON.get(name))
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
