"""Heartbeats: who is alive, and who only seems dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from octavo_core.process import (
    BEATS_PER_TIMEOUT,
    HeartbeatMonitor,
    StepCounter,
    StepMonitor,
    start_heartbeat,
)
from support.server import is_running

# A parent whose child is orphaned, and has a child and a grandchild of its own.
_ORPHAN = """
import multiprocessing, subprocess, sys, time
from octavo_core.process import before_orphan_ends, exit_with_parent, kill_descendants

def orphan():
    exit_with_parent()
    before_orphan_ends(kill_descendants)
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $$ $!; wait"], start_new_session=True)
    time.sleep(60)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=orphan)
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


def test_an_orphan_takes_its_descendants_along(tmp_path: os.PathLike[str]) -> None:
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
