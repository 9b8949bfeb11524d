"""Memory of large gradients of logits: on huge pages, and kept from one step to the next.

The system clears a page before it gives it out. Of a bfloat16 [2048, 151936] gradient, 622 MB, that takes 55 to 75 ms, as long
as the loss and its gradient themselves (0.8 s where a virtual machine's host has to find the memory first). So the memory of
the last such gradient that was freed serves the next one: a step takes 48 to 53 ms instead of 105 to 125. Meanwhile it is marked
MADV_FREE: the system takes it whenever it is short of memory, with nothing to write out.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from tileloss import _library

LARGE = 8 << 20  # bytes from which a gradient's memory is managed here
_kept: deque[mmap.mmap] = deque(maxlen=1)  # its append and pop are atomic: any thread may free


def empty_cache() -> None:
    """Gives the memory kept for the next large gradient of logits back to the system, as `torch.cuda.empty_cache` does a GPU's.

    There is seldom a need: the system takes that memory by itself when it is short of it. Until then it counts as resident.
    """
    _kept.clear()


def lend(like: Tensor) -> Tensor | None:
    """An uninitialised contiguous tensor of ``like``'s shape and dtype whose memory comes back here when it is freed, or None
    if the system has no such memory. Its storage cannot be resized."""
    try:
        pages = _pages_of(like.nbytes)
    except OSError:
        return None
    lent = memoryview(pages)  # lives as long as the tensor's storage
    weakref.finalize(lent, _take_back, pages).atexit = False
    # resize_ makes no view of another tensor, as reshape would.
    tensor = torch.frombuffer(lent, dtype=like.dtype, count=like.numel()).resize_(like.shape)
    _library.advise_huge_pages(tensor.data_ptr(), like.nbytes)
    return tensor


def _pages_of(size: int) -> mmap.mmap:
    with suppress(IndexError):
        pages = _kept.pop()
        if len(pages) >= size:
            return pages
        del pages  # too small for what comes now: unmapped first
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _take_back(pages: mmap.mmap) -> None:
    with suppress(OSError):  # locked in memory (mlockall), or a system without it: not ours to keep
        pages.madvise(mmap.MADV_FREE)
        _kept.append(pages)
