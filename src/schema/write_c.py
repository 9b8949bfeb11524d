"""The C and C++ that repeats the table, as clang-format would have it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from option_table import SHAPES, Enum, Function, Option, Struct, Table, Tensor

WIDTH = 130
NOTE = "// Written by ./dev generate from src/schema/table.toml, which is the file to edit.\n"

# -------------------------------------------------------------------------------------------------------------- text


def comment(text: str, indent: str = "") -> str:
    """A C++ comment, wrapped; lines that begin with spaces, formulas, stay as they are."""
    paragraphs: list[str] = []
    for line in text.strip().splitlines():
        if paragraphs and not line.startswith(" ") and not paragraphs[-1].startswith(" "):
            paragraphs[-1] += " " + line
        else:
            paragraphs.append(line)
    start = f"{indent}// "
    lines = [
        part
        for paragraph in paragraphs
        for part in textwrap.wrap(paragraph, WIDTH, initial_indent=start, subsequent_indent=start)
    ]
    return "".join(f"{line}\n" for line in lines)


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """Lines of code and what their comments say: beside them in one column while they fit, above them where they never do."""
    text, block = "", list[tuple[str, str]]()

    def flush() -> None:
        nonlocal text
        column = max((len(code) for code, _ in block), default=0) + 2
        text += "".join(f"{code:{column}}// {said}\n" for code, said in block)
        block.clear()

    for code, said in rows:
        is_beside = said and len(code) + len(f"  // {said}") <= WIDTH
        if is_beside:
            longest = max(len(other) for other, _ in [*block, (code, said)]) + 2
            if longest + max(len(f"// {other}") for _, other in [*block, (code, said)]) > WIDTH:
                flush()
            block.append((code, said))
        else:
            flush()
            text += comment(said, "  ") if said else ""
            text += f"{code}\n"
    flush()
    return text


def filled(start: str, parts: Sequence[str], end: str) -> str:
    """start(parts) end, with as many parts on a line as fit, as clang-format has it."""
    broken = start.rpartition(" ")
    pieces = [f"{part}," for part in parts[:-1]] + [f"{parts[-1]}){end}"]
    if len(start) + 1 + max(map(len, pieces)) > WIDTH:
        return f"{broken[0]}\n" + filled(broken[2], parts, end)
    lines = [f"{start}("]
    for piece in pieces:
        space = "" if lines[-1].endswith("(") or not lines[-1].strip() else " "
        if len(lines[-1]) + len(space) + len(piece) > WIDTH:
            lines.append(" " * (len(start) + 1))
            space = ""
        lines[-1] += space + piece
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(value)


# -------------------------------------------------------------------------------------------------------- tileloss.h


def enumerators(names: Sequence[tuple[str, str]]) -> str:
    rows = [(f"{name} = {i}", doc) for i, (name, doc) in enumerate(names)]
    if not any(doc for _, doc in rows):
        return f"enum {{ {', '.join(row for row, _ in rows)} }};\n"
    lines = [(f"  {code},", doc) for code, doc in rows[:-1]] + [(f"  {rows[-1][0]}", rows[-1][1])]
    return f"enum {{\n{aligned(lines)}}};\n"


def c_enum(enum: Enum) -> str:
    said = comment(enum.doc) + f"typedef int32_t tileloss_{enum.name};\n"
    return said + enumerators([(value.in_c, value.doc) for value in enum.values])


def c_default(option: Option) -> str:
    if option.is_reserved:
        return "TILELOSS_DEFAULT({})" if option.count else "TILELOSS_DEFAULT(0)"
    if option.default is None:
        return "TILELOSS_NOT_GIVEN"
    if option.enum is not None:
        index = option.choices.index(str(option.default))
        return f"TILELOSS_DEFAULT({option.enum.values[index].in_c})"
    return f"TILELOSS_DEFAULT({number(float(option.default))})"


def c_member(option: Option) -> tuple[str, str]:
    kinds = {"double": "double", "scalar": "tileloss_scalar", "int64": "int64_t", "flag": "int32_t"}
    kind = kinds.get(option.type, f"tileloss_{option.type}")
    if option.is_reserved:
        kind = "int64_t" if option.count else "int32_t"
    array = f"[{option.count}]" if option.count else ""
    default = f"default {option.default_text}"
    if option.default is None:
        default = f"not given: {option.absent}"
    if option.type == "flag":
        default = f"default {option.default:d}"
    said = "; ".join(
        filter(None, ["1: " * (option.type == "flag") + option.doc, option.range.text, default])
    )
    return (
        f"  {kind} {option.name}{array} {c_default(option)};",
        "0" if option.is_reserved else said,
    )


def c_struct(struct: Struct, is_shared: bool) -> str:
    name = f"tileloss_{struct.name}_options"
    members = (
        []
        if is_shared
        else [
            (f"  size_t struct_size TILELOSS_SIZE({name});", ""),
            ("  tileloss_logit_options logit TILELOSS_DEFAULT({});", ""),
            ("  tileloss_linear_options linear TILELOSS_DEFAULT({});", ""),
        ]
    )
    members += map(c_member, struct.options)
    return f"{comment(struct.doc)}typedef struct {name} {{\n{aligned(members)}}} {name};\n"


def header_options(table: Table) -> str:
    parts, declared, inits = list[str](), set[str](), ""
    metrics = {function.name: function for function in table.functions if function.metrics}
    for struct in table.structs:
        for enum in filter(None, (option.enum for option in struct.options)):
            if not enum.is_elsewhere and enum.name not in declared:
                parts.append(c_enum(enum))
                declared.add(enum.name)
        parts.append(c_struct(struct, struct in (table.logit, table.linear)))
        if function := metrics.get(struct.name):
            names = [(metric.in_c, metric.doc) for metric in function.metrics]
            count = f"TILELOSS_{function.name.removesuffix('_loss').upper()}_METRICS"
            parts.append(comment(function.metrics_doc) + enumerators([*names, (count, "")]))
    for function in table.functions:
        name = f"tileloss_{function.name}_options"
        inits += f"static inline void {name}_init({name}* options) {{\n"
        inits += (
            f'  (void)tileloss_options_init("{function.name}", options, sizeof *options);\n}}\n'
        )
    return "\n".join([*parts, inits])


def header_arguments(table: Table) -> str:
    parts = []
    for section in table.arguments:
        rows = []
        for tensor in section.members:
            kind = "tileloss_matrix" if tensor.is_matrix else tensor.type or "tileloss_vector"
            rows.append((f"  {kind} {tensor.name};", tensor.said))
        parts.append(comment(section.doc, "  ") + aligned(rows))
    return "\n".join(parts)


def parameters(function: Function) -> list[str]:
    options = f"const tileloss_{function.name}_options* options"
    return [
        "const tileloss_args* args",
        options,
        "const tileloss_plan* plan",
        "const tileloss_run* run",
    ]


def c_functions(table: Table) -> Iterable[tuple[Function, str, str, str]]:
    """(function, name in C less tileloss_, name for tileloss_call, pass) of every typed function."""
    for prefix in ("", "linear_"):
        for function in table.functions:
            for which in function.passes:
                name = f"{prefix}{function.name}"
                typed = name if which == "forward" else f"{name}_{which}"
                if function.is_pass_first:
                    typed = f"{prefix}{which}_{function.name}"
                yield function, typed, name, which


def header_functions(table: Table) -> str:
    text = ""
    for function, typed, name, which in c_functions(table):
        doc = function.linear_doc if name.startswith("linear_") else function.doc
        if which == "forward":
            text += "\n" * bool(text and doc) + comment(doc)
            if name == f"linear_{table.functions[0].name}":
                text += "\n" + comment(LINEAR)
        text += filled(f"TILELOSS_API tileloss_status tileloss_{typed}", parameters(function), ";")
    return text


LINEAR = """
The same functions fused with the LM head: args.hidden, head and bias stand for the logits, dhidden, dhead and dbias (any
subset) for dlogits. The logits exist a tile at a time; docs/users/memory.md says what is held instead and how workspace_bytes
chooses. With options.linear.compute_dtype bfloat16 the products see hidden, head and the logits' gradient rounded to it once,
and sum in float32 (on AVX-512 with BF16, subnormal operands and sums count as 0). A label's own gradient is exact to float32
before that rounding."""

# ---------------------------------------------------------------------------------------- tileloss.hpp, arguments.hpp


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def cpp_options(table: Table) -> str:
    names = [struct.name for struct in table.structs]
    return "".join(f"using {camel(name)}Options = tileloss_{name}_options;\n" for name in names)


def cpp_arguments(table: Table) -> str:
    return "\n".join(map(cpp_struct, table.functions))


def cpp_type(tensor: Tensor) -> str:
    if not tensor.shape:
        return tensor.type.replace("int64_t", "std::int64_t")
    if tensor.role == "gradient":
        return "MutableLogitsView"
    if tensor.is_matrix:
        return "IdsView" if tensor.dtypes == "integers" else "LogitsView"
    if tensor.dtypes in ("integers", "numbers"):
        return "LabelsView" if tensor.dtypes == "integers" else "MaskView"
    kind = {"int64": "std::int64_t", "uint8": "std::uint8_t"}.get(tensor.dtypes, "float")
    return f"Vector<{kind}>" if "output" in tensor.role else f"Vector<const {kind}>"


def cpp_struct(function: Function) -> str:
    members, copies = list[tuple[str, str]](), ""
    for tensor in function.tensors:
        kind, is_view = cpp_type(tensor), bool(tensor.shape)
        absent = {"*": " = nullptr", "t": " = 0"}.get(kind[-1], " = {}")
        if tensor.name == "labels" and function.needs_labels:
            absent = ""
        members.append((f"  {kind} {tensor.name}{absent};", tensor.said))
        copies += f"    args.{tensor.name} = {tensor.name}{'.c()' if is_view else ''};\n"
    return f"""struct {camel(function.name)}Args {{
  using Options = {camel(function.name)}Options;
  static constexpr const char* kFunction = "{function.name}";
  static constexpr const char* kLinearFunction = "linear_{function.name}";

{aligned(members)}
  [[nodiscard]] tileloss_args c() const noexcept {{
    tileloss_args args;
    tileloss_args_init(&args);
{copies}    return args;
  }}
}};
"""


def cpp_functions(table: Table) -> str:
    text = ""
    for function, typed, name, which in c_functions(table):
        args, c_args = f"{camel(function.name)}Args", "args.c()"
        takes = [
            f"const {args}& args",
            f"const {camel(function.name)}Options& options = {{}}",
            "const RunOptions& run = {}",
        ]
        if name.startswith("linear_"):
            takes, c_args = ["const LinearHead& head", *takes], "head.c(args)"
            if "teacher_logits" in [tensor.name for tensor in function.tensors]:
                takes, c_args = (
                    [takes[0], "const TeacherHead& teacher", *takes[1:]],
                    "teacher.c(head, args)",
                )
        if which == "forward":
            text += "\n" * bool(text) + comment(
                "" if takes[0].startswith("const Linear") else function.doc
            )
        text += filled(f"inline Status {typed}", takes, " noexcept {")
        text += (
            f'  return detail::call("{name}", Pass::k{camel(which)}, {c_args}, options, run);\n}}\n'
        )
    return text


# -------------------------------------------------------------------------------------------------------- the library


def field(struct: Struct, option: Option, path: str, owner: str) -> str:
    is_int64, span = option.type == "int64", option.range
    least, most = ("-0x1p62", "0x1p62") if is_int64 else ("-kUnbounded", "kUnbounded")
    if option.choices:
        kind, least, most = "CHOICE", "0", f"{len(option.choices) - 1}"
        default = number(option.choices.index(str(option.default).lower()))
    else:
        kind = option.type.upper()
        default = "kNotGiven" if option.default is None else number(float(option.default))
    if span.minimum is not None:
        least = number(span.minimum)
    if span.maximum is not None:
        most = number(span.maximum)
    needs = " | ".join(f"TILELOSS_STATE_{array.upper()}" for array in option.needs) or "0"
    choices = f'"{"|".join(option.choices)}"' if option.choices else "nullptr"
    bits = f"{span.is_above:d}, {option.has_absent:d}"
    return (
        f'    {{"{option.name}", TILELOSS_FIELD_{kind}, {needs}, offsetof({owner}, {path}{option.name}), {default}, {least}, '
        f"{most}, {bits}, {choices}}},\n"
    )


def fields_header(table: Table) -> str:
    def fields(struct: Struct, path: str, owner: str) -> str:
        name = camel(struct.name)
        rows = "".join(field(struct, option, path, owner) for option in struct.named)
        return f"inline constexpr tileloss_field k{name}Fields[] = {{\n{rows}}};\n" if rows else ""

    common = "tileloss_logprobs_options"
    parts = [fields(table.logit, "logit.", common), fields(table.linear, "linear.", common)]
    for function in table.functions:
        parts.append(fields(function.struct, "", f"tileloss_{function.name}_options"))
        name = camel(function.name)
        if function.metrics:
            names = "|".join(metric.name for metric in function.metrics)
            parts.append(f'inline constexpr const char* k{name}MetricNames = "{names}";\n')
        if function.presets:
            parts.append(presets(function, name))
    return FIELDS_HEADER.replace("PARTS", "\n".join(filter(None, parts)))


SLOT_DTYPES = {
    "float32": "kFloat",
    "floats": "kAnyFloat",
    "integers": "kInteger",
    "numbers": "kAnyMask",
}


def tensor_slots(table: Table) -> str:
    return "".join(map(_slot, table.tensors))


def _slot(tensor: Tensor) -> str:
    places = f"nullptr, &A::{tensor.name}" if tensor.is_matrix else f"&A::{tensor.name}, nullptr"
    dtypes = SLOT_DTYPES.get(tensor.dtypes, f"dtype_bit(TILELOSS_{tensor.dtypes.upper()})")
    passes = {"gradient": "kWithGradient", "row_output": "kWithValue | kBackward"}.get(
        tensor.role, "kAll"
    )
    if tensor.role == "input" and (tensor.is_matrix or tensor.passes):
        passes = "kWithVocabulary"
    states = " | ".join(
        ["kMaxSumTarget", *(f"TILELOSS_STATE_{array.upper()}" for array in tensor.needs)]
    )
    if tensor.role != "row_output":
        states = "0"
    group = f"k{camel(tensor.group)}" if tensor.group else "0"
    return (
        f'    {{"{tensor.name}", {places}, TILELOSS_ROLE_{tensor.role.upper()}, {dtypes}, Shape::k{SHAPES[tensor.shape]}, '
        f"{group}, {passes}, {str(tensor.required).lower()}, {states}}},\n"
    )


def presets(function: Function, name: str) -> str:
    enums = {o.name: o.enum for o in function.struct.options if o.enum is not None}
    keys = list(next(iter(function.presets.values())))
    rows = ""
    for preset, values in function.presets.items():
        in_c = [
            value.in_c for key in keys for value in enums[key].values if value.name == values[key]
        ]
        rows += f'    {{"{preset}", {", ".join(in_c)}}},\n'
    members = "".join(f"  tileloss_{enums[key].name} {key};\n" for key in keys)
    return (
        f"struct {name}Preset {{\n  const char* name;\n{members}}};\n"
        f"inline constexpr {name}Preset k{name}Presets[] = {{\n{rows}}};\n"
        f'inline constexpr const char* k{name}PresetNames = "{"|".join(function.presets)}";\n'
    )


FIELDS_HEADER = f"""// The options of every function as fields, in the order of tileloss_field's members; presets; metrics.
{NOTE}#ifndef TILELOSS_SCHEMA_OPTION_FIELDS_H_
#define TILELOSS_SCHEMA_OPTION_FIELDS_H_

#include "schema/fields.h"

namespace tileloss::impl {{

// clang-format off
PARTS// clang-format on

}}  // namespace tileloss::impl

#endif  // TILELOSS_SCHEMA_OPTION_FIELDS_H_
"""


def copies(options: Sequence[Option], function: Function) -> list[str]:
    """What hands a function's own options to the oracle."""
    own = [option for option in options if option in function.struct.options]
    return [f"hand_over(from.{option.name}, to.{option.name});" for option in own]


def named_functions(table: Table) -> str:
    text = f"// A function of its own for every name and pass that tileloss_call knows.\n{NOTE}"
    text += '#include <tileloss/tileloss.h>\n\nextern "C" {\n\n'
    for function, typed, name, which in c_functions(table):
        text += filled(f"tileloss_status tileloss_{typed}", parameters(function), " {")
        text += f'  return tileloss_call("{name}", TILELOSS_{which.upper()}, args, options, plan, run);\n}}\n'
    return text + '\n}  // extern "C"\n'
