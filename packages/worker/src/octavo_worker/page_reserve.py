"""Pages of a CPU's KV cache, taken from the system before a step needs them."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from octavo_kernels import HUGE_PAGE, populate_memory
from octavo_worker.kv_caches import KVPool, memory_of

RESERVE = 128 << 20
"""Bytes beyond the highest block so far: 5,700 tokens of the starter model, most of what a crowd of
32 requests of 256 tokens takes. More would be much beside what a small model takes itself."""

QUIET = 0.05
"""Seconds after a step before pages are taken: between two steps of a busy engine there are a few
milliseconds at most, in which a thread that zeroes pages would be in the next one's way."""


class PageReserve:
    """Keeps pages of the next blocks present, so that no step waits for them.

    A thread takes them, a huge page at a time, from the first `end_step` on while no step runs.
    Contents stay, so it does no harm where a step begins meanwhile. The thread ends with this
    object, which it holds while it takes a page, so that the memory stays mapped. It also ends
    where the system can't do it or has no memory left; then steps take their pages themselves.

    Args:
        pool: The KV cache, on a CPU.
        num_blocks: Of it.
        workers_here: That share the machine, and so the reserve.
    """

    def __init__(self, pool: KVPool, num_blocks: int, workers_here: int = 1) -> None:
        storages = [storage for storage in memory_of(pool.caches) if storage.nbytes() >= HUGE_PAGE]
        self._storages = storages  # they stay as long as their addresses are of use
        self._spans = [
            _Span(storage.data_ptr(), storage.nbytes(), storage.nbytes() // num_blocks)
            for storage in storages
        ]
        self._reserve = RESERVE // workers_here // max(len(storages), 1)
        self._num_blocks_used = -1
        self._idle_since = math.inf
        # Unlike an event, it can be told something in a fork and by the garbage collector.
        self._calls = calls = SimpleQueue[None]()
        this = weakref.ref(self, lambda _: calls.put(None))
        threading.Thread(
            target=_take_pages, args=(this, calls), name="octavo-kv-pages", daemon=True
        ).start()

    def begin_step(self) -> None:
        """Take nothing from now on; one that is on its way is not waited for."""
        self._idle_since = math.inf

    def end_step(self, num_blocks_used: int) -> None:
        """Go on after a while, beyond so many blocks: those up to the highest that was used."""
        self._idle_since = time.monotonic()
        if num_blocks_used > self._num_blocks_used:
            self._num_blocks_used = num_blocks_used
            if self._calls.empty():
                self._calls.put(None)

    def take_page(self) -> float | None:
        """Take a page, if nothing runs.

        Returns:
            Seconds after which to come again; None if there is nothing left to take.

        Raises:
            OSError: The system can't.
        """
        quiet_in = self._idle_since + QUIET - time.monotonic()
        if quiet_in > 0:
            return min(quiet_in, QUIET)
        for span in self._spans:
            if span.take_page(self._num_blocks_used, self._reserve):
                return 0
        return None


@dataclass
class _Span:
    """Memory of all blocks, of one layer or of all.

    Attributes:
        address: Of the first block, at a huge page.
        num_bytes: Of all of it.
        block_bytes: Of a block.
        taken: Bytes from the beginning of which nothing is left to take.
    """

    address: int
    num_bytes: int
    block_bytes: int
    taken: int = 0

    def take_page(self, num_blocks_used: int, reserve: int) -> bool:
        """Take the first page that is missing beyond the used blocks; False if none is."""
        used = num_blocks_used * self.block_bytes
        start = max(self.taken, used // HUGE_PAGE * HUGE_PAGE)
        end = min(start + HUGE_PAGE, self.num_bytes)
        if start >= end or end > used + reserve:
            return False
        populate_memory(self.address + start, end - start)
        self.taken = end
        return True


def _take_pages(
    reserve_if_there: Callable[[], PageReserve | None], calls: SimpleQueue[None]
) -> None:
    """Take pages whenever called, and hold the reserve only meanwhile."""
    with suppress(OSError):
        while True:
            calls.get()
            wait: float | None = 0
            while wait is not None:
                time.sleep(wait)
                reserve = reserve_if_there()
                if reserve is None:
                    return
                wait = reserve.take_page()
                del reserve
