#!/usr/bin/env python3
"""Writes what repeats src/schema/table.toml: `./dev generate`, or with --check says which files are stale.

A file is either made whole, or has regions between lines that hold "generated: WHAT" and "end of generated". WHAT is a name in
REGIONS, or "table of FUNCTION", of its options.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import write_c
import write_docs
from option_table import TABLE, Table, TableError, read

ROOT = TABLE.parents[2]
_REGION = re.compile(
    r"(?ms)^(?P<head> *[^\n]{1,4} generated: (?P<what>[\w+, ]+?)(?:, by [^\n]*| -->)?\n).*?"
    r"(?=^ *[^\n]{1,4} end of generated\b)"
)

WHOLE: dict[str, Callable[[Table], str]] = {
    "src/schema/option_fields.h": write_c.fields_header,
    "src/api/named_functions.cpp": write_c.named_functions,
}
WITH_REGIONS = (
    "include/tileloss/tileloss.h",
    "include/tileloss/tileloss.hpp",
    "include/tileloss/arguments.hpp",
    "docs/users/losses.md",
)
REGIONS: dict[str, Callable[[Table], str]] = {
    "options": write_c.header_options,
    "functions": write_c.header_functions,
    "options in C++": write_c.cpp_options,
    "arguments in C++": write_c.cpp_arguments,
    "functions in C++": write_c.cpp_functions,
}


def region(what: str, table: Table) -> str:
    if what in REGIONS:
        return REGIONS[what](table)
    for struct in table.structs:
        if what == f"table of {struct.name}":
            return write_docs.option_table(struct)
    raise TableError(f"no region {what!r}, there are {', '.join([*REGIONS, 'table of FUNCTION'])}")


def with_regions(path: str, text: str, table: Table) -> str:
    def replaced(match: re.Match[str]) -> str:
        try:
            return match["head"] + region(match["what"], table)
        except TableError as error:
            raise TableError(f"{path}: {error}") from None

    new, count = _REGION.subn(replaced, text)
    if count != text.count(" generated: ") or count == 0:
        raise TableError(f'{path}: a region without "end of generated", or none at all')
    return new


def outputs(table: Table, root: Path) -> dict[Path, str]:
    """What the files should hold."""
    found = {root / path: make(table) for path, make in WHOLE.items()}
    for path in WITH_REGIONS:
        found[root / path] = with_regions(path, (root / path).read_text(), table)
    return found


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    try:
        wanted = outputs(read(TABLE.read_text()), root)
    except TableError as error:
        sys.exit(f"generate: {error}")
    stale = {
        path: text
        for path, text in wanted.items()
        if not path.is_file() or path.read_text() != text
    }
    for path, text in stale.items():
        name = str(path.relative_to(root))
        if arguments:
            before = path.read_text().splitlines() if path.is_file() else []
            changes = difflib.unified_diff(
                before, text.splitlines(), name, "generated", lineterm="", n=0
            )
            print(f"{name}: stale, run ./dev generate", *list(changes)[:12], sep="\n")
        else:
            path.write_text(text)
            print(f"generate: {name}")
    return 1 if arguments and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
