"""Promise: no request is answered with a 5xx because of what it holds, and none harms another.

The corpus covers each field of each route, and each class of attack known for servers of this
kind; see `hostile_corpus.py`. Cases S05, S07, S11, S21, H15, X03, X05, X07, X09, G01 and G03 are
in it, each on all routes that share the mechanism.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from faults.hostile_corpus import Hostile, corpus, post
from support.faults import (
    LONG,
    Figures,
    Target,
    http_client,
    mixed_bodies,
    run_as_command,
    stream_all,
)
from support.server import running_server

SEED = 5
NUM_IN_SUITE = 400
MAX_REFUSAL_SECONDS = 5.0
# A body is there several times: in pieces, whole, as text, and as a chat's prompt.
MAX_GROWTH_MIB = 64


async def check(target: Target, requests: list[Hostile] | None = None) -> Figures:
    """Send what is hostile, one after the other, beside streams that must not notice."""
    requests = corpus() if requests is None else requests
    bodies = mixed_bodies(2, 60)
    undisturbed = await stream_all(target, bodies)
    engine = target.find("octavo: engine")
    slowest, wrong = (0.0, ""), []
    neighbours = asyncio.create_task(stream_all(target, bodies))
    async with http_client(timeout=30) as client:
        for request in requests:
            if neighbours.done():
                assert_unchanged(undisturbed, await neighbours)
                neighbours = asyncio.create_task(stream_all(target, bodies))
            started = time.monotonic()
            status = await send(client, target, request)
            if status >= 400:  # what is accepted may be a long answer
                slowest = max(slowest, (time.monotonic() - started, request.name))
            if not 200 <= status < 500:
                wrong.append((request.name, status))
        assert (await client.get(target.url + "/health")).status_code == 200
    assert_unchanged(undisturbed, await neighbours)
    assert not wrong, wrong
    assert target.find("octavo: engine") == engine
    assert slowest[0] < MAX_REFUSAL_SECONDS, slowest
    return {
        "requests": len(requests),
        "answers of 5xx": 0,
        "slowest refusal in seconds": slowest[0],
    }


async def send(client: httpx.AsyncClient, target: Target, request: Hostile) -> int:
    """Return the status; 499 if the server closed the connection on what is no HTTP."""
    headers = {name.encode(): value.encode("latin-1") for name, value in request.headers.items()}
    try:
        url = target.url + request.path
        answer = await client.request(
            request.method, url, content=request.body, headers=list(headers.items())
        )
    except httpx.RemoteProtocolError:
        return 499
    except (httpx.LocalProtocolError, httpx.InvalidURL):
        return 400  # not even the client would send this
    if answer.status_code >= 400 and request.method != "HEAD":
        assert "Traceback" not in answer.text
    return answer.status_code


def assert_unchanged(expected: list[Any], got: list[Any]) -> None:
    assert all(one.same_as(other) for one, other in zip(got, expected, strict=True))


def sample() -> list[Hostile]:
    """A part of the corpus: fields at random, and every kind of all others."""
    requests = corpus()
    return random.Random(SEED).sample(requests, NUM_IN_SUITE)


async def test_a_sample_of_the_corpus(shared_target: Target) -> None:
    await check(shared_target, sample())


@LONG
async def test_the_whole_corpus(shared_target: Target) -> None:
    await check(shared_target)


@LONG
async def test_the_corpus_against_a_real_model(tmp_path: Path) -> None:
    with running_server("--max-model-len", "512", log=tmp_path / "log") as server:
        await check(Target(server.url, server.process.pid), sample())
        assert "Traceback" not in server.log


def test_the_corpus_is_large_and_has_each_route() -> None:
    requests = corpus()
    assert len(requests) > 3000
    assert len({request.path for request in requests}) > 15
    assert [request.name for request in requests] == [request.name for request in corpus()]


async def test_a_control_of_the_servers_own_fault_is_noticed(start_target: Any) -> None:
    """A field whose check is gone would be a 500, and this says so."""
    target = start_target("front_that_chokes")
    with pytest.raises(AssertionError, match="choke"):
        await check(target, [post("choke", "/v1/completions", b'{"prompt": "choke"}')])


async def grow_by_long_bodies(target: Target) -> float:
    """Send 2 MiB of text, which are millions of tokens; return how many MiB the front grew by."""
    text = "long " * (400 << 10)
    chat = {"messages": [{"role": "user", "content": text}]}
    before = peak_memory_of(target)
    async with http_client(timeout=60) as client:
        for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", chat)):
            assert (await client.post(target.url + path, json=body)).status_code == 400
    return peak_memory_of(target) - before


async def test_long_bodies_cost_little_memory(start_target: Any) -> None:
    """Each token takes hundreds of bytes on its way: 16 MiB of text took 2 GiB to be refused."""
    assert await grow_by_long_bodies(start_target()) < MAX_GROWTH_MIB


async def test_a_control_that_tokenizes_everything_is_noticed(start_target: Any) -> None:
    target = start_target("front_that_tokenizes_everything")
    assert await grow_by_long_bodies(target) > MAX_GROWTH_MIB


def peak_memory_of(target: Target) -> float:
    """In MiB."""
    lines = Path(f"/proc/{target.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    run_as_command(check)
