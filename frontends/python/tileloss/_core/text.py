"""Text from outside as messages show it."""

from __future__ import annotations

import re

# C0, DEL, C1; line and paragraph separators, directional marks, overrides and isolates; halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")  # fmt: skip
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escaped(text: str) -> str:
    r"""What would move a terminal's cursor or turn the direction of writing, as \x1b, \u202e; a byte that is no UTF-8 as \xff.
    The rest as it is, a backslash too: what is escaped already stays as it is."""
    return _CONTROL.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte that it could not decode
        return f"\\x{code - 0xDC00:02x}"
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}")
