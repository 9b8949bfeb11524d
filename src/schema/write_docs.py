"""The tables of options in docs/users."""

from __future__ import annotations

from option_table import Option, Struct


def option_table(struct: Struct) -> str:
    rows = "".join(_row(option) for option in struct.named)
    return f"| option | values | default | what it is |\n|---|---|---|---|\n{rows}"


def _row(option: Option) -> str:
    kinds = {"int64": "an integer", "double": "a number", "scalar": "a number"}
    values = ", ".join(f"`{choice}`" for choice in option.choices)
    if not values:
        values = " ".join(filter(None, [kinds[option.type], option.range.text]))
    default = f"`{option.default_text}`"
    if option.has_absent:
        default = (
            option.absent if option.default is None else f"`{option.default}`: {option.absent}"
        )
    return f"| `{option.name}` | {values} | {default} | {option.doc} |\n"
