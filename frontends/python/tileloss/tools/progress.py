"""How far the work is: a bar on a terminal, lines of JSON on any other stderr, nothing if quiet."""

from __future__ import annotations

import json
import sys
import time

_PATIENCE_S = 2.0  # before a bar is shown, and between two lines of JSON


class Progress:
    """Of ``total`` steps of one work; total None: a number that nobody knows.

    >>> with Progress("audit", 40, quiet=False) as progress:
    ...     progress.step("torch confident")  # begins; the one before is done
    """

    def __init__(self, work: str, total: int | None = None, *, quiet: bool) -> None:
        self._work, self._total, self._done = work, total, -1
        self._is_terminal = sys.stderr.isatty()
        self._is_quiet = quiet
        self._told = time.monotonic()
        self._bar = None
        if self._is_terminal and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=work, delay=_PATIENCE_S, leave=False, file=sys.stderr
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, what: str) -> None:
        """The next step begins: ``what`` is done in it."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(self._done - self._bar.n)
            self._bar.refresh()
        elif not self._is_quiet and time.monotonic() - self._told > _PATIENCE_S:
            self._told = time.monotonic()
            line = {"progress": self._work, "done": self._done, "total": self._total, "now": what}
            print(json.dumps(line), file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line on stderr that stays there, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def at(self, done: int, total: int, what: str) -> None:
        """So many of so many steps of ``what`` are done."""
        self._done, self._total = done - 1, total
        if self._bar is not None:
            self._bar.total = total
        self.step(what)
