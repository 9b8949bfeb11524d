"""Text from outside as messages, tables and pages show it, and the word that was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

# C0, DEL, C1; line and paragraph separators, directional marks, overrides and isolates; halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")  # fmt: skip
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escaped(text: str) -> str:
    r"""What would move a terminal's cursor or turn the direction of writing, as \x1b, \u202e; a byte that is no UTF-8 as \xff.
    The rest as it is, as the compiled program does it (src/support/printable.h)."""
    return _CONTROL.sub(lambda match: _escape(match[0]), text)


def one_line(text: str) -> str:
    """The lines of a message in one."""
    return escaped(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ "; did you mean --output?", or nothing where no known word is near."""
    near = difflib.get_close_matches(given, list(known), 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


def print_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int | None = None
) -> None:
    """A table. Columns after the first ``num_texts`` are numbers, aligned to the right; None: there are none."""
    rows = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    texts = len(widths) if num_texts is None else num_texts
    print("  ".join(map(str.ljust, head, widths)).rstrip())
    print("  ".join("-" * width for width in widths))
    for row in rows:
        cells = [*map(str.ljust, row[:texts], widths), *map(str.rjust, row[texts:], widths[texts:])]
        print("  ".join(cells).rstrip())


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte that it could not decode
        return f"\\x{code - 0xDC00:02x}"
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}")
