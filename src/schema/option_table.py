"""table.toml as Python values, checked: what is wrong with it is said with the name of the entry."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("table.toml")
STATE_ARRAYS = ("entropy_sum", "collision_sum", "smoothing_sum", "argmax")
# Not for callers: those of a vocabulary cut into shards, which the front ends find themselves.
NOT_PUBLIC = ("vocab_start", "vocab_total")
DTYPES = {
    "float32": ("float32",),
    "floats": ("float32", "bfloat16", "float16"),
    "integers": ("int32", "int64"),
    "numbers": ("uint8", "int32", "int64", "float32"),
    "int64": ("int64",),
    "uint8": ("uint8",),
}
# The letters of tileloss_tensor.shape, and the enumerators of tensors.h's Shape.
SHAPES = {
    "N": "Rows",
    "C": "Classes",
    "V": "Columns",
    "L": "Losses",
    "B+1": "SequenceOffsets",
    "B|N": "Advantages",
    "M": "Metrics",
    "N,V": "Logits",
    "N,H": "Hidden",
    "V,H": "Head",
    "N,G": "TeacherHidden",
    "V,G": "TeacherHead",
    "N,K": "TeacherColumns",
}
ROLES = ("input", "upstream", "output", "row_output", "gradient")
NUMBERS = ("double", "scalar", "int64")
_RANGE = re.compile(r"(>=?) (\S+)|([\[(])(\S+), (\S+)\]")


class TableError(Exception):
    """The entry and what is wrong with it."""


@dataclass(frozen=True)
class Value:
    """An enumerator, or a metric."""

    name: str
    doc: str
    in_c: str


@dataclass(frozen=True)
class Enum:
    name: str
    doc: str
    is_elsewhere: bool  # declared by hand
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Range:
    text: str = ""
    minimum: float | None = None
    maximum: float | None = None
    is_above: bool = False  # the minimum itself is outside


@dataclass(frozen=True)
class Option:
    name: str
    type: str
    default: float | str | bool | None  # None: not given
    absent: str
    range: Range
    needs: tuple[str, ...]
    doc: str
    in_python: str  # what a default of None stands for there
    count: int  # of reserved numbers; 0: one of 32 bits
    enum: Enum | None

    @property
    def is_reserved(self) -> bool:
        return self.type == "reserved"

    @property
    def has_absent(self) -> bool:
        return self.default is None or bool(self.absent)

    @property
    def choices(self) -> tuple[str, ...]:
        if self.enum is not None:
            return tuple(value.name for value in self.enum.values)
        return ("false", "true") if self.type == "flag" else ()

    @property
    def default_text(self) -> str:
        """The default in words; "" where the option is given always."""
        if self.default is None:
            return self.absent
        text = str(self.default).lower() if self.type == "flag" else f"{self.default}"
        return f"{text}: {self.absent}" if self.absent else text


@dataclass(frozen=True)
class Struct:
    """The options of a function, or those that all functions share."""

    name: str
    doc: str
    options: tuple[Option, ...]

    @property
    def named(self) -> tuple[Option, ...]:
        return tuple(option for option in self.options if not option.is_reserved)


@dataclass(frozen=True)
class Tensor:
    """A member of a function's arguments; one without a shape has a type of its own."""

    name: str
    doc: str
    type: str = ""
    shape: str = ""
    dtypes: str = ""
    role: str = "input"
    group: str = ""
    required: bool = False
    passes: str = ""
    needs: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> bool:
        return "," in self.shape

    @property
    def said(self) -> str:
        """Shape, types and meaning."""
        sizes = {
            "L": "[1] or [N]",
            "C": "[classes]",
            "B|N": "[B] or [N]",
            "M": "[TILELOSS_POLICY_METRICS]",
        }
        size = sizes.get(self.shape, f"[{self.shape}]")
        types = f"{size} {', '.join(DTYPES[self.dtypes])}" if self.shape else ""
        return "; ".join(filter(None, [types, self.doc]))


@dataclass(frozen=True)
class Section:
    """Of tileloss_args."""

    doc: str
    members: tuple[Tensor, ...]


@dataclass(frozen=True)
class Function:
    name: str
    is_loss: bool
    has_row_state: bool
    needs_labels: bool
    is_pass_first: bool  # in its names: forward_sweep
    tensors: tuple[Tensor, ...]
    doc: str
    linear_doc: str
    struct: Struct
    presets: dict[str, dict[str, str]]
    metrics_doc: str
    metrics: tuple[Value, ...]

    @property
    def passes(self) -> tuple[str, ...]:
        found = ["forward", "backward"]
        found += ["value_and_grad"] * self.is_loss + ["from_row_state"] * self.has_row_state
        return tuple(found)


@dataclass(frozen=True)
class Table:
    enums: dict[str, Enum]
    logit: Struct
    linear: Struct
    arguments: tuple[Section, ...]
    tensors: tuple[Tensor, ...]  # in the order in which they are checked and told of
    functions: tuple[Function, ...]

    @property
    def structs(self) -> tuple[Struct, ...]:
        return (self.logit, self.linear, *(function.struct for function in self.functions))

    def options_of(self, name: str, without: str | None) -> tuple[list[Option], Function]:
        """The options that callers may give to a function, but for those named, "a, b"."""
        functions = {function.name: function for function in self.functions}
        if name not in functions:
            raise TableError(f"no function {name}, there are {', '.join(functions)}")
        every = (*self.logit.named, *functions[name].struct.named)
        left_out = without.split(", ") if without else []
        if unknown := set(left_out) - {option.name for option in every}:
            raise TableError(f"{name} has no option {', '.join(sorted(unknown))}")
        return [o for o in every if o.name not in (*NOT_PUBLIC, *left_out)], functions[name]


def read(text: str) -> Table:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"table.toml: {error}") from None
    _check_keys(
        "table.toml", raw, ("enum", "shared", "tensor_order", "arguments", "function"), optional=()
    )
    _check_keys("shared", raw["shared"], ("tensors", "logit", "linear"), optional=())
    enums = {name: _enum(name, entry) for name, entry in raw["enum"].items()}
    structs = dict[str, Struct]()
    shared = {name: raw["shared"][name] for name in ("logit", "linear")}
    for place, entries in (("shared", shared), ("function", raw["function"])):
        for name, entry in entries.items():
            structs[name] = _struct(f"{place}.{name}", name, entry, enums, structs)
    sections = tuple(map(_section, raw["arguments"]))
    tensors = {member.name: member for section in sections for member in section.members}
    order = raw["tensor_order"]
    if sorted(order) != sorted(name for name, tensor in tensors.items() if tensor.shape):
        raise TableError("tensor_order: expected the names of all tensors of arguments, once each")
    last = _tensors("shared", raw["shared"]["tensors"], tensors)
    functions = tuple(
        _function(name, entry, structs[name], tensors, last)
        for name, entry in raw["function"].items()
    )
    ordered = tuple(tensors[name] for name in order)
    return Table(enums, structs["logit"], structs["linear"], sections, ordered, functions)


def _check_keys(place: str, entry: Any, needed: Sequence[str], optional: Sequence[str]) -> None:
    if not isinstance(entry, dict):
        raise TableError(f"{place}: expected a table, got {entry!r}")
    if missing := [key for key in needed if key not in entry]:
        raise TableError(f"{place}: {', '.join(missing)} is missing")
    if unknown := [key for key in entry if key not in {*needed, *optional}]:
        known = ", ".join([*needed, *optional])
        raise TableError(f"{place}: expected keys among {known}, got {', '.join(unknown)}")


def _values(place: str, rows: Sequence[Sequence[str]], prefix: str) -> tuple[Value, ...]:
    found = []
    for row in rows:
        if not 1 <= len(row) <= 3 or not all(isinstance(part, str) for part in row):
            raise TableError(f"{place}: expected [name, doc, name in C], got {row!r}")
        name, doc, in_c = (*row, "", "", "")[:3]
        found.append(Value(name, doc, "TILELOSS_" + (in_c or f"{prefix}{name.upper()}")))
    return tuple(found)


def _enum(name: str, entry: Mapping[str, Any]) -> Enum:
    place = f"enum.{name}"
    _check_keys(place, entry, ("prefix", "values"), optional=("doc", "in_c"))
    if entry.get("in_c", "elsewhere") != "elsewhere":
        raise TableError(f'{place}: in_c: expected "elsewhere", got {entry["in_c"]!r}')
    values = _values(place, entry["values"], entry["prefix"])
    return Enum(name, entry.get("doc", ""), "in_c" in entry, values)


def _struct(
    place: str,
    name: str,
    entry: Mapping[str, Any],
    enums: Mapping[str, Enum],
    before: Mapping[str, Struct],
) -> Struct:
    options = []
    for key, given in entry.get("options", {}).items():
        at = f"{place}.options.{key}"
        if "like" in given:
            _check_keys(at, given, ("like",), optional=())
            options.append(_like(at, key, before.get(given["like"])))
        else:
            options.append(_option(at, key, given, enums))
    doc = entry.get("doc", "") if place.startswith("shared") else entry.get("options_doc", "")
    return Struct(name, doc, tuple(options))


def _like(place: str, name: str, other: Struct | None) -> Option:
    found = [option for option in other.options if option.name == name] if other else []
    if not found:
        raise TableError(f"{place}: like: expected a function above with an option of that name")
    return found[0]


def _option(place: str, name: str, given: Mapping[str, Any], enums: Mapping[str, Enum]) -> Option:
    optional = ("default", "absent", "range", "needs", "doc", "in_python", "count")
    _check_keys(place, given, ("type",), optional)
    kind, default, absent = given["type"], given.get("default"), given.get("absent", "")
    enum = enums.get(kind)
    if enum is None and kind not in (*NUMBERS, "flag", "reserved"):
        known = ", ".join((*NUMBERS, "flag", "reserved", *enums))
        raise TableError(f"{place}: type: expected one of {known}, got {kind!r}")
    if kind == "reserved":
        _check_keys(place, given, ("type",), optional=("count",))
    elif not given.get("doc"):
        raise TableError(f"{place}: doc: expected a sentence, got none")
    if enum is not None and default not in [value.name for value in enum.values]:
        names = ", ".join(value.name for value in enum.values)
        raise TableError(f"{place}: default: expected one of {names}, got {default!r}")
    if kind == "flag" and not isinstance(default, bool):
        raise TableError(f"{place}: default: expected true or false, got {default!r}")
    if kind in NUMBERS:
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if not is_number and (default is not None or kind == "int64" or not absent):
            raise TableError(
                f"{place}: default: expected a number, or what absent means, got {default!r}"
            )
        if is_number and absent and kind != "int64":
            raise TableError(f"{place}: absent: expected none beside a default, got {absent!r}")
    if "range" in given and kind not in NUMBERS:
        raise TableError(f"{place}: range: expected none of a {kind}, got {given['range']!r}")
    return Option(
        name=name,
        type=kind,
        default=default,
        absent=absent,
        range=_range(place, given["range"]) if "range" in given else Range(),
        needs=_needs(place, given),
        doc=given.get("doc", ""),
        in_python=given.get("in_python", f"{default}"),
        count=given.get("count", 0),
        enum=enum,
    )


def _range(place: str, text: str) -> Range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise TableError(
            f'{place}: range: expected "> a", ">= a", "[a, b]" or "(a, b]", got {text!r}'
        )
    sign, least, bracket, low, high = match.groups()
    if sign:
        return Range(text, float(least), None, sign == ">")
    return Range(f"in {text}", float(low), float(high), bracket == "(")


def _section(entry: Mapping[str, Any]) -> Section:
    _check_keys("arguments", entry, ("members",), optional=("doc",))
    members = tuple(
        _tensor(f"arguments.{name}", name, given) for name, given in entry["members"].items()
    )
    return Section(entry.get("doc", ""), members)


def _tensor(place: str, name: str, given: Mapping[str, Any]) -> Tensor:
    if "type" in given:
        _check_keys(place, given, ("type",), optional=("doc",))
        return Tensor(name, given.get("doc", ""), given["type"])
    optional = ("role", "group", "required", "passes", "needs", "doc")
    _check_keys(place, given, ("shape", "dtypes"), optional)
    for key, known in (
        ("shape", tuple(SHAPES)),
        ("dtypes", tuple(DTYPES)),
        ("role", ROLES),
        ("passes", ("vocabulary",)),
    ):
        if key in given and given[key] not in known:
            raise TableError(
                f"{place}: {key}: expected one of {', '.join(known)}, got {given[key]!r}"
            )
    needs = _needs(place, given)
    return Tensor(**{"name": name, "doc": "", **given, "needs": needs})


def _needs(place: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    needs = tuple(given.get("needs", ()))
    if unknown := [array for array in needs if array not in STATE_ARRAYS]:
        raise TableError(
            f"{place}: needs: expected {', '.join(STATE_ARRAYS)}, got {', '.join(unknown)}"
        )
    return needs


def _tensors(place: str, names: Sequence[str], known: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    if unknown := [name for name in names if name not in known]:
        raise TableError(
            f"{place}.tensors: expected members of arguments, got {', '.join(unknown)}"
        )
    return tuple(known[name] for name in names)


def _function(
    name: str,
    entry: Mapping[str, Any],
    struct: Struct,
    tensors: Mapping[str, Tensor],
    last: tuple[Tensor, ...],
) -> Function:
    place = f"function.{name}"
    optional = ("linear_doc", "options_doc", "options", "presets", "metrics", "pass_first")
    _check_keys(place, entry, ("is_loss", "row_state", "needs_labels", "tensors", "doc"), optional)
    presets, choices = entry.get("presets", {}), {o.name: o.choices for o in struct.options}
    for preset, values in presets.items():
        for option, value in values.items():
            if value not in choices.get(option, ()):
                at = f"{place}.presets.{preset}.{option}"
                expected = ", ".join(choices.get(option, ())) or "an option with choices"
                raise TableError(f"{at}: expected {expected}, got {value!r}")
    metrics = entry.get("metrics", {})
    return Function(
        name,
        entry["is_loss"],
        entry["row_state"],
        entry["needs_labels"],
        entry.get("pass_first", False),
        (*_tensors(place, entry["tensors"], tensors), *last),
        entry["doc"],
        entry.get("linear_doc", ""),
        struct,
        presets,
        metrics.get("doc", ""),
        _values(f"{place}.metrics", metrics.get("values", ()), "METRIC_"),
    )
