"""Memory on huge pages: fewer misses of the TLB where every step reads all weights.

A model of 100 MB is 24,000 pages of 4 KiB, and the CPU's prefetchers stop at the end of
each. On 2 MiB pages a decode step of a 135M model takes 0.8 times as long.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_CHUNK = 32 * HUGE_PAGE
_CACHE_LINE = 64
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; the mmap module has no name for it


class HugePageMemory:
    """Holds tensors on a CPU side by side, on huge pages where the system has them to give.

    Memory comes from the system in chunks of 64 MiB, or as large as a tensor is; what of a
    chunk was never written takes none. It goes back when the last tensor in it does.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of it

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy that lies here, at a multiple of 64."""
        num_bytes = tensor.numel() * tensor.element_size()
        room = -(-num_bytes // _CACHE_LINE) * _CACHE_LINE
        if room > len(self._chunk):
            self._chunk = map_memory(max(_CHUNK, -(-room // HUGE_PAGE) * HUGE_PAGE))
        place, self._chunk = self._chunk[:num_bytes], self._chunk[room:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def map_memory(num_bytes: int) -> Tensor:
    """Return ``[num_bytes]`` uint8 zeros, of which no page is taken before it is used.

    If they fill one, they begin with a huge page, where there are any. torch.zeros writes all of
    it, 1 s for 4 GiB; so does calloc, and np.zeros with it, where a model that was there before
    has left enough room in the heap.
    """
    if num_bytes < HUGE_PAGE:  # a page would be more than is asked for
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = _map(num_bytes + HUGE_PAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=num_bytes)


def populate_memory(address: int, num_bytes: int) -> None:
    """Have pages of `map_memory` taken now that a first write would take; contents stay.

    Other threads run meanwhile, and may read and write there.

    Args:
        address: Of the first, at a page.
        num_bytes: From there on.

    Raises:
        OSError: The system can't, has no memory left, or nothing is mapped there.
    """
    if _libc is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# Unlike mmap.madvise, it lets go of the interpreter.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(num_bytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
