#!/usr/bin/env python3
"""Writes what repeats src/schema/table.toml: `./dev generate`, or with --check says which files are stale.

A file has regions between lines that hold "generated: WHAT" and "end of generated". WHAT is a name in REGIONS, or NAME of
FUNCTION, of its options: "table of cross_entropy", in Python "options of cross_entropy but ignore_index"; or "enums NAME,
NAME".
A docstring's line that begins with "Options", "Tensors" or "Values of NAME" and ends with a colon is the head of a list: of the
options of the function whose arguments are taken before it, of what may go with its rows, of what an option may be.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import write_c
import write_python
from option_table import TABLE, Function, Option, Table, TableError, read

ROOT = TABLE.parents[2]
_REGION = re.compile(
    r"(?ms)^(?P<head>(?P<indent> *)[^\n]{1,4} generated: (?P<what>[\w+, ]+?)(?:, by [^\n]*| -->)?\n).*?"
    r"(?=^ *[^\n]{1,4} end of generated\b)"
)
_OPTIONS_PATTERN = re.compile(r"(\w+) of (\w+)(?: but (.+))?")

WITH_REGIONS = (
    "include/tileloss/*.h*",
    "docs/users/*.md",
    "src/*/*.cpp",
    "src/**/*.h",
    "frontends/python/tileloss/**/*.py",
)
REGIONS: dict[str, Callable[[Table], str]] = {
    "options": write_c.header_options,
    "arguments": write_c.header_arguments,
    "fields": write_c.option_fields,
    "named functions": write_c.named_functions,
    "tensors": write_c.tensor_slots,
    "functions": write_c.header_functions,
    "options in C++": write_c.cpp_options,
    "arguments in C++": write_c.cpp_arguments,
    "functions in C++": write_c.cpp_functions,
    "names in PyTorch": write_python.names_in_torch,
}
OPTION_REGIONS: dict[str, Callable[[Sequence[Option], Function], list[str]]] = {
    "options": write_python.options,
    "row_inputs": write_python.row_inputs,
    "copies": write_c.copies,
}
# What PyTorch's names are in JAX, which has no 64 bits unless it is told to.
IN_JAX = {"Tensor": "Array", "int64": "int32"}


def region(what: str, indent: str, table: Table) -> str:
    if what in REGIONS:
        return REGIONS[what](table)
    for struct in table.structs:
        if what == f"table of {struct.name}":
            return write_python.option_table(struct)
        if struct.metrics and what == f"metrics of {struct.name}":
            return write_python.metrics_table(struct.metrics)
    if what.startswith("enums "):
        return write_c.enums(table, what.removeprefix("enums ").split(", "))
    for function in table.functions:
        if what == f"rows of {function.name}":
            return write_python.rows(function)
    match = _OPTIONS_PATTERN.fullmatch(what)
    if match is not None and match[1] in OPTION_REGIONS:
        lines = OPTION_REGIONS[match[1]](*table.options_of(match[2], match[3]))
        return "".join(f"{indent}{line}\n" for line in lines)
    names = [
        *REGIONS,
        "enums",
        *(f"{name} of FUNCTION" for name in ("table", "metrics", "rows", *OPTION_REGIONS)),
    ]
    raise TableError(f"no region {what!r}, there are {', '.join(names)}")


def with_regions(path: str, text: str, table: Table) -> str:
    in_jax = "/jax/" in path

    def made(match: re.Match[str]) -> str:
        found = region(match["what"], match["indent"], table)
        for name, of_jax in IN_JAX.items() if in_jax else ():
            found = found.replace(name, of_jax)
        return match["head"] + found

    try:
        new, count = _REGION.subn(made, text)
        if count != text.count(" generated: "):
            raise TableError('a region without "end of generated"')
        return write_python.with_docstrings(new, table, in_jax) if path.endswith(".py") else new
    except TableError as error:
        raise TableError(f"{path}: {error}") from None


def outputs(table: Table, root: Path) -> dict[Path, str]:
    """What the files should hold."""
    found = dict[Path, str]()
    for path in sorted(path for pattern in WITH_REGIONS for path in root.glob(pattern)):
        text = path.read_text()
        if " generated: " in text or write_python.TAKES.search(text):
            found[path] = with_regions(str(path.relative_to(root)), text, table)
    whole = "".join(found.values())
    for name in [
        *REGIONS,
        "enums",
        *(f"{name} of" for name in ("metrics", "rows", *OPTION_REGIONS)),
    ]:
        if f" generated: {name}" not in whole:
            raise TableError(f"no file has the region {name!r}")
    return found


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    try:
        wanted = outputs(read(TABLE.read_text()), root)
    except TableError as error:
        sys.exit(f"generate: {error}")
    has_stale = False
    for path, text in wanted.items():
        name, old = path.relative_to(root), path.read_text() if path.is_file() else ""
        if old == text:
            continue
        if arguments:
            changes = difflib.unified_diff(old.splitlines(), text.splitlines(), lineterm="", n=0)
            print(f"{name}: stale, run ./dev generate", *list(changes)[2:12], sep="\n")
            has_stale = True
        else:
            path.write_text(text)
            print(f"generate: {name}")
    return int(has_stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
