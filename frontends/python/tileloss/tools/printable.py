"""Text from outside as messages, tables and pages show it, and the word that was meant."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tileloss._core.text import escaped as escaped

_LONGEST_WORD = 64  # of ours; what is longer is none of them


def shown(text: str, limit: int = 240) -> str:
    """Escaped, a text of at most ``limit`` characters; of a longer one its beginning and its end."""
    if len(text) <= limit:
        return escaped(text)
    head, tail = limit * 2 // 3, len(text) - limit // 3
    return f"{escaped(text[:head])}...[{tail - head} characters]...{escaped(text[tail:])}"


def one_line(text: str) -> str:
    """The lines of a message in one."""
    return escaped(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ "; did you mean --output?", or nothing where no known word is near."""
    if len(given) > _LONGEST_WORD:
        return ""
    near = difflib.get_close_matches(given, list(known), 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


def compact(value: Any) -> str:
    """JSON in one line."""
    return json.dumps(value, separators=(",", ":"))


def print_options(options: Mapping[str, Any]) -> None:
    """Of a loss, those that are not at their defaults; nothing if there are none."""
    if options:
        print("options", compact(options))


def print_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int | None = None
) -> None:
    """A table. Columns after the first ``num_texts`` are numbers, aligned to the right; None: there are none.

    On a terminal it is as wide as that, if no word has to be broken for it. Elsewhere a row is a line of plain text.
    """
    rows = [[escaped(cell) for cell in row] for row in rows]
    texts = len(head) if num_texts is None else num_texts
    if sys.stdout.isatty():
        _print_on_terminal(head, rows, texts)
        return
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    print("  ".join(map(str.ljust, head, widths)).rstrip())
    print("  ".join("-" * width for width in widths))
    for row in rows:
        cells = [*map(str.ljust, row[:texts], widths), *map(str.rjust, row[texts:], widths[texts:])]
        print("  ".join(cells).rstrip())


def _print_on_terminal(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for k, title in enumerate(head):
        is_number = k >= texts
        table.add_column(Text(title), justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    wide = console.options.update(width=sys.maxsize)
    console.width = max(console.width, Measurement.get(console, wide, table).minimum)
    console.print(table)
