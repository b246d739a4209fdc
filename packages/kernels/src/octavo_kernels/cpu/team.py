"""What a kernel knows of the threads that run it: whose turn a chunk is, and barriers.

All threads run the same kernel with the same arguments. Work is cut into chunks that
depend on the problem only; whoever is free takes the next one, so results do not depend
on the number of threads, and a thread that another process holds up leaves its share to
the others. A thread that waits spins for some tens of microseconds (`SPINS`), and then
sleeps and frees its core.

Barriers divide a kernel into phases. A phase ends when a thread is at its barrier and nobody
holds a chunk, so only the threads that did its work are waited for. One that has no core
meanwhile is phases behind when it goes on: it finds no chunks and passes the barriers until it
has caught up. What a kernel does outside of chunks, it may therefore do late, while others
write what it reads: the results must go nowhere but to memory of its own (see `rank`), and
what decides which barriers it comes to may be written in an earlier phase only.

A thread is the address of its words: `SHARED` (address of what the team shares), `RANK`,
`NUM_THREADS`, its phase and whether it holds chunks. Shared words have a cache line each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo_kernels.cpu.jit import inline, jit
from octavo_kernels.cpu.simd import BYTES, I32, I64, call, i64, load_i64, operation, store_i64

# Byte offsets; threads.py lays the memory out by them.
SHARED, RANK, NUM_THREADS, OWN_PHASE, HOLDS = range(0, 40, 8)
JOB, ENTRY, PHASE, SLEEPERS, JOINED, FINISHED = range(0, 384, 64)
MUTEX, CONDITION = 512, 576
"""64 bytes each, as much as any platform's pthread types take."""
STOP = -1
CLOSED = 1 << 32

HOLDER, PHASE_STEP = 1 << 32, 1 << 42
CHUNKS, HOLDERS, PHASES, WHOLE = HOLDER - 1, PHASE_STEP - HOLDER, -PHASE_STEP, -1
"""Of the word `PHASE`: how many chunks were taken, how many threads hold some, and which phase
it is of. All three change together, so nobody takes a chunk of another phase than its own."""
NO_CHUNK = 1 << 40
"""More than there are chunks."""

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


def _compare_exchange(builder: Any, where: Any, expected: Any, value: Any) -> Any:
    found = builder.cmpxchg(_pointer(builder, where), expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(found, 0)


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
compare_exchange = operation(i64, (i64, i64, i64), _compare_exchange)
"""Set a word to the second value if it is the first, and return what it was before."""

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


@jit
def next_chunk(thread: int) -> int:
    """Take a chunk of this phase: 0, 1, 2 and so on, each to one thread.

        chunk = next_chunk(thread)
        while chunk < num_chunks:
            ...
            chunk = next_chunk(thread)
        barrier(thread)

    `barrier` starts the count again; a kernel need not end with one. Once the phase is over the
    answer is `NO_CHUNK`.
    """
    word, phase = load_i64(thread + SHARED) + PHASE, load_i64(thread + OWN_PHASE)
    taken = 1 if load_i64(thread + HOLDS) else 1 + HOLDER
    found = atomic_load(word)
    while found & PHASES == phase:
        before = compare_exchange(word, found, found + taken)
        if before == found:
            store_i64(thread + HOLDS, 1)
            return found & CHUNKS
        found = before
    return NO_CHUNK


@jit
def wait_while(shared: int, word: int, mask: int, value: int) -> None:
    """Return when the bits of a word in `mask` are another than `value`: spin, then sleep."""
    for _ in range(SPINS):
        if atomic_load(word) & mask != value:
            return
        pause()
    mutex_lock(shared + MUTEX)
    # Counted before the last look: whoever changes the word after it sees a sleeper.
    atomic_add(shared + SLEEPERS, 1)
    while atomic_load(word) & mask == value:
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
    """End the phase: wait until nobody holds a chunk; all that was written can be read after it."""
    shared, phase = load_i64(thread + SHARED), load_i64(thread + OWN_PHASE)
    word, held = shared + PHASE, HOLDER if load_i64(thread + HOLDS) else 0
    store_i64(thread + OWN_PHASE, phase + PHASE_STEP)
    store_i64(thread + HOLDS, 0)
    found = atomic_load(word)
    while found & PHASES == phase:
        left = found - held
        is_over = left & HOLDERS == 0
        if is_over:
            left = phase + PHASE_STEP
        before = compare_exchange(word, found, left)
        if before == found:
            if is_over:
                wake(shared)
            else:
                wait_while(shared, word, PHASES, phase)
            return
        found = before


@inline
def begin(thread: int) -> None:
    """Be in the first phase, with no chunk."""
    store_i64(thread + OWN_PHASE, 0)
    store_i64(thread + HOLDS, 0)


@jit
def run_job(thread: int, entry: int, arguments: int) -> None:
    """Run an entry point on this thread, from the first phase on."""
    begin(thread)
    call_entry(entry, thread, arguments)


@jit
def start_alone(thread: int) -> None:
    """Begin the first phase of a team that has this thread only.

    What it was in before is forgotten: a fork leaves the child with whatever another thread was
    in the middle of.
    """
    atomic_store(load_i64(thread + SHARED) + PHASE, 0)
    begin(thread)


@jit
def lead(thread: int, entry: int, arguments: int) -> None:
    """Have the team run an entry point, and return when it is done.

    A thread joins a job when it sees it. Those that had no core until it is done are not waited
    for; those that joined are, since they read its arguments.
    """
    shared = load_i64(thread + SHARED)
    atomic_store(shared + ENTRY, entry)
    atomic_store(shared + ENTRY + 8, arguments)
    atomic_store(shared + PHASE, 0)
    atomic_store(shared + FINISHED, 0)
    atomic_store(shared + JOINED, 0)
    change(shared, shared + JOB, atomic_load(shared + JOB) + 1)
    run_job(thread, entry, arguments)
    joined = atomic_add(shared + JOINED, CLOSED)
    finished = atomic_load(shared + FINISHED)
    while finished != joined:
        wait_while(shared, shared + FINISHED, WHOLE, finished)
        finished = atomic_load(shared + FINISHED)


@jit
def follow(thread: int) -> None:
    """Take part in the jobs of the team until it is stopped."""
    shared = load_i64(thread + SHARED)
    job = 0
    while True:
        wait_while(shared, shared + JOB, WHOLE, job)
        open_job = atomic_add(shared + JOINED, 1) < CLOSED
        # Read after joining: until this thread has finished, the job stays what it is.
        job = atomic_load(shared + JOB)
        if job == STOP:
            return
        if open_job:
            run_job(thread, atomic_load(shared + ENTRY), atomic_load(shared + ENTRY + 8))
            atomic_add(shared + FINISHED, 1)
            wake(shared)


@jit
def stop(thread: int) -> None:
    """End the team's other threads."""
    shared = load_i64(thread + SHARED)
    change(shared, shared + JOB, STOP)
