"""Threads, forks, torch's number of threads, inference mode and subprocesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tileloss
from tileloss import torch as tl
from tileloss._core import calls
from torch_problems import FUNCTIONS, forget_calls, gradients, problem, run


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_threads_at_once(name: str) -> None:
    problems = [problem() for _ in range(4)]
    expected = [gradients(name, p) for p in problems]
    start = threading.Barrier(4)

    def work(i: int) -> list[tuple[torch.Tensor, ...]]:
        start.wait()
        return [gradients(name, problems[i]) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        for one, results in zip(expected, pool.map(work, range(4)), strict=True):
            for result in results:
                assert all(torch.equal(a, b) for a, b in zip(result, one, strict=True))


def test_errors_of_two_threads_do_not_mix() -> None:
    """The library's message belongs to the thread that called."""

    def work(value: int) -> set[str]:
        messages = set()
        for _ in range(50):
            try:
                tl.cross_entropy(torch.zeros(1, 5), torch.tensor([value]))
            except IndexError as error:
                messages.add(str(error).rpartition(" ")[2])
        return messages

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, [11, 12, 13, 14])) == [{"11"}, {"12"}, {"13"}, {"14"}]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_gradients(name: str, mode: type[torch.no_grad]) -> None:
    p = problem()
    expected = run(name, p, *p.leaves(name))
    with mode():
        loss = run(name, p, *p.leaves(name))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
    with mode():
        made_inside = run(name, p, *(x * 1 for x in p.leaves(name)))
    assert torch.equal(made_inside, loss)


def test_no_more_threads_than_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan is kept it is that of so many threads."""
    asked = []
    own_call = calls.call

    def recording(*args: Any, threads: int = 0, **options: Any) -> Any:
        asked.append(threads)
        return own_call(*args, threads=threads, **options)

    monkeypatch.setattr(calls, "call", recording)
    forget_calls()
    p = problem()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            run("linear_cross_entropy", p, *p.leaves("linear_cross_entropy")).backward()
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 2]


SCRIPT = """
import json, os, torch
from tileloss import torch as tl

def work():
    torch.manual_seed(0)
    x = torch.randn(256, 4096, requires_grad=True)
    loss = tl.cross_entropy(x, torch.arange(256), grad_in_forward=True)
    loss.backward()
    return loss.item(), x.grad.abs().sum().item()

def started(threads):
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    work()
    return len(os.listdir("/proc/self/task")) - before

results = {"one": started(1), "two": started(2)}
expected = work()
child = os.fork()
if child == 0:
    rows = tl.logprobs(torch.arange(8192.0).view(2, 4096).div(4096), torch.tensor([1, 2]))
    os._exit(0 if rows.logp.isfinite().all() else 1)
results["child"] = os.waitpid(child, 0)[1]
results["parent"] = work() == expected
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Of a process of its own, where no thread has started yet."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TILELOSS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_torch_thread_starts_no_other(results: dict[str, Any]) -> None:
    assert results["one"] == 0
    assert results["two"] > 0  # so that the first line can fail


def test_a_forked_child_works(results: dict[str, Any]) -> None:
    """As a DataLoader's worker: the parent's pool of threads does not exist in the child."""
    assert results["child"] == 0
    assert results["parent"]


def test_a_missing_library_is_an_import_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tileloss"],
        env={**os.environ, "TILELOSS_LIBRARY": "/nonexistent/libtileloss.so"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    expected = "ImportError: tileloss: TILELOSS_LIBRARY: expected the path of libtileloss.so, got /nonexistent/libtileloss.so"
    assert done.stderr.strip().endswith(expected)


def test_the_package_is_typed() -> None:
    assert (Path(tileloss.__file__).parent / "py.typed").is_file()
