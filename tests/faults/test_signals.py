"""Promise: a server ends when it is told to, in order or at once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.faults import LONG, Figures, Target, mixed_bodies, run_as_command, stream_all
from support.server import children_of, is_running, running_server

FORCED_WITHIN = 2.0
GONE_WITHIN = 5.0


async def check(target: Target) -> Figures:
    """End a running server with two signals, under a stream, and look for what is left."""
    pids = [target.pid, *children_of(target.pid)]
    asyncio.get_running_loop().create_task(stream_all(target, [LONG_ANSWER]))
    await asyncio.sleep(0.5)
    os.kill(target.pid, signal.SIGTERM)
    await asyncio.sleep(0.3)
    os.kill(target.pid, signal.SIGTERM)
    started = time.monotonic()
    while any(map(is_running, pids)):
        assert time.monotonic() - started < FORCED_WITHIN
        await asyncio.sleep(0.02)
    return {"seconds from the second signal to the end": time.monotonic() - started}


LONG_ANSWER = {"prompt": "slow" * 60, "max_tokens": 240, "temperature": 0}


def wait_gone(pids: list[int], within: float = GONE_WITHIN) -> None:
    deadline = time.monotonic() + within
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


async def test_a_second_signal_forces(start_target: Any) -> None:
    await check(start_target())


async def test_a_second_signal_forces_beside_an_engine_that_does_not_hear(
    start_front: Any,
) -> None:
    front = start_front().wait_ready()
    target = Target(front.url, front.process.pid)
    target.kill("octavo: engine", signal.SIGSTOP)
    await check(target)
    assert "Traceback" not in front.stderr


async def test_a_killed_front_leaves_no_process(start_front: Any) -> None:
    """Not even an engine that is in the middle of a step, or of its second life."""
    front = start_front().wait_ready()
    target = Target(front.url, front.process.pid)
    target.kill("octavo: engine")
    while target.find("octavo: engine") is None:
        await asyncio.sleep(0.02)
    pids = [target.pid, *children_of(target.pid)]
    assert len(pids) >= 2
    front.process.kill()
    await asyncio.to_thread(wait_gone, pids)


async def test_a_killed_front_leaves_no_process_that_was_stopped(start_front: Any) -> None:
    front = start_front().wait_ready()
    engine = Target(front.url, front.process.pid).kill("octavo: engine", signal.SIGSTOP)
    front.process.kill()
    await asyncio.to_thread(wait_gone, [engine])


def test_a_server_that_crashes_while_it_drains_still_ends(start_front: Any) -> None:
    front = start_front(shutdown_timeout=20).wait_ready()
    target = Target(front.url, front.process.pid)
    body = {"prompt": "slow" * 20, "max_tokens": 60, "stream": True}
    with httpx.stream("POST", target.url + "/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        front.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        target.kill("octavo: engine")
        rest = [line for line in lines if line]
    # The stream was promised its end, and a new engine brings it.
    assert '"finish_reason":"length"' in rest[-2]
    assert front.process.wait(timeout=20) == 0


@pytest.mark.parametrize("times", [3, pytest.param(50, marks=LONG)])
def test_starts_and_stops_leave_nothing(
    start_front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """No process, no socket, no shared memory and no temporary file, however it ends."""
    temporary = Path(tempfile.mkdtemp(prefix="o-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    for number in range(times):
        front = start_front().wait_ready()
        pids = [front.process.pid, *children_of(front.process.pid)]
        assert shared_memory_of(pids) == []
        how = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)[number % 3]
        front.process.send_signal(how)
        assert front.process.wait(timeout=20) == (-how if how == signal.SIGKILL else 0)
        wait_gone(pids)
        assert not is_listening(front.url)
        assert list(temporary.iterdir()) == []
    temporary.rmdir()


def test_a_control_that_leaves_a_file_is_noticed(tmp_path: Path) -> None:
    """What the checks above look at shows what is there."""
    (tmp_path / "left").touch()
    assert list(tmp_path.iterdir()) != []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert is_listening(f"http://127.0.0.1:{listener.getsockname()[1]}")
    sleeper = subprocess.Popen(["sleep", "60"])
    with pytest.raises(AssertionError):
        wait_gone([sleeper.pid], within=0.2)
    sleeper.kill()
    sleeper.wait()


def shared_memory_of(pids: list[int]) -> list[str]:
    """What of shared memory processes map that would outlive them."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line for line in lines if "/dev/shm/" in line and "(deleted)" not in line]


def is_listening(url: str) -> bool:
    parts = httpx.URL(url)
    assert parts.port is not None
    with socket.socket() as sock:
        return sock.connect_ex((parts.host, parts.port)) == 0


@LONG
def test_a_real_server_forced_in_the_middle_of_steps(tmp_path: Path) -> None:
    flags = ("--distributed-executor-backend", "mp", "--max-model-len", "2048")
    with running_server(*flags, log=tmp_path / "log") as server:
        asyncio.run(check(Target(server.url, server.process.pid)))


@LONG
async def test_a_front_that_is_killed_in_the_middle_of_steps(tmp_path: Path) -> None:
    """Engine and workers notice, whatever they are at."""
    flags = ("--distributed-executor-backend", "mp", "--max-model-len", "512")
    with running_server(*flags, log=tmp_path / "log") as server:
        pids = server.processes
        assert len(pids) >= 3
        begun = asyncio.Event()
        bodies = mixed_bodies(8, 200)
        running = asyncio.create_task(
            stream_all(Target(server.url, server.process.pid), bodies, begun.set)
        )
        await begun.wait()
        server.process.kill()
        started = time.monotonic()
        await asyncio.to_thread(wait_gone, pids)
        print("seconds until all were gone:", time.monotonic() - started)
        await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    run_as_command(check)
