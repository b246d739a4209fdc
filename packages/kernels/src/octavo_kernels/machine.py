"""What this machine's CPU can do, measured: the limits that kernels are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads

read_bytes = Kernel("probe.read_bytes", "qqq")
copy_bytes = Kernel("probe.copy_bytes", "qqq")
multiply_add = Kernel("probe.multiply_add", "qqq")
count_chunks = Kernel("probe.count_chunks", "qqqq")
count_chunks_beside_idlers = Kernel("probe.count_chunks_beside_idlers", "qqqqq")

_BUFFER_BYTES = 1 << 28  # beyond any L3 that two cores are given


@dataclass(frozen=True)
class Machine:
    """Limits of the CPU at the current number of threads.

    Attributes:
        read_bandwidth: Bytes per second that can be read from memory.
        copy_bandwidth: Bytes per second that a copy reads and writes together.
        fp32_peak: Float32 multiplications and additions per second.
        barrier: Seconds that a barrier takes, with an empty chunk for each thread before it.
    """

    read_bandwidth: float
    copy_bandwidth: float
    fp32_peak: float
    barrier: float


def measure_machine(repeats: int = 5) -> Machine:
    """Measure the CPU, best of `repeats`; takes about a second."""
    source = np.ones(_BUFFER_BYTES, np.uint8)
    target = np.ones_like(source)
    sums = np.zeros(64 * get_num_threads(), np.uint8)
    chunks = get_num_threads()
    counts = np.zeros(chunks + 1, np.int64)
    at, to, out = source.ctypes.data, target.ctypes.data, sums.ctypes.data

    def best(run: Callable[[], None]) -> float:
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    reading = best(lambda: read_bytes(at, _BUFFER_BYTES, out))
    copying = best(lambda: copy_bytes(at, to, _BUFFER_BYTES))
    adding = best(lambda: multiply_add(64, 10_000, out))
    waiting = best(lambda: count_chunks(1000, chunks, counts.ctypes.data, out))
    return Machine(
        read_bandwidth=_BUFFER_BYTES / reading,
        copy_bandwidth=2 * _BUFFER_BYTES / copying,
        fp32_peak=64 * 10_000 * 320 / adding,
        barrier=waiting / 1000,
    )
