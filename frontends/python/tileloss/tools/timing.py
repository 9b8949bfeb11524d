"""How long a call takes and how much memory it needs: the clock of `tileloss bench --frontend` and of benchmarks/compare.py."""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _nothing() -> None:
    pass


@dataclass
class Timed:
    """A call that waits for what it computes. `restore` is called after it, untimed: it puts back what the call wrote over or was
    given to keep. `calls`: of a turn, whose last one is timed; `most`: turns, of a slow one. `times`: seconds."""

    run: Callable[[], Any]
    restore: Callable[[], None] = _nothing
    calls: int = 1
    most: int | None = None
    times: list[float] = field(default_factory=list)

    def once(self) -> float:
        """Seconds. What the call allocates is freed after the clock stopped."""
        gc.collect()
        begin = time.perf_counter()
        result = self.run()
        seconds = time.perf_counter() - begin
        del result
        self.restore()
        return seconds

    def statistics(self) -> dict[str, float]:
        ms = [1000 * each for each in self.times]
        return {
            "median_ms": statistics.median(ms),
            "min_ms": min(ms),
            "mean_ms": statistics.mean(ms),
        }


def time_in_turns(
    calls: Sequence[Timed], rounds: int, after_round: Callable[[int], None] = lambda _: None
) -> None:
    """Fills their times. Rounds are interleaved and each starts with another call, so that a noisy moment meets all of them."""
    for current in range(rounds):
        for offset in range(len(calls)):
            call = calls[(current + offset) % len(calls)]
            if call.most is None or current < call.most:
                call.times.append([call.once() for _ in range(call.calls)][-1])
        after_round(current + 1)


def peak_bytes(run: Callable[[], Any], kept_bytes: Callable[[Any], int]) -> int:
    """What a call needs at most above what it is given and what it returns, of which ``kept_bytes`` tells the size."""
    before = _reset_peak()
    result = run()
    return max(0, _peak_resident() - before - kept_bytes(result))


def _peak_resident() -> int:
    """VmHWM of this process, bytes, as the kernel counts it."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("/proc/self/status has no VmHWM")
    return int(found[1]) * 1024


def _reset_peak() -> int:
    """Gives free memory back to the kernel, sets VmHWM to what is resident, returns it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_resident()
