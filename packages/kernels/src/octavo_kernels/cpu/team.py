"""What a kernel knows of the threads that run it: whose turn a chunk is, and barriers.

All threads run the same kernel with the same arguments. Work is cut into chunks that
depend on the problem only; whoever is free takes the next one, so results do not depend
on the number of threads, and a thread that another process holds up leaves its share to
the others. A thread that waits spins for some tens of microseconds (`SPINS`), and then
sleeps and frees its core.

A thread is the address of its words: `SHARED` (address of what the team shares), `RANK`
and `NUM_THREADS`. Shared words have a cache line each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import BYTES, I32, I64, call, i64, load_i64, operation

# Byte offsets; threads.py lays the memory out by them.
SHARED, RANK, NUM_THREADS = 0, 8, 16
JOB, ENTRY, CHUNK, ARRIVED, PHASE, SLEEPERS, JOINED, FINISHED = range(0, 512, 64)
MUTEX, CONDITION = 512, 576
"""64 bytes each, as much as any platform's pthread types take."""
STOP = -1
CLOSED = 1 << 32

SPINS = 1500
"""Looks at a word before a thread sleeps: about 50 us at 65 cycles per pause (Zen 3). Chunks
are shorter than that, so threads sleep only when one of them has lost its core."""


def _pointer(builder: Any, where: Any, kind: Any = I64) -> Any:
    return builder.inttoptr(where, kind.as_pointer())


def _pthread(name: str, *kinds: Any) -> Any:
    """A call of a pthread function of addresses."""

    def emit(builder: Any, *addresses: Any) -> None:
        call(builder, name, I32, *[builder.inttoptr(where, BYTES) for where in addresses])

    return operation(types.void, kinds, emit)


def _pause(builder: Any) -> None:
    if "x86" in builder.module.triple:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif "aarch64" in builder.module.triple or "arm64" in builder.module.triple:
        call(builder, "llvm.aarch64.hint", ir.VoidType(), I32(1))


def _call_entry(builder: Any, entry: Any, thread: Any, arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64, BYTES])
    function = builder.inttoptr(entry, kind.as_pointer())
    builder.call(function, [thread, builder.inttoptr(arguments, BYTES)])


atomic_add = operation(
    i64, (i64, i64), lambda b, p, n: b.atomic_rmw("add", _pointer(b, p), n, "seq_cst")
)
"""Add to a word, and return what it was before."""

atomic_load = operation(i64, (i64,), lambda b, p: b.load_atomic(_pointer(b, p), "seq_cst", 8))
atomic_store = operation(
    types.void, (i64, i64), lambda b, p, x: b.store_atomic(x, _pointer(b, p), "seq_cst", 8)
)
pause = operation(types.void, (), _pause)
call_entry = operation(types.void, (i64, i64, i64), _call_entry)
mutex_lock = _pthread("pthread_mutex_lock", i64)
mutex_unlock = _pthread("pthread_mutex_unlock", i64)
condition_wait = _pthread("pthread_cond_wait", i64, i64)
condition_broadcast = _pthread("pthread_cond_broadcast", i64)


@inline
def rank(thread: int) -> int:
    """Number of this thread in its team, from 0: for scratch memory, never for sharing work."""
    return load_i64(thread + RANK)


@inline
def num_threads(thread: int) -> int:
    return load_i64(thread + NUM_THREADS)


@inline
def next_chunk(thread: int) -> int:
    """Take a chunk: 0, 1, 2 and so on, each to one thread.

        chunk = next_chunk(thread)
        while chunk < num_chunks:
            ...
            chunk = next_chunk(thread)
        barrier(thread)

    `barrier` starts the count again; a kernel need not end with one.
    """
    return atomic_add(load_i64(thread + SHARED) + CHUNK, 1)


@jit
def wait_while(shared: int, word: int, value: int) -> None:
    """Return when a word is another than `value`: spin, then sleep."""
    for _ in range(SPINS):
        if atomic_load(word) != value:
            return
        pause()
    mutex_lock(shared + MUTEX)
    # Counted before the last look: whoever changes the word after it sees a sleeper.
    atomic_add(shared + SLEEPERS, 1)
    while atomic_load(word) == value:
        condition_wait(shared + CONDITION, shared + MUTEX)
    atomic_add(shared + SLEEPERS, -1)
    mutex_unlock(shared + MUTEX)


@jit
def wake(shared: int) -> None:
    """Have whoever sleeps look at its word again."""
    if atomic_load(shared + SLEEPERS) > 0:
        mutex_lock(shared + MUTEX)
        condition_broadcast(shared + CONDITION)
        mutex_unlock(shared + MUTEX)


@jit
def change(shared: int, word: int, value: int) -> None:
    """Set a word, and wake whoever sleeps."""
    atomic_store(word, value)
    wake(shared)


@jit
def barrier(thread: int) -> None:
    """Wait until all threads are here; all that they wrote can be read after it."""
    shared = load_i64(thread + SHARED)
    phase = atomic_load(shared + PHASE)
    if atomic_add(shared + ARRIVED, 1) + 1 == num_threads(thread):
        atomic_store(shared + ARRIVED, 0)
        atomic_store(shared + CHUNK, 0)
        change(shared, shared + PHASE, phase + 1)
    else:
        wait_while(shared, shared + PHASE, phase)


@jit
def lead(thread: int, entry: int, arguments: int) -> None:
    """Have the team run an entry point, and return when it is done.

    A thread joins a job when it sees it. A kernel with barriers needs all of them; one
    without is done when its chunks are, and threads that had no core until then are not
    waited for.
    """
    shared = load_i64(thread + SHARED)
    atomic_store(shared + ENTRY, entry)
    atomic_store(shared + ENTRY + 8, arguments)
    atomic_store(shared + CHUNK, 0)
    atomic_store(shared + FINISHED, 0)
    atomic_store(shared + JOINED, 0)
    change(shared, shared + JOB, atomic_load(shared + JOB) + 1)
    call_entry(entry, thread, arguments)
    joined = atomic_add(shared + JOINED, CLOSED)
    finished = atomic_load(shared + FINISHED)
    while finished != joined:
        wait_while(shared, shared + FINISHED, finished)
        finished = atomic_load(shared + FINISHED)


@jit
def follow(thread: int) -> None:
    """Take part in the jobs of the team until it is stopped."""
    shared = load_i64(thread + SHARED)
    job = 0
    while True:
        wait_while(shared, shared + JOB, job)
        open_job = atomic_add(shared + JOINED, 1) < CLOSED
        # Read after joining: until this thread has finished, the job stays what it is.
        job = atomic_load(shared + JOB)
        if job == STOP:
            return
        if open_job:
            call_entry(atomic_load(shared + ENTRY), thread, atomic_load(shared + ENTRY + 8))
            atomic_add(shared + FINISHED, 1)
            wake(shared)


@jit
def stop(thread: int) -> None:
    """End the team's other threads."""
    shared = load_i64(thread + SHARED)
    change(shared, shared + JOB, STOP)
