"""Promise: a process that is stopped is noticed within 10 s, and one that computes is left alone.

A stopped process is alive, holds its sockets open, and does nothing (M01). One whose device hangs
even gives signs of life; what it does not do is end its step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo_core.process import HeartbeatMonitor
from octavo_server.front_group import until_silent
from support.faults import (
    LONG,
    Figures,
    Target,
    http_client,
    mixed_bodies,
    run_as_command,
    stream_all,
    wait_for_status,
)
from support.faulty_engine import SECONDS, VARIABLE
from support.front import FrontUnderTest
from support.server import is_running, running_server

NOTICED_WITHIN = 10.0
STEP_TIMEOUT = 3.0


async def check(
    target: Target, title: str = "octavo: engine", signal_number: int = signal.SIGSTOP
) -> Figures:
    """Stop the engine or a worker under streams, or kill it; they go on in another one."""
    bodies = mixed_bodies(4, 32)
    undisturbed = await stream_all(target, bodies)
    started = asyncio.Event()
    running = asyncio.create_task(stream_all(target, bodies, started.set))
    await started.wait()
    target.kill(title, signal_number)
    noticed = await wait_for_status(target, 503, within=NOTICED_WITHIN)
    async with http_client() as client:
        assert (await client.get(target.url + "/health")).status_code == 503
    recovered = await wait_for_status(target, 200, within=60.0)
    answers = await running
    assert all(got.same_as(expected) for got, expected in zip(answers, undisturbed, strict=True))
    return {
        "seconds until it was noticed": noticed,
        "seconds until /ready was 200 again": noticed + recovered,
    }


async def test_a_stopped_engine(start_target: Any) -> None:
    """M01: a stopped engine turns the probes red after --heartbeat-timeout, 6 s by default."""
    await check(start_target())


@LONG
async def test_a_stopped_worker(tmp_path: Path) -> None:
    flags = ("--distributed-executor-backend", "mp", "--max-model-len", "512")
    with running_server(*flags, log=tmp_path / "log") as server:
        print(await check(Target(server.url, server.process.pid), "octavo: worker 0"))
        assert "worker 0" in server.log
        assert "no sign of life" in server.log


@LONG
async def test_a_killed_worker(tmp_path: Path) -> None:
    flags = ("--distributed-executor-backend", "mp", "--max-model-len", "512")
    with running_server(*flags, log=tmp_path / "log") as server:
        target = Target(server.url, server.process.pid)
        print(await check(target, "octavo: worker 0", signal.SIGKILL))
        assert "worker 0" in server.log


async def test_a_control_without_a_heartbeat_is_noticed(start_target: Any) -> None:
    """With a time-out that never passes, a stopped engine stays green."""
    target = start_target(heartbeat_timeout=1e6)
    pid = target.kill("octavo: engine", signal.SIGSTOP)
    try:
        with pytest.raises(AssertionError, match="is not 503"):
            await wait_for_status(target, 503, within=2.0)
    finally:
        target.kill("octavo: engine", signal.SIGCONT)
    assert target.process("octavo: engine") == pid


HANGING = {"prompt": "hang on a moment, or for ever", "max_tokens": 20, "temperature": 0}


async def test_an_engine_that_hangs_in_a_step(start_target: Any) -> None:
    """Its request is found at its second hang, and all others go on."""
    target = start_target(step_timeout=STEP_TIMEOUT)
    bodies = mixed_bodies(8, 32)
    undisturbed = await stream_all(target, bodies)
    engine = target.process("octavo: engine")
    running = asyncio.create_task(stream_all(target, [*bodies, HANGING]))
    await wait_for_status(target, 503, within=STEP_TIMEOUT + NOTICED_WITHIN)
    *answers, culprit = await running
    assert all(got.same_as(expected) for got, expected in zip(answers, undisturbed, strict=True))
    assert culprit.error is not None
    assert "twice" in culprit.error["message"]
    await wait_for_status(target, 200, within=20.0)
    assert target.process("octavo: engine") != engine


async def test_a_control_that_waits_for_ever_is_noticed(start_target: Any) -> None:
    target = start_target(step_timeout=0)
    running = asyncio.create_task(stream_all(target, [HANGING]))
    with pytest.raises(AssertionError, match="is not 503"):
        await wait_for_status(target, 503, within=STEP_TIMEOUT + 2.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_stopped_front_is_replaced(start_target: Any) -> None:
    """One of several: the kernel goes on to give it its share of the connections."""
    target = start_target(api_server_count=2)
    stopped = target.kill("octavo: front 0", signal.SIGSTOP)
    started = time.monotonic()
    while is_running(stopped):
        assert time.monotonic() - started < NOTICED_WITHIN
        await asyncio.sleep(0.02)
    for _ in range(12):  # some of these wait for its successor
        (answer,) = await stream_all(target, [{"prompt": "still here", "max_tokens": 10}])
        assert answer.text == "still here"
    assert target.process("octavo: front 0") != stopped


async def test_a_process_that_computes_is_not_silent() -> None:
    """A front may be at work on large bodies for as long as it takes; one that waits says so."""
    for code, is_silent in (("while True: pass", False), ("import time; time.sleep(60)", True)):
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            await asyncio.sleep(0.5)  # it has begun
            watching = until_silent(process.pid, HeartbeatMonitor(2.0))
            with contextlib.nullcontext() if is_silent else pytest.raises(TimeoutError):
                await asyncio.wait_for(watching, 5.0)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def busy_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontUnderTest]:
    """The starter model, with steps that take many times the heartbeat's time-out."""
    monkeypatch.setenv(VARIABLE, json.dumps({1: "kernel", 2: "interpreter"}))
    settings = {"model": "", "max_model_len": 256, "heartbeat_timeout": SECONDS / 3}
    front = FrontUnderTest(tmp_path, "run_faulty_engine", **settings)
    yield front
    front.stop()


@LONG
async def test_a_long_step_is_not_mistaken_for_a_dead_process(busy_front: FrontUnderTest) -> None:
    """Kernels run without the interpreter's lock, so that beats come from another thread.

    The control holds the lock as long, and does count as dead.
    """
    front = busy_front.wait_ready()
    target = Target(front.url, front.process.pid)
    engine = target.process("octavo: engine")
    body = {"prompt": "Once", "max_tokens": 2, "temperature": 1}
    started = time.monotonic()
    (answer,) = await stream_all(target, [{**body, "seed": 1}])
    assert time.monotonic() - started > SECONDS
    assert answer.error is None
    assert target.process("octavo: engine") == engine

    (answer,) = await stream_all(target, [{**body, "seed": 2}])
    assert answer.error is not None
    assert "twice" in answer.error["message"]
    assert "no sign of life for 1 seconds" in front.stderr


if __name__ == "__main__":
    run_as_command(check)
