"""The C and C++ that repeats the table, as clang-format would have it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import chain

from option_table import RANGE, Entry, Function, Option, Presets, Struct, Table, TableError, Tensor

WIDTH = 130

# -------------------------------------------------------------------------------------------------------------- text


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def packed(parts: Sequence[str], width: int, start: str = "", indent: str = "") -> list[str]:
    """Lines of parts, as many on each as fit; none of them is broken."""
    text = " ".join(part.replace(" ", "\0") for part in parts)
    wrapper = textwrap.TextWrapper(width, start, indent, break_on_hyphens=False)
    wrapper.break_long_words = False
    return [line.replace("\0", " ") for line in wrapper.wrap(text)]


def comment(text: str, indent: str = "") -> str:
    """A C++ comment, wrapped; lines that begin with spaces, formulas, stay as they are."""
    paragraphs = re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", text.strip()).splitlines()
    start = f"{indent}// "
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=start, subsequent_indent=start)
    return "".join(f"{wrapper.fill(paragraph)}\n" for paragraph in paragraphs)


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """Lines of code and what their comments say: beside them in one column while they fit, above them where they never do."""

    def fits(block: Sequence[tuple[str, str]]) -> bool:
        widths = [max(map(len, column)) for column in zip(*block, strict=True)]
        return all(said for _, said in block) and sum(widths) + len("  // ") <= WIDTH

    blocks = list[list[tuple[str, str]]]()
    for row in rows:
        if blocks and fits([*blocks[-1], row]):
            blocks[-1].append(row)
        else:
            blocks.append([row])
    text = ""
    for block in blocks:
        column = max(len(code) for code, _ in block)
        for code, said in block:
            beside = f"{code:{column}}  // {said}\n"
            text += beside if fits(block) else comment(said, "  ") + f"{code}\n"
    return text


def filled(start: str, parts: Sequence[str], end: str) -> str:
    """start(parts) end."""
    pieces = [f"{part}," for part in parts[:-1]] + [f"{parts[-1]}){end}"]
    made = packed(pieces, WIDTH, f"{start}(", " " * (len(start) + 1))
    if max(map(len, made)) > WIDTH:
        head, name = start.rsplit(" ", 1)
        return f"{head}\n" + filled(name, parts, end)
    return "\n".join(made) + "\n"


# -------------------------------------------------------------------------------------------------------- tileloss.h


def enumerators(values: Sequence[Entry]) -> str:
    rows = [(f"  {value.in_c} = {i},", value.doc) for i, value in enumerate(values)]
    rows[-1] = (rows[-1][0].rstrip(","), rows[-1][1])
    if any(value.doc for value in values):
        return f"enum {{\n{aligned(rows)}}};\n"
    return f"enum {{{''.join(code[1:] for code, _ in rows)} }};\n"


def c_member(option: Option) -> tuple[str, str]:
    if option.type == "reserved":
        kind, size, zero = (
            ("int64_t", f"[{option.count}]", "{}") if option.count else ("int32_t", "", "0")
        )
        return f"  {kind} {option.name}{size} TILELOSS_DEFAULT({zero});", "0"
    kinds = {"double": "double", "int64": "int64_t", "flag": "int32_t"}
    kind, value, doc = option.type, option.default_number, option.doc
    default = f"default {value if kind == 'flag' else option.default_text}"
    if option.enum is not None:
        value = option.enum.values[int(value)].in_c
    value = f"TILELOSS_DEFAULT({value})"
    if option.default is None:
        default, value = "not given", "TILELOSS_NOT_GIVEN"
    default += f": {option.absent}" if option.absent else ""
    said = [f"1: {doc}" if kind == "flag" else doc, option.range, default, option.condition]
    code = f"  {kinds.get(kind, f'tileloss_{kind}')} {option.name} {value};"
    return code, "; ".join(filter(None, said))


def header_options(table: Table) -> str:
    parts, declared, inits = list[str](), set[str](), ""
    for struct in table.structs:
        for enum in filter(None, (option.enum for option in struct.options)):
            if enum.in_c != "elsewhere" and enum.name not in declared:
                declared.add(enum.name)
                typedef = f"typedef int32_t tileloss_{enum.name};\n"
                parts.append(comment(enum.doc) + typedef + enumerators(enum.values))
        name, first = f"tileloss_{struct.name}_options", list[tuple[str, str]]()
        if isinstance(struct, Function):
            first = [
                (f"  size_t struct_size TILELOSS_SIZE({name});", ""),
                ("  tileloss_logit_options logit TILELOSS_DEFAULT({});", ""),
                ("  tileloss_linear_options linear TILELOSS_DEFAULT({});", ""),
            ]
            call = f'(void)tileloss_options_init("{struct.name}", options, sizeof *options);'
            inits += f"static inline void {name}_init({name}* options) {{\n  {call}\n}}\n"
        members = aligned([*first, *map(c_member, struct.options)])
        said = comment(struct.options_doc)
        parts.append(f"{said}typedef struct {name} {{\n{members}}} {name};\n")
        if struct.metrics:
            count = f"TILELOSS_{struct.name.removesuffix('_loss').upper()}_METRICS"
            values = [*struct.metrics.values, Entry(name="count", in_c=count)]
            parts.append(comment(struct.metrics.doc) + enumerators(values))
    return "\n".join([*parts, inits])


def header_arguments(table: Table) -> str:
    parts = []
    for doc, members in table.sections:
        rows = []
        for tensor in members:
            kind = tensor.type or ("tileloss_matrix" if tensor.is_matrix else "tileloss_vector")
            rows.append((f"  {kind} {tensor.name};", tensor.said))
        parts.append(comment(doc, "  ") + aligned(rows))
    return "\n".join(parts)


def typed_functions(table: Table) -> Iterable[tuple[Function, str, str, str, list[str]]]:
    """(function, name in C less tileloss_, name for tileloss_call, pass, parameters in C) of every typed function."""
    for prefix in ("", "linear_"):
        for function in table.functions:
            for which in function.passes:
                name = f"{prefix}{function.name}"
                typed = name if which == "forward" else f"{name}_{which}"
                if function.pass_first:
                    typed = f"{prefix}{which}_{function.name}"
                options = f"const tileloss_{function.name}_options* options"
                last = ["const tileloss_plan* plan", "const tileloss_run* run"]
                yield function, typed, name, which, ["const tileloss_args* args", options, *last]


def header_functions(table: Table) -> str:
    text = ""
    for function, typed, name, which, parameters in typed_functions(table):
        is_linear = name.startswith("linear_")
        doc = function.linear_doc if is_linear else function.doc
        if which == "forward":
            text += "\n" * bool(text and doc) + comment(doc)
            if is_linear and function is table.functions[0]:
                text += "\n" + comment(table.linear_doc)
        text += filled(f"TILELOSS_API tileloss_status tileloss_{typed}", parameters, ";")
    return text


# ---------------------------------------------------------------------------------------- tileloss.hpp, arguments.hpp


def cpp_options(table: Table) -> str:
    names = [struct.name for struct in table.structs]
    return "".join(f"using {camel(name)}Options = tileloss_{name}_options;\n" for name in names)


def cpp_type(tensor: Tensor) -> str:
    if tensor.type:
        return tensor.type.replace("int64_t", "std::int64_t")
    if tensor.role == "gradient":
        return "MutableLogitsView"
    kind = tensor.dtypes.matrix if tensor.is_matrix else tensor.dtypes.vector
    return kind if "output" in tensor.role else kind.replace("Vector<", "Vector<const ")


def cpp_arguments(table: Table) -> str:
    taken = {tensor.name for function in table.functions for tensor in function.tensors}
    copies = ""
    for tensor in chain.from_iterable(members for _, members in table.sections):
        name, value = tensor.name, f"from.{tensor.name}{'' if tensor.type else '.c()'}"
        if name in taken:
            copies += f"  if constexpr (requires {{ from.{name}; }}) args.{name} = {value};\n"
    return "\n".join([C_ARGUMENTS.replace("COPIES", copies), *map(cpp_struct, table.functions)])


C_ARGUMENTS = """namespace detail {

// What `from` has of the C ABI's arguments.
template <class Args>
tileloss_args c_args(const Args& from) noexcept {
  tileloss_args args;
  tileloss_args_init(&args);
COPIES  return args;
}

}  // namespace detail
"""


def cpp_struct(function: Function) -> str:
    members = list[tuple[str, str]]()
    for tensor in function.tensors:
        kind, name = cpp_type(tensor), tensor.name
        absent = {"*": " = nullptr", "t": " = 0"}.get(kind[-1], " = {}")
        if name == "labels" and function.needs_labels:
            absent = ""
        members.append((f"  {kind} {name}{absent};", tensor.said))
    return f"""struct {camel(function.name)}Args {{
  using Options = {camel(function.name)}Options;
  static constexpr const char* kFunction = "{function.name}";
  static constexpr const char* kLinearFunction = "linear_{function.name}";

{aligned(members)}
  [[nodiscard]] tileloss_args c() const noexcept {{ return detail::c_args(*this); }}
}};
"""


def cpp_functions(table: Table) -> str:
    text = ""
    for function, typed, name, which, _ in typed_functions(table):
        kind, args, heads = camel(function.name), "args.c()", list[str]()
        if name.startswith("linear_"):
            heads, args = ["const LinearHead& head"], "head.c(args)"
            if "teacher_logits" in [tensor.name for tensor in function.tensors]:
                heads.append("const TeacherHead& teacher")
                args = "teacher.c(head, args)"
        if which == "forward":
            text += "\n" * bool(text) + comment("" if heads else function.doc)
        options = [f"const {kind}Options& options = {{}}", "const RunOptions& run = {}"]
        takes = [*heads, f"const {kind}Args& args", *options]
        call = f'detail::call("{name}", Pass::k{camel(which)}, {args}, options, run)'
        text += filled(f"inline Status {typed}", takes, " noexcept {") + f"  return {call};\n}}\n"
    return text


# -------------------------------------------------------------------------------------------------------- the library


def states(needs: Sequence[str], *first: str) -> str:
    return " | ".join([*first, *(f"TILELOSS_STATE_{array.upper()}" for array in needs)])


def condition(option: Option, struct: Struct) -> str:
    if not option.only_with:
        return "nullptr, 0"
    name, *named = option.only_with
    choices = next(other.choices for other in struct.named if other.name == name)
    return f'"{name}", {sum(1 << choices.index(choice) for choice in named)}'


def field(option: Option, struct: Struct, path: str, owner: str) -> str:
    kind, edge = option.type.upper(), "0x1p62" if option.type == "int64" else "kUnbounded"
    match = RANGE.fullmatch(option.range)
    sign, above, bracket, least, most = match.groups("") if match else [""] * 5
    least, most, choices = above or least or f"-{edge}", most or edge, "nullptr"
    is_above = sign == ">" or bracket == "("
    default = option.default_number if option.default is not None else "kNotGiven"
    if option.choices:
        kind, least, most = "CHOICE", "0", f"{len(option.choices) - 1}"
        choices = f'"{"|".join(option.choices)}"'
    return (
        f'    {{"{option.name}", TILELOSS_FIELD_{kind}, {states(option.needs) or 0}, offsetof({owner}, {path}{option.name}), '
        f"{default}, {least}, {most}, {is_above:d}, {bool(option.absent):d}, {choices}, {condition(option, struct)}}},\n"
    )


def option_fields(table: Table) -> str:
    parts = []
    for struct in table.structs:
        name, path, owner = camel(struct.name), "", f"tileloss_{struct.name}_options"
        if not isinstance(struct, Function):  # it is part of every function's options
            path, owner = f"{struct.name}.", "tileloss_logprobs_options"
        rows = "".join(field(option, struct, path, owner) for option in struct.named)
        if rows:
            parts.append(f"inline constexpr tileloss_field k{name}Fields[] = {{\n{rows}}};\n")
        if struct.metrics:
            names = "|".join(metric.name for metric in struct.metrics.values)
            parts.append(f'inline constexpr const char* k{name}MetricNames = "{names}";\n')
        if struct.presets:
            parts.append(presets(name, struct, struct.presets))
    return "\n".join(parts)


def presets(name: str, struct: Struct, given: Presets) -> str:
    keys, rows = list(next(iter(given.values()))), ""
    enums = {option.name: option.enum for option in struct.options if option.enum is not None}
    for preset, choices in given.items():
        words = [
            word.in_c for key in keys for word in enums[key].values if word.name == choices[key]
        ]
        rows += f'    {{"{preset}", {", ".join(words)}}},\n'
    members = "".join(f"  tileloss_{enums[key].name} {key};\n" for key in keys)
    return (
        f"struct {name}Preset {{\n  const char* name;\n{members}}};\n"
        f"inline constexpr {name}Preset k{name}Presets[] = {{\n{rows}}};\n"
        f'inline constexpr const char* k{name}PresetNames = "{"|".join(given)}";\n'
    )


def tensor_slots(table: Table) -> str:
    text = ""
    for tensor in table.tensors:
        name, place = tensor.name, f"&A::{tensor.name}"
        places = f"nullptr, {place}" if tensor.is_matrix else f"{place}, nullptr"
        passes, held = {"gradient": "kWithGradient"}.get(tensor.role, "kAll"), "0"
        if tensor.role == "row_output":
            passes, held = "kWithValue | kBackward", states(tensor.needs, "kMaxSumLabelLogit")
        elif tensor.role == "input" and (tensor.is_matrix or tensor.passes):
            passes = "kWithVocabulary"
        group = f"k{camel(tensor.group)}" if tensor.group else "0"
        text += (
            f'    {{"{name}", {places}, TILELOSS_ROLE_{tensor.role.upper()}, {tensor.dtypes.in_cpp}, '
            f'Shape::k{tensor.shape.in_cpp}, "{tensor.shape.name}", '
            f"{group}, {passes}, {str(tensor.required).lower()}, {held}}},\n"
        )
    return text


def copies(options: Sequence[Option], function: Function) -> list[str]:
    """What copies a function's own options to the oracle."""
    own = [option.name for option in options if option in function.options]
    return [f"copy(from.{name}, to.{name});" for name in own]


def enums(table: Table, names: Sequence[str]) -> str:
    """For the oracle, which sees no header of the ABI, and for switches: of an int no compiler knows which cases are missing."""
    known = {o.enum.name: o.enum for struct in table.structs for o in struct.options if o.enum}
    text = ""
    for name in names:
        if name not in known:
            raise TableError(f"no enum {name}, there are {', '.join(known)}")
        values = ", ".join(f"k{camel(value.name)}" for value in known[name].values)
        text += f"enum class {camel(name)} {{ {values} }};\n"
    return text


def named_functions(table: Table) -> str:
    return "".join(
        f'NAMED({typed}, {function.name}, "{name}", TILELOSS_{which.upper()})\n'
        for function, typed, name, which, _ in typed_functions(table)
    )
