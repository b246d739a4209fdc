"""Promise: clients that leave or stop reading cost nobody else anything.

A client that leaves frees its blocks and its place within two steps, whenever it leaves. One that
does not read gets a bounded buffer, and then its connection is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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
    stream,
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
    async with http_client() as client:
        await assert_all_counted(client, target)
    # A drain waits for open requests, and there are none.
    started = time.monotonic()
    assert await asyncio.to_thread(front.stop) == 0
    assert time.monotonic() - started < 10
    assert "Traceback" not in front.stderr


async def assert_all_counted(client: httpx.AsyncClient, target: Target) -> None:
    """Each answer that was begun has ended once, and nothing runs or waits."""
    lines = (await client.get(target.url + "/metrics")).text.splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]

    def total(name: str) -> float:
        return sum(float(value) for key, _, value in samples if key.partition("{")[0] == name)

    assert total("vllm:request_success_total") == total("vllm:request_params_n_sum") > 0
    assert total("vllm:num_requests_running") == total("vllm:num_requests_waiting") == 0
    assert total("vllm:kv_cache_usage_perc") == 0


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


# 1.7 MB: a quarter of it may fit into the buffers of the kernel, and then nobody waits.
FLOOD = {"prompt": "many words " * 220, "max_tokens": 2400, "logprobs": 5, "n": 4}


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


# Echoes that the engine has no work with: 0.8 MB at once, for a reader that does not read.
ECHO = {"prompt": "x" * 8000, "max_tokens": 0, "echo": True, "n": 100}


async def compare_beside_stalled(
    target: Target,
    other: Target,
    num_stalled: int,
    rounds: int,
    per_round: int,
    *,
    wait: bool = True,
) -> Figures:
    """Stall readers of one server, and time short streams of it and of one without, in turn."""
    bodies = [ECHO] * (num_stalled - 2) + [FLOOD] * 2
    stalled = [stalled_socket(target, body) for body in bodies]
    times: dict[str, list[float]] = {target.url: [], other.url: []}
    try:
        if wait:
            await until_idle(target)
        async with http_client() as client:
            for number in range(rounds):
                for one in (target, other) if number % 2 else (other, target):
                    for _ in range(per_round):
                        started = time.monotonic()
                        answer = await stream(client, one, mixed_bodies(1, 4)[0])
                        times[one.url].append(time.monotonic() - started)
                        assert answer.error is None
        assert not any(is_closed(sock) for sock in stalled), "they were to be there all the time"
    finally:
        for sock in stalled:
            sock.close()
    beside, alone = (sorted(times[one.url]) for one in (target, other))
    figures = {"stalled readers": float(num_stalled), "requests": float(len(beside))}
    for name, share in (("lower quartile", 0.25), ("median", 0.5), ("p99", 0.99)):
        figures[name + " ratio"] = percentile(beside, share) / percentile(alone, share)
    # What this machine makes of two halves of the same.
    halves = sorted(percentile(sorted(times[other.url][i::2]), 0.99) for i in range(2))
    figures["p99 ratio without any"] = halves[1] / halves[0]
    return figures


async def until_idle(target: Target, within: float = 60.0) -> None:
    """Wait until a front has nothing to do: between two probes it hardly computes."""
    deadline = time.monotonic() + within
    num_quiet = 0
    async with http_client() as client:
        while num_quiet < 3:
            assert time.monotonic() < deadline
            await client.get(target.url + "/health")
            before = cpu_seconds(target.pid)
            await asyncio.sleep(0.3)
            await client.get(target.url + "/health")
            num_quiet = num_quiet + 1 if cpu_seconds(target.pid) - before < 0.03 else 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * len(ordered)))]


def is_closed(sock: socket.socket) -> bool:
    return is_cut(sock, within=0.01)


@pytest.mark.parametrize(("num_stalled", "rounds"), [(20, 2), pytest.param(50, 20, marks=LONG)])
async def test_readers_that_stall_slow_nobody_down(
    start_front: Any, num_stalled: int, rounds: int
) -> None:
    """The quick one compares quartiles, for the 99th percentile of a busy machine is its own."""
    target = long_front(start_front, write_timeout=600.0)
    figures = await compare_beside_stalled(
        target, long_front(start_front), num_stalled, rounds, per_round=15
    )
    print(figures)
    assert figures["lower quartile ratio"] < 1.5, figures
    if rounds >= 20:
        assert figures["p99 ratio"] < max(1.1, figures["p99 ratio without any"]), figures


async def test_a_control_that_looks_after_its_stalled_readers_is_noticed(start_front: Any) -> None:
    """A server that asks each of them again and again has no time for the others."""
    front = start_front("front_that_polls_readers", model={"max_position_embeddings": 8192})
    target = Target(front.wait_ready().url, front.process.pid)
    figures = await compare_beside_stalled(
        target, long_front(start_front), 20, rounds=2, per_round=3, wait=False
    )
    assert figures["lower quartile ratio"] > 1.5, figures


async def test_a_crowd_that_sends_a_byte_now_and_then(start_target: Any) -> None:
    """X11: 200 connections that never finish a header hold nothing for long."""
    target = start_target(request_header_timeout=2.0)
    assert await slow_crowd(target, within=20.0) == 0
    async with http_client() as client:
        assert (await client.get(target.url + "/health")).status_code == 200


async def test_a_control_that_waits_for_each_header_is_noticed(start_target: Any) -> None:
    assert await slow_crowd(start_target(request_header_timeout=0), within=4.0) == 200


async def slow_crowd(target: Target, within: float, count: int = 200) -> int:
    """Send headers byte by byte, with probes in between; return how many live on."""
    sockets = [socket.create_connection(address_of(target)) for _ in range(count)]
    open_ones = list(sockets)
    deadline = time.monotonic() + within
    async with http_client() as client:
        for sock in sockets:
            sock.setblocking(False)
            sock.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        while open_ones and time.monotonic() < deadline:
            open_ones = [sock for sock in open_ones if takes_a_byte(sock)]
            assert (await client.get(target.url + "/health")).status_code == 200
            await asyncio.sleep(0.1)
    for sock in sockets:
        sock.close()
    return len(open_ones)


def takes_a_byte(sock: socket.socket) -> bool:
    """Send one more; False once the other end has answered or is gone."""
    try:
        sock.send(b"y")
        sock.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        return False
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
