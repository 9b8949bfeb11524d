"""Large gradients: huge pages, and memory that serves step after step."""

from __future__ import annotations

import copy
import ctypes
import mmap
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tileloss import torch as tl
from tileloss._core import pages
from torch_problems import allocations

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": tl.cross_entropy,
    "logprobs": lambda x, y, grad_in_forward=False: sum(
        tl.logprobs(x, y, outputs=("logp", "lse"))[:2]
    ).sum(),
    "policy_loss": lambda x, y, **mode: tl.policy_loss(x, y, torch.ones(1), **mode),
    "linear_cross_entropy": tl.linear_cross_entropy,
    "linear_logprobs": lambda h, w, y, grad_in_forward=False: tl.linear_logprobs(
        h, w, y
    ).logp.sum(),
    "linear_policy_loss": lambda h, w, y, **mode: tl.linear_policy_loss(
        h, w, y, torch.ones(1), **mode
    ),
}


def test_large_gradients_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        pages, "advise_huge_pages", lambda address, size: asked.append((address, size))
    )
    large = torch.randn(40, 131072).requires_grad_()
    gradient, small = large, large[:1].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(tl.cross_entropy(large, torch.zeros(40).long()), large)
    torch.autograd.grad(tl.cross_entropy(small, torch.zeros(1).long()), small)
    assert asked == [(gradient.data_ptr(), gradient.nbytes)]


def test_the_kernel_takes_the_advice() -> None:
    """VmFlags of the mapping: hg."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel's transparent huge pages are off")
    buffer = torch.empty(64 << 20, dtype=torch.uint8)  # a mapping of its own
    assert "hg" not in flags_at(buffer.data_ptr() + (32 << 20))
    pages.advise_huge_pages(buffer.data_ptr(), buffer.nbytes)
    assert "hg" in flags_at(buffer.data_ptr() + (32 << 20))
    pages.advise_huge_pages(ctypes.addressof(ctypes.c_char()), 1)  # too small: no advice, no error


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    tl.empty_cache()
    yield
    tl.empty_cache()


def large_batch(rows: int = 36) -> tuple[Tensor, Tensor]:
    """Logits of 9.4 MB in 36 rows."""
    return torch.randn(rows, 131072).bfloat16().requires_grad_(), torch.randint(0, 131072, (rows,))


def large_head() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of 9.4 MB and a head of 8.4 MB."""
    hidden, weight = torch.randn(144, 16384), 0.01 * torch.randn(128, 16384)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, 128, (144,))


def large(name: str) -> tuple[Tensor, ...]:
    return large_head() if name.startswith("linear") else large_batch()


def gradients_of(name: str, *given: Tensor, **mode: Any) -> tuple[Tensor, ...]:
    """dlogits, or dhidden and dhead."""
    return torch.autograd.grad(LOSSES[name](*given, **mode), given[:-1])


def gradient_of(name: str, *given: Tensor, **mode: Any) -> Tensor:
    return gradients_of(name, *given, **mode)[0]


@pytest.mark.parametrize("one_pass", [True, False], ids=["one pass", "two passes"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_memory_of_freed_gradients_serves_the_next(
    name: str, one_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = large(name)
    first = gradients_of(name, *given, grad_in_forward=one_pass)
    addresses, values = [g.data_ptr() for g in first], [g.clone() for g in first]
    del first
    assert all(map(is_mapped, addresses))  # kept: a new mapping might lie at the same place
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(pages, "advise_huge_pages", lambda *pages: asked.append(pages))
    second = gradients_of(name, *given, grad_in_forward=one_pass)
    assert [g.data_ptr() for g in second] == addresses
    assert all(torch.equal(a, b) for a, b in zip(second, values, strict=True))
    assert asked == [(g.data_ptr(), g.nbytes) for g in second]
    del second
    assert [kilobytes_at(a + (5 << 20), "LazyFree") > 0 for a in addresses] == [True] * len(values)
    tl.empty_cache()
    assert not any(map(is_mapped, addresses))


def test_gradients_of_the_head_accumulate_where_the_first_one_lies() -> None:
    hidden, weight, labels = large_head()
    addresses = set()
    for _ in range(3):
        tl.linear_cross_entropy(hidden, weight, labels).backward()
        addresses.add(weight.grad.data_ptr())
    assert len(addresses) == 1
    torch.testing.assert_close(
        (hidden.grad, weight.grad),
        tuple(3 * g for g in gradients_of("linear_cross_entropy", hidden, weight, labels)),
    )


@pytest.mark.parametrize(
    "name", ["cross_entropy", pytest.param("linear_logprobs", marks=pytest.mark.full)]
)
def test_the_memory_serves_a_compiled_step_too(name: str) -> None:
    given = large(name)
    expected = gradients_of(name, *given)
    compiled = torch.compile(lambda *given: LOSSES[name](*given), fullgraph=True)
    addresses = set()
    for _ in range(3):
        gradients = torch.autograd.grad(compiled(*given), given[:-1])
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        addresses.add(tuple(g.data_ptr() for g in gradients))
        del gradients
    assert len(addresses) == 1


def fork_beside_gradients() -> None:
    given = large_head()
    gradients = gradients_of("linear_cross_entropy", *given)
    values = [g.clone() for g in gradients]
    kept = gradient_of("cross_entropy", *large_batch())
    address = kept.data_ptr()
    del kept
    child = os.fork()
    if child == 0:
        try:
            for g in gradients:
                g.zero_()
            del g, gradients
            again = gradients_of("linear_cross_entropy", *given)
            same = all(torch.equal(a, b) for a, b in zip(again, values, strict=True))
            os._exit(
                0 if same and gradient_of("cross_entropy", *large_batch()).isfinite().all() else 1
            )
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert all(torch.equal(a, b) for a, b in zip(gradients, values, strict=True))
    assert gradient_of("cross_entropy", *large_batch()).data_ptr() == address


def test_a_forked_child_has_its_own_copy() -> None:
    """Of the gradients that the parent holds, and of the memory that it keeps. In a process of its own: torch refuses a backward
    in a fork of one where a compiled program has run."""
    parent = multiprocessing.get_context("spawn").Process(target=fork_beside_gradients)
    parent.start()
    parent.join()
    assert parent.exitcode == 0


def test_a_gradient_in_use_keeps_its_memory() -> None:
    x, labels = large_batch()
    first = gradient_of("cross_entropy", x, labels)
    view, values = first[3:5], first[3:5].clone()
    del first  # its storage lives on in the view
    second = gradient_of("cross_entropy", x * 2, labels)
    assert second.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    assert torch.equal(view, values)


def test_a_smaller_gradient_fits_and_a_larger_one_gets_its_own() -> None:
    larger, smaller = large_batch(72), large_batch(36)
    address = gradient_of("cross_entropy", *larger).data_ptr()
    small = gradient_of("cross_entropy", *smaller)
    assert small.data_ptr() == address
    assert small.untyped_storage().nbytes() == small.nbytes
    del small
    tl.empty_cache()
    gradient_of("cross_entropy", *smaller)  # what is kept now is too small for the next
    torch.testing.assert_close(
        gradient_of("cross_entropy", *larger), own_gradient(*larger), rtol=2e-2, atol=1e-6
    )


def own_gradient(x: Tensor, labels: Tensor) -> Tensor:
    loss = torch.nn.functional.cross_entropy(x.float(), labels)
    return torch.autograd.grad(loss, x)[0]


def test_only_one_gradients_memory_is_kept_and_empty_cache_unmaps_it() -> None:
    """By what lies there, as another thread's memory may come to lie where one was."""
    x, labels = large_batch()
    gradients = [gradient_of("cross_entropy", x, labels).fill_(7) for _ in range(3)]
    addresses, sevens = [g.data_ptr() for g in gradients], bytes_at(gradients[0].data_ptr())
    assert sum(bytes_at(address) == sevens for address in addresses) == 3
    gradients.clear()
    assert sum(bytes_at(address) == sevens for address in addresses) == 1
    tl.empty_cache()
    assert not any(bytes_at(address) == sevens for address in addresses)
    tl.empty_cache()  # nothing left: no error


def test_the_system_may_take_the_memory_that_is_kept() -> None:
    """smaps' LazyFree: what MADV_FREE has marked."""
    x, labels = large_batch()
    gradient = gradient_of("cross_entropy", x, labels)
    middle, huge_pages = gradient.data_ptr() + gradient.nbytes // 2, gradient.nbytes - (4 << 20)
    assert kilobytes_at(middle, "LazyFree") == 0
    del gradient
    assert kilobytes_at(middle, "LazyFree") * 1024 >= huge_pages


def test_memory_that_may_not_be_marked_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_FREE", 12345)
    x, labels = large_batch()
    gradient = gradient_of("cross_entropy", x, labels)
    address = gradient.data_ptr()
    del gradient
    assert not is_mapped(address)


def test_a_system_without_memory_leaves_the_error_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    x, labels = large_batch()
    blocks = allocations(lambda: gradient_of("cross_entropy", x, labels))
    assert blocks[0] == x.nbytes  # torch's allocator was asked


def test_gradients_freed_on_other_threads() -> None:
    x, labels = large_batch()
    head = large_head()

    def both() -> tuple[Tensor, ...]:
        return (
            gradient_of("cross_entropy", x, labels),
            *gradients_of("linear_cross_entropy", *head),
        )

    expected = both()
    wrong: list[int] = []

    def steps() -> None:
        for step in range(10):
            if not all(torch.equal(a, b) for a, b in zip(both(), expected, strict=True)):
                wrong.append(step)

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_lent_gradient_is_a_tensor_like_any_other() -> None:
    x, labels = large_batch()
    gradient = gradient_of("cross_entropy", x, labels)
    assert not gradient._is_view()
    assert gradient.is_contiguous()
    assert gradient.storage_offset() == 0
    assert torch.equal(copy.deepcopy(gradient), gradient)
    tl.cross_entropy(x, labels).backward()
    assert x.grad is not None
    address = x.grad.data_ptr()
    tl.cross_entropy(x, labels).backward()  # accumulates where the first one lies
    assert x.grad.data_ptr() == address
    torch.testing.assert_close(x.grad, 2 * gradient)


def bytes_at(address: int) -> bytes:
    """A page of this process; none where nothing is mapped."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(memory, 4096, address)
    except OSError:
        return b""
    finally:
        os.close(memory)


def is_mapped(address: int) -> bool:
    try:
        flags_at(address)
    except AssertionError:
        return False
    return True


def kilobytes_at(address: int, field: str) -> int:
    return int(lines_at(address)[field].split()[0])


def flags_at(address: int) -> list[str]:
    return lines_at(address)["VmFlags"].split()


def lines_at(address: int) -> dict[str, str]:
    """/proc/self/smaps of the mapping that holds the address: field -> value."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= address < end
        elif inside:
            fields[first[:-1]] = rest.strip()
    if not fields:
        raise AssertionError("no mapping holds this address")
    return fields
