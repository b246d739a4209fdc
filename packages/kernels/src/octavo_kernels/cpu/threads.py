"""The threads that run CPU kernels.

One team for a process, started at the first kernel: the calling thread and
``num_threads - 1`` more, which sleep when there is nothing to do. A fork leaves the
child without it, and the child starts its own.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import threading

from octavo_kernels.cpu.jit import Kernel

# Layout of octavo_kernels.cpu.team, which this module does not import, since it imports numba.
THREAD_BYTES = 64
SHARED_BYTES = 640
MUTEX, CONDITION = 512, 576
MAX_THREADS = 256

_lead = Kernel("team.lead", "qp")
_follow = Kernel("team.follow", "")
_stop = Kernel("team.stop", "")

TEAM_KERNELS = (_lead, _follow, _stop)
"""What starts, runs and ends a team."""

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)


def _memory(size: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Return zeroed memory and an address in it that is a multiple of 64."""
    memory = ctypes.create_string_buffer(size + 64)
    return memory, -(-ctypes.addressof(memory) // 64) * 64


class Team:
    """Some threads that run one kernel at a time together.

    Args:
        num_threads: How many, the caller of `run` included.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._memory, self._shared = _memory(SHARED_BYTES + THREAD_BYTES * num_threads)
        for number in range(num_threads):
            words = struct.pack("<qqq", self._shared, number, num_threads)
            ctypes.memmove(self._thread(number), words, len(words))
        self._pthread_init()
        self._lead = _ENTRY(_lead.address)
        self._leader = self._thread(0)
        self._workers = [
            threading.Thread(target=self._follow, args=(number,), daemon=True)
            for number in range(1, num_threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, kernel: Kernel, arguments: tuple[float, ...]) -> None:
        """Run a kernel on all threads; one call at a time, others wait."""
        packed = kernel.pack(kernel.address, *arguments)
        with self._lock:
            self._lead(self._leader, packed)

    def stop(self) -> None:
        """End the threads, and wait until they have."""
        with self._lock:
            _ENTRY(_stop.address)(self._thread(0), b"")
            for worker in self._workers:
                worker.join()

    def _thread(self, number: int) -> int:
        return self._shared + SHARED_BYTES + THREAD_BYTES * number

    def _follow(self, number: int) -> None:
        _ENTRY(_follow.address)(self._thread(number), b"")

    def _pthread_init(self) -> None:
        library = ctypes.CDLL(None)
        library.pthread_mutex_init(ctypes.c_void_p(self._shared + MUTEX), None)
        library.pthread_cond_init(ctypes.c_void_p(self._shared + CONDITION), None)


_team: Team | None = None
_alone: Team | None = None
_num_threads: int | None = None
_first_default: int | None = None
_starting = threading.Lock()
_told = threading.local()  # to each Python thread: its last answer of `get_num_threads`


def default_num_threads() -> int:
    """``OCTAVO_CPU_THREADS``, or the cores that this process may run on."""
    if given := os.environ.get("OCTAVO_CPU_THREADS"):
        return max(1, min(int(given), MAX_THREADS))
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MAX_THREADS)
    return min(os.cpu_count() or 1, MAX_THREADS)


def get_num_threads() -> int:
    """How many threads run a kernel.

    Unless told otherwise, as many as there were cores when this was asked first: each of them has
    memory of its own in what is allocated for a call, whatever cores are left meanwhile.
    """
    _told.count = count = _count()
    return count


def _count() -> int:
    global _first_default
    if _num_threads:
        return _num_threads
    if _first_default is None:
        _first_default = default_num_threads()
    return _first_default


def set_num_threads(count: int) -> None:
    """Run kernels on `count` threads from now on.

    Raises:
        ValueError: `count` is not between 1 and 256.
    """
    global _num_threads, _team
    if not 1 <= count <= MAX_THREADS:
        raise ValueError(f"num_threads is {count}; it must be between 1 and {MAX_THREADS}")
    with _starting:
        _num_threads = _told.count = count
        if _team is not None and _team.num_threads != count:
            _team.stop()
            _team = None


def team() -> Team:
    """Return the process's team, started if need be."""
    global _team
    found = _team
    if found is None:
        with _starting:
            if _team is None:
                _team = Team(_count())
            found = _team
    return found


def run(kernel: Kernel, arguments: tuple[float, ...]) -> None:
    """Run a kernel on all threads, and return when it is done.

    Where another Python thread has made them more since this one asked how many there are, it runs
    on the calling thread: what was allocated for the call may have no room for more.
    """
    found = team()
    if found.num_threads > getattr(_told, "count", found.num_threads):
        run_alone(kernel, arguments)
    else:
        found.run(kernel, arguments)


def run_alone(kernel: Kernel, arguments: tuple[float, ...]) -> None:
    """Run a kernel on the calling thread."""
    global _alone
    if _alone is None:
        _alone = Team(1)
    _alone.run(kernel, arguments)


def _forget() -> None:
    """After a fork the child has the memory of a team and none of its threads."""
    global _team, _alone, _first_default, _starting
    _team = _alone = _first_default = None
    _starting = threading.Lock()


def _stop_at_exit() -> None:
    if _team is not None:
        _team.stop()


atexit.register(_stop_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
