"""Memory of large gradients: on huge pages, and kept from one step to the next.

The system clears a page before it gives it out. Of a bfloat16 [2048, 151936] gradient, 622 MB, that takes 55 to 75 ms, as long
as the loss and its gradient themselves (0.8 s where a virtual machine's host has to find the memory first). So the memory of
the last gradient of a kind (logits, hidden states, head) that was freed serves the next one of that kind: a step takes 48 to
53 ms instead of 105 to 125. Meanwhile it is marked MADV_FREE: the system takes it whenever it is short of memory, with nothing
to write out.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from tileloss._core import pages as huge

LARGE = 8 << 20  # bytes from which a gradient's memory is managed here
# The last one of a kind that was freed. append and pop of a deque are atomic: any thread may free.
_kept: dict[str, deque[mmap.mmap]] = {
    kind: deque(maxlen=1)
    for kind in ("dlogits", "dhidden", "dhead", "dbias", "dhidden_r", "dhead_r")
}


def empty_cache() -> None:
    """Gives the memory kept for the next large gradients back to the system, as `torch.cuda.empty_cache` does a GPU's.

    There is seldom a need: the system takes that memory by itself when it is short of it. Until then it counts as resident.
    """
    for kept in _kept.values():
        kept.clear()


def lend(like: Tensor, kind: str) -> Tensor | None:
    """An uninitialised contiguous tensor of ``like``'s shape and dtype whose memory comes back here when it is freed, or None
    if the system has no such memory. Its storage cannot be resized."""
    kept = _kept[kind]
    try:
        pages = _pages_of(like.nbytes, kept)
    except OSError:
        return None
    lent = memoryview(pages)  # lives as long as the tensor's storage
    weakref.finalize(lent, _take_back, pages, kept).atexit = False
    # resize_ makes no view of another tensor, as reshape would.
    tensor = torch.frombuffer(lent, dtype=like.dtype, count=like.numel()).resize_(like.shape)
    huge.advise_huge_pages(tensor.data_ptr(), like.nbytes)
    return tensor


def _pages_of(size: int, kept: deque[mmap.mmap]) -> mmap.mmap:
    with suppress(IndexError):
        pages = kept.pop()
        if len(pages) >= size:
            return pages
        del pages  # too small for what comes now: unmapped first
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _take_back(pages: mmap.mmap, kept: deque[mmap.mmap]) -> None:
    with suppress(OSError):  # locked in memory (mlockall), or a system without it: not ours to keep
        pages.madvise(mmap.MADV_FREE)
        kept.append(pages)
