"""Heartbeats: who is alive, and who only seems dead."""

from __future__ import annotations

import threading
import time

from octavo_core.process import BEATS_PER_TIMEOUT, HeartbeatMonitor, start_heartbeat


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
