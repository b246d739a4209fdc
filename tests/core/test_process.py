"""Heartbeats: who is alive, and who only seems dead. And how a process begins."""

from __future__ import annotations

import gc
import mmap
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo_core.process import (
    BEATS_PER_TIMEOUT,
    HeartbeatMonitor,
    StepCounter,
    StepMonitor,
    end_of_start_up,
    start_heartbeat,
    without_collections,
)
from support.server import is_running

# A parent whose child is orphaned, and has a child and a grandchild of its own.
_ORPHAN = """
import multiprocessing, os, signal, subprocess, time
from octavo_core.process import before_orphan_ends, exit_with_parent

def orphan():
    exit_with_parent()
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )
    before_orphan_ends(lambda: os.killpg(shell.pid, signal.SIGKILL))
    print(shell.pid, shell.stdout.readline(), end="", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=orphan)
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


def test_what_an_orphan_does_before_it_ends(tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "parent.py")
    with open(script, "w") as file:
        file.write(_ORPHAN)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in parent.stdout.readline().split()]
    try:
        assert len(pids) == 3
        assert all(map(is_running, pids))
        parent.kill()
        deadline = time.monotonic() + 20
        while any(map(is_running, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for pid in filter(is_running, [*pids, parent.pid]):
            os.kill(pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()


def test_a_silent_process_is_dead_after_the_timeout() -> None:
    monitor = HeartbeatMonitor(4.0)
    assert monitor.interval * BEATS_PER_TIMEOUT == 4.0
    assert all(monitor.tick() for _ in range(BEATS_PER_TIMEOUT))
    assert not monitor.tick()


def test_one_beat_in_time_is_enough() -> None:
    monitor = HeartbeatMonitor(4.0)
    for _ in range(5):
        for _ in range(BEATS_PER_TIMEOUT):
            assert monitor.tick()
        monitor.beat()


def test_beats_come_while_the_main_thread_is_busy() -> None:
    beats = threading.Semaphore(0)
    stopped = start_heartbeat(0.08, beats.release)
    end = time.monotonic() + 10
    for _ in range(5):
        while not beats.acquire(blocking=False):  # holds the interpreter all the time
            assert time.monotonic() < end
    stopped.set()


def test_each_step_has_its_own_number() -> None:
    steps = StepCounter()
    seen = [steps.running]
    for _ in range(2):
        with steps:
            seen.append(steps.running)
        seen.append(steps.running)
    assert seen == [None, 1, None, 2, None]


def test_one_step_may_take_so_long_and_many_may_take_longer() -> None:
    monitor = StepMonitor(timeout=3.0, interval=0.5)
    assert all(monitor.beat(step) for step in (1, 1, 1, 1, 2, 2, 2, 2, 2, None, None) * 3)
    assert all(monitor.beat(None) for _ in range(100))
    assert [monitor.beat(7) for _ in range(8)] == [True] * 7 + [False]  # 6 intervals and a beat


def test_a_step_without_a_limit() -> None:
    monitor = StepMonitor(timeout=0, interval=0.5)
    assert all(monitor.beat(7) for _ in range(10_000))


@pytest.fixture
def own_collector() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_while_modules_are_made(own_collector: None) -> None:
    before, num_frozen = num_collections(), gc.get_freeze_count()
    with without_collections():
        made = [[number] for number in range(10_000)]
        assert num_collections() == before
    assert gc.get_freeze_count() - num_frozen >= len(made)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off(own_collector: None) -> None:
    gc.disable()
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert not gc.isenabled()


def test_what_starting_has_left_is_collected_and_all_else_stays(own_collector: None) -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    left, kept = weakref.ref(Node()), Node()
    num_frozen = gc.get_freeze_count()
    end_of_start_up()
    assert left() is None
    assert gc.get_freeze_count() > num_frozen
    assert kept.itself is kept


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can give it back")
def test_memory_that_is_free_goes_back_to_the_system(own_collector: None) -> None:
    # Below the size from which memory has mappings of its own, and held by what was made last.
    blocks = [bytearray(100_000) for _ in range(500)]
    last = bytearray(100_000)
    del blocks
    before = resident_bytes()
    end_of_start_up()
    assert before - resident_bytes() > 25_000_000
    del last
