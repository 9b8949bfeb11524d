"""Requests to libtileloss_judge.so in a process of their own, with a bar for how far they are."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tileloss.testing._judge import Answer, Crashed, Event, Tensors, Told, ask_apart
from tileloss.tools.case_file import check_whole
from tileloss.tools.progress import Progress


@contextmanager
def shown_progress(work: str, told: Told | None = None, *, is_quiet: bool) -> Iterator[Told]:
    """What is to be told of a request's events: shows progress on stderr, and hands every other event to ``told``."""
    with Progress(work, quiet=is_quiet) as progress:

        def on_event(event: Event) -> None:
            if event["event"] == "progress":
                progress.at(event["done"], event["total"], event["work"])
            elif told is not None:
                told(event)

        yield on_event


def run_request(
    request: Mapping[str, Any],
    files: Mapping[str, Tensors] | None = None,
    outputs: Tensors | None = None,
    told: Told | None = None,
    *,
    is_quiet: bool,
    before: Callable[[], None] | None = None,
) -> Answer:
    """``tileloss.testing._judge.ask_apart``, and progress on stderr. ``told`` gets every other event as it comes.

    Raises JudgeError, Crashed; OSError where a file was cut while it was read.
    """
    with shown_progress(str(request["do"]), told, is_quiet=is_quiet) as on_event:
        try:
            return ask_apart(request, files, outputs, on_event, before)
        except Crashed as crash:
            if crash.signal == signal.SIGBUS:
                for tensors in (*(files or {}).values(), outputs or {}):
                    check_whole(tensors)
            raise
