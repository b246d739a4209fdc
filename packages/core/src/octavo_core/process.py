"""Manners of a child process."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_last_acts: list[Callable[[], None]] = []


def exit_with_parent(folder: Path | None = None) -> None:
    """End this process at once when the process that spawned it is gone, however it died.

    Starts a daemon thread that waits on the parent's sentinel. Does nothing in a
    process that multiprocessing did not start.

    Args:
        folder: Private folder of the parent for both, which it can't remove any more.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    _go_on_without_parent()

    def watch() -> None:
        wait([parent.sentinel])
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for act in _last_acts:
            act()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _go_on_without_parent() -> None:
    """Have Linux continue this process when its parent ends, for a stopped one notices nothing."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def before_orphan_ends(act: Callable[[], None]) -> None:
    """Have `act` called when this process ends because its parent is gone; it must not fail."""
    _last_acts.append(act)


def start_without_interrupts(process: BaseProcess) -> None:
    """Start a child that a terminal's Ctrl-C does not reach.

    A terminal sends SIGINT to the whole group, and a child would print a traceback where its
    parent ends in order. The child inherits the blocked signal, so that it is safe from its
    first instruction on; the parent gets what came in the meantime right after.
    """
    # Starting the tracker, which a first child does, would unblock the signal again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from what is made meanwhile, for good: modules, which stay.

    Importing torch makes half a million objects. The collector would go through all of them
    again and again, which is 0.2 of 1.1 s, and 0.1 s more whenever it looks at everything.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def end_of_start_up() -> None:
    """Collect what starting has left behind, for good: later collections look at nothing of it."""
    gc.collect()
    gc.freeze()
    give_back_memory()


def give_back_memory() -> None:
    """Give the system what is free: glibc keeps it, after a tokenizer was read 27 MB in a front."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has computed; where that can't be known, as long as it has lived."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# A process counts as dead after so many heartbeats in a row that did not come.
BEATS_PER_TIMEOUT = 8


def start_heartbeat(timeout: float, beat: Callable[[], None]) -> threading.Event:
    """Call `beat` often enough that nobody who waits `timeout` seconds gives this process up.

    The beats come from a thread of their own, so that a step of a minute does not delay them:
    whatever computes that long does so without the interpreter's lock. What stops them is what
    stops the process: a signal, or a debugger.

    Args:
        timeout: Seconds, the one that the `HeartbeatMonitor` at the other end has.
        beat: Sends one sign of life; called in that thread.

    Returns:
        An event; set it to end the thread.
    """
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(timeout / BEATS_PER_TIMEOUT):
            beat()

    threading.Thread(target=run, name="heartbeat", daemon=True).start()
    return stopped


class StepCounter:
    """Numbers the steps of a process's main thread, so that its heartbeat can tell them apart.

    Attributes:
        running: Number of the step that runs; None between two of them. Any thread may look.
    """

    def __init__(self) -> None:
        self.running: int | None = None
        self._num_begun = 0

    def __enter__(self) -> None:
        self._num_begun += 1
        self.running = self._num_begun

    def __exit__(self, *exc_info: object) -> None:
        self.running = None


class StepMonitor:
    """Tells whether a process that beats has been in one step for too long.

    Its main thread may wait for a device for ever, which stops no heartbeat. Time is counted in
    beats and read off no clock: what was suspended, machine or process, sends none meanwhile.

    Args:
        timeout: Seconds that one step may take; 0 for as long as it likes.
        interval: Seconds between two beats.
    """

    def __init__(self, timeout: float, interval: float) -> None:
        self._max_beats = timeout / interval if timeout else float("inf")
        self._num_beats = 0
        self._step: int | None = None

    def beat(self, step: int | None) -> bool:
        """Take note of a beat and the step it came in; return False once that takes too long."""
        if step is None or step != self._step:
            self._step = step
            self._num_beats = 0
            return True
        self._num_beats += 1
        return self._num_beats <= self._max_beats


class HeartbeatMonitor:
    """Tells whether a process still gives signs of life.

    It counts its owner's own ticks instead of reading a clock: an owner that was itself
    stopped for an hour has missed one tick, not an hour of beats.

    Args:
        timeout: Seconds without a beat after which the process counts as dead.

    Attributes:
        interval: Seconds between two ticks.
    """

    def __init__(self, timeout: float) -> None:
        self.interval = timeout / BEATS_PER_TIMEOUT
        self._num_missed = 0

    def beat(self) -> None:
        """Take note of a sign of life."""
        self._num_missed = 0

    def tick(self) -> bool:
        """Count one interval; return False once the process counts as dead."""
        self._num_missed += 1
        return self._num_missed <= BEATS_PER_TIMEOUT
