from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from octavo_core import wire
from octavo_server import engine_link
from octavo_server.engine_link import EngineLink

NUM_MESSAGES = 100
SECONDS_EACH = 0.001


async def turns_of_others(folder: Path) -> int:
    """Let an engine say more than can be read at once; count the others' turns meanwhile."""
    address = f"ipc://{folder}/engine.sock"
    sentinel, other_end = os.pipe()
    process: Any = SimpleNamespace(
        address=address, process=SimpleNamespace(sentinel=sentinel), end=lambda grace: None
    )
    num_read, num_turns = 0, 0

    def read(message: wire.ToFront) -> None:
        nonlocal num_read
        num_read += 1
        time.sleep(SECONDS_EACH)

    link = EngineLink(process, read, pytest.fail)
    with zmq.Context() as context, context.socket(zmq.DEALER) as engine:
        engine.connect(address)
        for _ in range(NUM_MESSAGES):
            engine.send(wire.encode(wire.EngineCoreOutputs([])))
        time.sleep(0.2)  # until all are there
        while num_read == 0:
            await asyncio.sleep(0.001)
        while num_read < NUM_MESSAGES:
            num_turns += 1
            await asyncio.sleep(0)
    await link.close(0.0)
    os.close(sentinel)
    os.close(other_end)
    return num_turns


async def test_an_engine_that_talks_without_pause_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """Clients that leave must be noticed before all is computed for them."""
    assert await turns_of_others(tmp_path) >= 5


async def test_a_control_that_reads_on_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "_READ_SECONDS", 1e6)
    assert await turns_of_others(tmp_path) < 5
