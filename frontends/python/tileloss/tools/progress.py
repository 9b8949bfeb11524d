"""How far the work is: a bar on a terminal, lines of JSON on any other stderr, nothing if quiet."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tileloss.tools.printable import escaped

_PATIENCE_S = 2.0  # before a bar is shown, and between two lines of JSON
_BETWEEN_BARS_S = 0.1


class Progress:
    """Of ``total`` steps of one work; total None: a number that nobody knows.

    >>> with Progress("audit", 40, quiet=False) as progress:
    ...     progress.step("torch confident")  # begins; the one before is done
    """

    def __init__(self, work: str, total: int | None = None, *, quiet: bool) -> None:
        self._work, self._total, self._done = work, total, -1
        self._is_quiet = quiet
        self._next = time.monotonic() + _PATIENCE_S  # not before that is anything said
        self._bar: Any = None  # once it is shown

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str) -> None:
        """The next step begins: ``what`` is done in it."""
        self._done += 1
        if self._is_quiet or time.monotonic() < self._next:
            return
        is_terminal = sys.stderr.isatty()
        self._next = time.monotonic() + (_BETWEEN_BARS_S if is_terminal else _PATIENCE_S)
        if is_terminal:
            self._show_bar(what)
        else:
            line = {"progress": self._work, "done": self._done, "total": self._total, "now": what}
            print(json.dumps(line), file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line on stderr that stays there, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def at(self, done: int, total: int, what: str) -> None:
        """So many of so many steps of ``what`` are done."""
        self._done, self._total = done - 1, total
        self.step(what)

    def _show_bar(self, what: str) -> None:
        from rich import progress
        from rich.console import Console

        if self._bar is None:
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[what]}", markup=False),
                console=Console(file=sys.stderr),
                auto_refresh=False,  # no thread: the judge is forked off this process
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(escaped(self._work), what="")
            self._bar.start()
        self._bar.update(0, completed=self._done, total=self._total, what=escaped(what))
        self._bar.refresh()
