"""Contestants on a GPU: a process of its own measures one after the other and tells what it found; this one starts it again
without the one at which it failed or hung."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from comparison.contestants import GROUPS, Contestant, Output, by_key, register_for
from comparison.device import DEVICES, Host, Run
from comparison.inputs import Inputs, Shape, Truth
from comparison.measure import Errors, Measurement, check, group_inputs, group_truth

WORK = "--work"  # what the process is told
START_S = 60.0  # torch's import, and the device's first context
SECONDS = 0.4  # of a contestant's runs
MOST_RUNS = 50
Log = Callable[[str], None]


# --------------------------------------------------------------------------------------------------------- one contestant


def measure(
    contestant: Contestant, inputs: Inputs, truth: Truth | None, device: Host, rounds: int
) -> Measurement:
    """Checked first, by a step that compiles, too."""
    group, found = GROUPS[contestant.group], Measurement(contestant)
    inputs.own_logits = None
    step = contestant.setup(inputs)
    flush = device.flush()

    def between() -> None:
        inputs.restore()
        flush()

    def is_right(output: Output) -> None:
        if truth is not None:
            with torch.device(device.place):
                found.errors = check(contestant, output, truth, inputs)
        inputs.restore()

    is_right(step())
    device.synchronize()
    found.peak_bytes = 0 if contestant.work else device.peak_bytes(step, group.whole_model)
    found.host_s = device.host_seconds(step)
    inputs.restore()
    run: Run = step
    found.timed_by = "calls"
    try:
        run, output = device.captured(step)
        inputs.restore()
        run()
        is_right(output)
        found.timed_by = device.replays
    except Exception as error:
        run, found.not_captured = step, in_a_line(error)
    inputs.restore()
    first = min(device.seconds(run, between, 2))
    count = min(MOST_RUNS, max(rounds, int(SECONDS / max(first, 1e-9))))
    found.times = device.seconds(run, between, count)
    inputs.restore()
    return found


def in_a_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


# -------------------------------------------------------------------------------------------------------- the process


def run_worker(order: str) -> int:
    """A line of JSON for each contestant, in order. Ends after one that left the device in a state for no other."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages print, too
    asked = json.loads(order)
    device, shape = DEVICES[asked["device"]](), Shape(**asked["shape"])
    register_for(device.name)
    group, inputs, truth = None, None, None
    for key in asked["keys"]:
        try:
            contestant = by_key(key)
            if contestant.group != group:
                group = inputs = truth = None
                device.forget()
                with torch.device(device.place):
                    inputs = group_inputs(GROUPS[contestant.group], shape)
                    if not contestant.work:
                        truth = group_truth(GROUPS[contestant.group], inputs)
                group = contestant.group
            assert inputs is not None
            found = asdict(measure(contestant, inputs, truth, device, asked["rounds"]))
            found.pop("contestant")
        except Exception as error:
            traceback.print_exc()
            found = {"failed": in_a_line(error)}
        ends = not device.is_well()
        print(json.dumps(found | {"ends": ends}), file=results, flush=True)
        if ends:
            return 1
        device.forget()
    return 0


class Worker:
    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._output, self._read = self._process.stdout.fileno(), b""

    def line(self, limit_s: float) -> dict[str, object]:
        """The next one. Raises TimeoutError, or EOFError where the process has ended."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._read:
            if not select.select([self._output], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"took more than {limit_s:g} s")
            if not (more := os.read(self._output, 1 << 16)):
                raise EOFError(f"its process ended, {self._process.wait()}")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return dict(json.loads(line))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def lines_of(
    keys: Sequence[str],
    command: Callable[[Sequence[str]], Sequence[str]],
    limit_s: float,
    start_s: float = START_S,
) -> Iterator[tuple[str, dict[str, object]]]:
    """What the processes tell of each, "failed" among it where it did. ``command``: that tells of these."""
    left = list(keys)
    while left:
        worker, ends, extra = Worker(command(left)), False, start_s
        try:
            while left and not ends:
                try:
                    found = worker.line(limit_s + extra)
                    ends = bool(found.pop("ends", False))
                except (TimeoutError, EOFError) as error:
                    found, ends = {"failed": str(error)}, True
                extra = 0.0
                yield left.pop(0), found
        finally:
            worker.end()


def measure_all(
    chosen: Sequence[Contestant],
    shape: Shape,
    device: str,
    rounds: int,
    limit_s: float,
    log: Log,
) -> Iterator[Measurement]:
    def command(keys: Sequence[str]) -> list[str]:
        order = {"keys": list(keys), "shape": asdict(shape), "device": device, "rounds": rounds}
        return [sys.executable, sys.argv[0], WORK, json.dumps(order)]

    for key, found in lines_of([each.key for each in chosen], command, limit_s):
        errors = found.pop("errors", None)
        measured = Measurement(by_key(key), errors=Errors(**errors) if errors else None, **found)
        log(f"{key}: {measured.failed or f'{measured.median * 1e3:.4g} ms by {measured.timed_by}'}")
        yield measured
