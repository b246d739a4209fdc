"""Promise: clients that leave or stop reading cost nobody else anything.

A client that leaves frees its blocks and its place within two steps, whenever it leaves. One that
does not read gets a bounded buffer, and then its connection is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.faults import (
    LONG,
    Figures,
    Target,
    http_client,
    mixed_bodies,
    run_as_command,
    stream_all,
)


async def check(target: Target, count: int = 1000, seed: int = 0) -> Figures:
    """Leave at random moments; then the server has all its places and its whole cache."""
    (undisturbed,) = await stream_all(target, mixed_bodies(1, 40))
    chance = random.Random(seed)
    neighbour = asyncio.create_task(stream_all(target, mixed_bodies(1, 40)))
    gate = asyncio.Semaphore(64)

    async def one() -> None:
        async with gate:
            pace = "slow" if chance.random() < 0.1 else "quick"
            await leave_early(target, pace, chance.random() < 0.5, chance.random() * 0.3)

    await asyncio.gather(*(one() for _ in range(count)))
    (same,) = await neighbour
    assert same.same_as(undisturbed)
    started = time.monotonic()
    (answer,) = await stream_all(target, mixed_bodies(1, 4))
    assert answer.error is None
    return {"disconnects": count, "seconds of a short request after it": time.monotonic() - started}


async def leave_early(target: Target, pace: str, stream: bool, after: float) -> None:
    """Send a request and drop the connection after some seconds, a stream's with a reset."""
    prompt = f"{pace} going, said the snail" * 8
    body = {"prompt": prompt, "max_tokens": 200, "stream": stream}
    reader, writer = await asyncio.open_connection(*address_of(target))
    writer.write(raw_request(body))
    with contextlib.suppress(OSError):
        await writer.drain()
        await asyncio.sleep(after)
    if stream:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    del reader


def address_of(target: Target) -> tuple[str, int]:
    url = httpx.URL(target.url)
    assert url.port is not None
    return url.host, url.port


def raw_request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=LONG)])
async def test_a_storm_of_disconnects(start_front: Any, count: int) -> None:
    """Afterwards there are as many places as before, and a request gets the whole cache."""
    front = start_front(max_num_queued_reqs=200, max_num_seqs=64, num_gpu_blocks_override=32)
    front.wait_ready()
    target = Target(front.url, front.process.pid)
    await check(target, count)
    # 32 blocks of 16 tokens: this one fits only if no other holds a block.
    whole = {"prompt": "x" * 400, "max_tokens": 100, "temperature": 0}
    (answer,) = await stream_all(target, [whole])
    assert answer.text == "x" * 100
    # Exactly as many places as at the start: 200 fit, and the next one does not.
    bodies = [{"prompt": "slow", "max_tokens": 4, "n": 100}] * 2
    async with http_client() as client:
        full = [asyncio.create_task(post(client, target, body)) for body in bodies]
        # Only when both are in: a further one would take a place that one of them needs.
        while await num_in_engine(client, target) < 200 and not any(t.done() for t in full):
            await asyncio.sleep(0.005)
        while not all(task.done() for task in full):
            refused = await post(client, target, {"prompt": "x", "max_tokens": 1})
            if refused.status_code == 429:
                break
        assert [(await task).status_code for task in full] == [200, 200]
    assert refused.status_code == 429
    # A drain waits for open requests, and there are none.
    started = time.monotonic()
    assert await asyncio.to_thread(front.stop) == 0
    assert time.monotonic() - started < 10
    assert "Traceback" not in front.stderr


async def post(client: httpx.AsyncClient, target: Target, body: dict[str, Any]) -> httpx.Response:
    return await client.post(target.url + "/v1/completions", json=body)


async def num_in_engine(client: httpx.AsyncClient, target: Target) -> int:
    """Return how many answers run or wait, as the engine's last step told it."""
    lines = (await client.get(target.url + "/metrics")).text.splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(names))


def stalled_socket(target: Target, body: dict[str, Any]) -> socket.socket:
    """Ask for a stream and read nothing of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(address_of(target))
    sock.sendall(raw_request({**body, "stream": True}))
    return sock


def long_front(start_front: Any, **settings: object) -> Target:
    """A front whose answers are long enough to fill every buffer on the way."""
    front = start_front(model={"max_position_embeddings": 8192}, **settings).wait_ready()
    return Target(front.url, front.process.pid)


FLOOD = {"prompt": "many words " * 220, "max_tokens": 2400, "logprobs": 5}


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


async def test_readers_that_stop_reading_are_cut(start_front: Any) -> None:
    target = long_front(start_front, write_timeout=1.0)
    bodies = mixed_bodies(4, 40)
    undisturbed = await stream_all(target, bodies)
    before = resident_bytes(target.pid)
    stalled = [stalled_socket(target, FLOOD) for _ in range(4)]
    others = await stream_all(target, bodies)
    assert all(got.same_as(expected) for got, expected in zip(others, undisturbed, strict=True))
    for sock in stalled:
        assert await asyncio.to_thread(is_cut, sock)
        sock.close()
    # 1 MiB of each may wait, beside what the allocator keeps of the processing.
    assert resident_bytes(target.pid) - before < 4 * 8 * 2**20


async def test_a_control_with_a_patient_server_is_noticed(start_front: Any) -> None:
    target = long_front(start_front, write_timeout=600.0)
    sock = stalled_socket(target, FLOOD)
    assert not await asyncio.to_thread(is_cut, sock, 3.0)
    sock.close()


def is_cut(sock: socket.socket, within: float = 20.0) -> bool:
    """Wait until the server has closed a connection, which shows in /proc and not in reads."""
    port = sock.getsockname()[1]
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        # The server's end: its remote port is ours. 01 is ESTABLISHED.
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        ends = [line.split() for line in lines]
        if not any(int(end[2].split(":")[1], 16) == port and end[3] == "01" for end in ends):
            return True
        time.sleep(0.05)
    return False


async def test_a_head_or_a_body_that_never_ends(start_target: Any) -> None:
    """X11: headers larger than 64 KiB are refused, and half a request does not hold a place."""
    target = start_target(request_header_timeout=1.0, request_body_timeout=1.0)
    reader, writer = await asyncio.open_connection(*address_of(target))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    assert (await asyncio.wait_for(reader.read(100), 10)).startswith(b"HTTP/1.1 408")
    writer.close()
    reader, writer = await asyncio.open_connection(*address_of(target))
    writer.write(raw_request({"prompt": "x"})[:-3])
    assert (await asyncio.wait_for(reader.read(100), 10)).startswith(b"HTTP/1.1 408")
    writer.close()
    reader, writer = await asyncio.open_connection(*address_of(target))
    with contextlib.suppress(OSError):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for number in range(3000):
            writer.write(b"X-%d: %s\r\n" % (number, b"y" * 1000))
            await writer.drain()
    with contextlib.suppress(OSError):
        assert (await asyncio.wait_for(reader.read(100), 10))[:12] in (
            b"HTTP/1.1 431",
            b"HTTP/1.1 400",
        )
    writer.close()
    async with http_client() as client:
        assert (await client.get(target.url + "/health")).status_code == 200


if __name__ == "__main__":
    run_as_command(check)
