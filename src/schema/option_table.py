"""table.toml as Python values, checked: what is wrong with it is said with the name of the entry."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

TABLE = Path(__file__).with_name("table.toml")
STATE_ARRAYS = ("entropy_sum", "collision_sum", "smoothing_sum", "argmax")
ROLES = ("input", "upstream", "output", "row_output", "gradient")
NUMBERS = ("double", "scalar", "int64")
RANGE = re.compile(r"(>=?) (\S+)|in ([\[(])(\S+), (\S+)\]")
Presets = Mapping[str, Mapping[str, str]]


class TableError(Exception):
    """The entry and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fields of a class are the keys of its entries, and table.toml says what they mean."""

    name: str
    doc: str = ""
    in_c: str = ""
    in_python: str = ""


@dataclass(frozen=True, kw_only=True)
class Enum(Entry):
    prefix: str
    values: Sequence[Entry]


@dataclass(frozen=True, kw_only=True)
class Option(Entry):
    type: str
    enum: Enum | None
    default: float | str | bool | None = None  # None: not given
    absent: str = ""
    range: str = ""
    needs: Sequence[str] = ()
    only_with: Sequence[str] = ()
    count: int = 0
    is_public: bool = True

    @property
    def choices(self) -> Sequence[str]:
        if self.enum is not None:
            return [value.name for value in self.enum.values]
        return ["false", "true"] if self.type == "flag" else []

    @property
    def condition(self) -> str:
        """What `only_with` says."""
        name, choices = self.only_with[:1], self.only_with[1:]
        return f"only with {name[0]} {' or '.join(choices)}" if name else ""

    @property
    def default_text(self) -> str:
        return str(self.default).lower()

    @property
    def default_number(self) -> str:
        """A choice is held as its index."""
        text = self.default_text
        return str(self.choices.index(text)) if self.choices else text


@dataclass(frozen=True, kw_only=True)
class Struct(Entry):
    """The options of a function, or those that all functions share."""

    options_doc: str = ""
    options: Sequence[Option] = ()
    presets: Presets | None = None
    presets_doc: str = ""
    metrics: Enum | None = None

    @property
    def named(self) -> list[Option]:
        return [option for option in self.options if option.type != "reserved"]


@dataclass(frozen=True, kw_only=True)
class Form(Entry):
    """A shape, or types."""

    in_cpp: str = ""
    vector: str = ""
    matrix: str = ""


@dataclass(frozen=True, kw_only=True)
class Tensor(Entry):
    """A member of a function's arguments, also one that is no tensor: it has a type in place of shape and dtypes."""

    shape: Form
    dtypes: Form
    type: str = ""
    role: str = "input"
    group: str = ""
    in_torch: str = ""
    required: bool = False
    passes: str = ""
    needs: Sequence[str] = ()

    @property
    def is_matrix(self) -> bool:
        return "," in self.shape.name

    @property
    def said(self) -> str:
        """Shape, types and meaning."""
        types = f"{self.shape.in_c or f'[{self.shape.name}]'} {self.dtypes.in_c}"
        return "; ".join(filter(None, ["" if self.type else types, self.doc]))


@dataclass(frozen=True, kw_only=True)
class Function(Struct):
    passes: Sequence[str]
    needs_labels: bool
    tensors: Sequence[Tensor]
    linear_doc: str = ""
    pass_first: bool = False
    rows: Sequence[Tensor] = ()

    @property
    def row_inputs(self) -> list[Tensor]:
        """The inputs that may go with the rows."""
        inputs = [t for t in self.tensors if t.role == "input" and not t.required]
        return [tensor for tensor in inputs if tensor.shape.in_python]


@dataclass(frozen=True)
class Table:
    logit: Struct
    linear: Struct
    linear_doc: str
    sections: Sequence[tuple[str, Sequence[Tensor]]]  # of tileloss_args: what is said, members
    tensors: Sequence[Tensor]  # in the order in which they are checked and told of
    functions: Sequence[Function]

    @property
    def structs(self) -> list[Struct]:
        return [self.logit, self.linear, *self.functions]

    def options_of(self, name: str, without: str | None) -> tuple[list[Option], Function]:
        """The options that callers may give to a function, but for those named, "a, b"; and the function."""
        functions = {function.name: function for function in self.functions}
        if (function := functions.get(name)) is None:
            raise TableError(f"no function {name}, there are {', '.join(functions)}")
        options = [*self.logit.named, *function.named]
        left_out = without.split(", ") if without else []
        if unknown := set(left_out) - {option.name for option in options}:
            raise TableError(f"{name} has no option {', '.join(sorted(unknown))}")
        return [o for o in options if o.is_public and o.name not in left_out], function


def read(text: str) -> Table:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"table.toml: {error}") from None
    top = ("shapes", "dtypes", "enum", "shared", "tensor_order", "arguments", "function")
    _check_keys("table.toml", raw, top, top)
    keys = ("tensors", "linear_doc", "logit", "linear")
    _check_keys("shared", raw["shared"], keys, keys)
    sections = []
    for given in raw["arguments"]:
        _check_keys("arguments", given, ("members",), ("doc", "members"))
        members = [_tensor(raw, name, member) for name, member in given["members"].items()]
        sections.append((given.get("doc", ""), members))
    tensors = {tensor.name: tensor for _, members in sections for tensor in members}
    order = raw["tensor_order"]
    is_whole = sorted(order) == sorted(name for name in tensors if not tensors[name].type)
    _expect(is_whole, "tensor_order", "the names of all tensors of arguments, once each", order)
    return Table(
        _struct(Struct, raw, "shared", "logit"),
        _struct(Struct, raw, "shared", "linear"),
        raw["shared"]["linear_doc"],
        sections,
        [tensors[name] for name in order],
        [_function(raw, name, tensors) for name in raw["function"]],
    )


Made = TypeVar("Made", bound=Entry)
MadeStruct = TypeVar("MadeStruct", bound=Struct)


def _made(kind: type[Made], place: str, given: Any, **found: Any) -> Made:
    """An entry with the fields that are given, and with those found elsewhere, which are no keys."""
    known = {field.name: field for field in fields(kind) if field.name not in found}
    needed = [name for name, field in known.items() if field.default is MISSING]
    _check_keys(place, given, needed, known)
    return kind(**found, **given)


def _expect(is_right: object, place: str, expected: str, got: object) -> None:
    if not is_right:
        raise TableError(f"{place}: expected {expected}, got {got}")


def _check_keys(place: str, given: Any, needed: Collection[str], known: Collection[str]) -> None:
    _expect(isinstance(given, dict), place, "a table", repr(given))
    if missing := [key for key in needed if key not in given]:
        raise TableError(f"{place}: {', '.join(missing)} is missing")
    _check(place, list(given), known, "keys among ")


def _check(place: str, given: Any, known: Collection[str], what: str = "") -> None:
    """Refuses a value that is not known, or a list with some that are not."""
    is_list = isinstance(given, list | tuple)
    unknown = [one for one in (given if is_list else [given]) if one not in known]
    got = ", ".join(unknown) if is_list else repr(given)
    _expect(not unknown, place, f"{what}{', '.join(known)}", got)


def _enum(place: str, name: str, given: Any) -> Enum:
    enum, values = _made(Enum, place, given, name=name), list[Entry]()
    _check(f"{place}.in_c", enum.in_c, ("", "elsewhere"))
    for row in given["values"]:
        is_row = 1 <= len(row) <= 3 and all(isinstance(part, str) for part in row)
        _expect(is_row, place, "[name, doc, name in C]", repr(row))
        value, doc, in_c = (*row, "", "", "")[:3]
        in_c = f"TILELOSS_{in_c or enum.prefix + value.upper()}"
        values.append(Entry(name=value, doc=doc, in_c=in_c))
    return replace(enum, values=values)


def _struct(kind: type[MadeStruct], raw: Any, part: str, name: str) -> MadeStruct:
    given, options = raw[part][name], list[Option]()
    struct = _made(kind, f"{part}.{name}", given, name=name)
    enums = {key: _enum(f"enum.{key}", key, entry) for key, entry in raw["enum"].items()}
    for key, entry in given.get("options", {}).items():
        place = f"{part}.{name}.options.{key}"
        if "like" in entry:
            _check_keys(place, entry, (), ("like",))
            like = entry["like"]
            entry = raw["function"].get(like, {}).get("options", {}).get(key)
            _expect(entry, f"{place}: like", "a function with an option of that name", like)
        options.append(_option(place, key, entry, enums))
    choices = {option.name: option.choices for option in options}
    for option in options:
        if option.only_with:
            other, *named = option.only_with
            place = f"{part}.{name}.options.{option.name}: only_with"
            _check(place, other, [one for one, known in choices.items() if known])
            _check(place, named, choices[other], f"choices of {other} among ")
    return replace(struct, options=options)


def _option(place: str, name: str, given: Any, enums: Mapping[str, Enum]) -> Option:
    option = _made(Option, place, given, name=name, enum=enums.get(given.get("type")))
    kind, default, absent, span = option.type, option.default, option.absent, option.range
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    _check(f"{place}: type", kind, (*NUMBERS, "flag", "reserved", *enums))
    _check(f"{place}: needs", option.needs, STATE_ARRAYS)
    if kind == "reserved":
        _check_keys(place, given, (), ("type", "count"))
        return option
    _expect(option.doc, f"{place}: doc", "a sentence", "none")
    if kind in NUMBERS:
        is_right = is_number or (default is None and absent != "" and kind != "int64")
        expected = "a number, or what absent means"
        is_alone = kind == "int64" or not is_number or not absent
        _expect(is_alone, f"{place}: absent", "none beside a default", repr(absent))
        is_range, ranges = RANGE.fullmatch(span), '"> a", ">= a", "in [a, b]" or "in (a, b]"'
        _expect(not span or is_range, f"{place}: range", ranges, repr(span))
    else:
        is_right = default in option.choices if option.enum else isinstance(default, bool)
        expected = ", ".join(option.choices)
        _expect(not span, f"{place}: range", f"none of a {kind}", repr(span))
    _expect(is_right, f"{place}: default", expected, repr(default))
    return option


def _tensor(raw: Any, name: str, given: Any) -> Tensor:
    place = f"arguments.{name}"
    if "type" in given:
        return _made(Tensor, place, given, name=name, shape=Form(name=""), dtypes=Form(name=""))
    tensor, forms = _made(Tensor, place, given, name=name), []
    for key, known in (("shape", raw["shapes"]), ("dtypes", raw["dtypes"])):
        _check(f"{place}: {key}", given[key], known)
        forms.append(_made(Form, f"{key} {given[key]}", known[given[key]], name=given[key]))
    _check(f"{place}: role", tensor.role, ROLES)
    _check(f"{place}: passes", tensor.passes, ("", "vocabulary"))
    _check(f"{place}: needs", tensor.needs, STATE_ARRAYS)
    return replace(tensor, shape=forms[0], dtypes=forms[1])


def _function(raw: Any, name: str, tensors: Mapping[str, Tensor]) -> Function:
    place, given = f"function.{name}", raw["function"][name]
    function = _struct(Function, raw, "function", name)
    choices = {option.name: option.choices for option in function.options}
    for preset, values in (function.presets or {}).items():
        for option, value in values.items():
            _check(f"{place}.presets.{preset}.{option}", value, choices.get(option, ()))
    names = [*given["tensors"], *raw["shared"]["tensors"]]
    _check(f"{place}.tensors", names, tensors)
    metrics = _enum(f"{place}.metrics", "metric", given["metrics"]) if function.metrics else None
    taken = [tensors[each] for each in names]
    outputs = [tensor.name for tensor in taken if tensor.role == "row_output"]
    _check(f"{place}.rows", function.rows, outputs)
    rows = [tensors[str(each)] for each in function.rows or outputs]
    return replace(function, tensors=taken, metrics=metrics, rows=rows)
