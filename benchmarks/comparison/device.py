"""The clock and the memory of a GPU; and the host in its place, where the program is tried without one."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from comparison.contestants import Output, Step
from comparison.report import processor

Run = Callable[[], object]
HOST_CALLS = 9  # of a median
FLUSH_BYTES = 256 << 20  # some times what caches hold


class Host:
    """What stands in for a GPU: no caches to empty, no graphs, no memory to count. `name`: of --device; `place`: torch's."""

    name, place = "host", "cpu"
    replays = "calls again"

    def machine(self) -> str:
        return processor()

    def synchronize(self) -> None:
        pass

    def forget(self) -> None:
        """What is left of a contestant, before another one is measured."""
        gc.collect()

    def is_well(self) -> bool:
        """Whether another contestant can be measured in this process."""
        return True

    def flush(self) -> Run:
        """Writes so much that nothing else stays in the device's caches."""
        return lambda: None

    def captured(self, step: Step) -> tuple[Run, Output]:
        """What replays a step, and where that puts its answer. Raises what a step raises under a capture."""
        return step, step()

    def seconds(self, run: Run, between: Run, count: int) -> list[float]:
        """Of each of so many runs, by the device's clock, with `between` before each."""
        times = []
        for _ in range(count):
            between()
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return times

    def host_seconds(self, step: Step) -> float:
        """Until the host has enqueued a step for which the device waits."""
        times = []
        for _ in range(HOST_CALLS):
            self.synchronize()
            begin = time.perf_counter()
            output = step()
            times.append(time.perf_counter() - begin)
            del output
        self.synchronize()
        return statistics.median(times)

    def peak_bytes(self, step: Step, counts_output: bool) -> int:
        """What a step needs above what is there; its answer is left out where it does not count."""
        step()
        return 0


class Gpu(Host):
    name = place = "cuda"
    replays = "graph replays"

    def machine(self) -> str:
        return torch.cuda.get_device_name()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def forget(self) -> None:
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()

    def is_well(self) -> bool:
        try:
            torch.rand(1, device=self.place)  # a failed capture may keep the generator
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def flush(self) -> Run:
        return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.place).zero_

    def captured(self, step: Step) -> tuple[Run, Output]:
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()  # what is made once for a stream
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = step()
        return graph.replay, output

    def seconds(self, run: Run, between: Run, count: int) -> list[float]:
        gc.collect()
        gc.disable()  # or it would be a gap between two launches
        events = []
        for _ in range(count):
            between()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events.append((begin, end))
        gc.enable()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    def peak_bytes(self, step: Step, counts_output: bool) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = step()
        torch.cuda.synchronize()
        base = before if counts_output else torch.cuda.memory_allocated()
        del output
        return max(0, torch.cuda.max_memory_allocated() - base)


DEVICES = {each.name: each for each in (Host, Gpu)}
