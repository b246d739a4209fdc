"""Promise: an engine that is killed costs a pause and no answer.

`/ready` is 503 within a second, another engine starts, and all streams go on to the texts, the
log-probabilities and the counts that they would have had.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.faults import (
    Answer,
    Figures,
    Target,
    http_client,
    mixed_bodies,
    run_as_command,
    stream,
    stream_all,
    wait_for_status,
)
from support.server import running_server

NUM_STREAMS = 32


async def check(
    target: Target, num_streams: int = NUM_STREAMS, max_tokens: int = 48, **last: Any
) -> Figures:
    """Kill the engine under streams, and compare them with undisturbed ones.

    Args:
        last: Further fields of the last stream.
    """
    bodies = mixed_bodies(num_streams, max_tokens)
    bodies[-1] |= last
    undisturbed = await stream_all(target, bodies)
    assert all(answer.is_done and answer.error is None for answer in undisturbed)

    engine = target.process("octavo: engine")
    events = Counter()
    running = asyncio.create_task(stream_all(target, bodies, events.add))
    await events.wait_for(num_streams * 8)
    target.kill("octavo: engine")
    to_503 = await wait_for_status(target, 503, within=1.0)
    started = time.monotonic()
    to_200 = await wait_for_status(target, 200, within=60.0)
    disturbed = await running
    assert target.process("octavo: engine") != engine
    assert_same(undisturbed, disturbed)
    return {
        "streams": num_streams,
        "seconds until /ready was 503": to_503,
        "seconds until /ready was 200 again": to_503 + to_200,
        "longest pause of a stream in seconds": max(a.longest_pause for a in disturbed),
        "seconds from there to the last answer": time.monotonic() - started - to_200,
        "texts that differ": 0,
    }


class Counter:
    """Counts, and lets others wait for a count."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Event()

    def add(self) -> None:
        self._count += 1
        self._changed.set()

    async def wait_for(self, count: int, within: float = 60.0) -> None:
        async with asyncio.timeout(within):
            while self._count < count:
                self._changed.clear()
                await self._changed.wait()


def assert_same(expected: list[Answer], got: list[Answer]) -> None:
    different = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not a.same_as(b)]
    assert not different, [(expected[index], got[index]) for index in different[:2]]


async def test_streams_survive_a_killed_engine(start_target: Any) -> None:
    await check(start_target(), max_tokens=40)


async def test_streams_of_a_real_model_survive_a_killed_engine(tmp_path: Path) -> None:
    """M01: the probes are red while there is no engine."""
    with running_server("--max-model-len", "512", log=tmp_path / "log") as server:
        regex = {"regex": "([a-z]+ )+"}  # a grammar goes on where it was, too
        target = Target(server.url, server.process.pid)
        await check(target, num_streams=8, max_tokens=24, structured_outputs=regex)
        assert "Traceback" not in server.log


async def test_a_control_that_forgets_tokens_is_noticed(start_target: Any) -> None:
    """Without the tokens that they have, streams would begin again in their middle."""
    target = start_target("forgetful_front")
    with pytest.raises(AssertionError):
        await check(target, num_streams=4, max_tokens=40)


@pytest.fixture
def body() -> dict[str, Any]:
    return {
        "prompt": "slow and steady wins the race, or so they say in the village",
        "max_tokens": 60,
    }


async def test_a_request_that_kills_engines_fails_alone(start_target: Any) -> None:
    """`die` ends the engine after three tokens, every time."""
    target = start_target()
    bodies = mixed_bodies(31, 40)
    undisturbed = await stream_all(target, bodies)
    poison = {"prompt": "late to die, but it does, and takes all others with it", "max_tokens": 40}
    *others, culprit = await stream_all(target, [*bodies, poison])
    assert_same(undisturbed, others)
    assert culprit.error is not None
    assert "twice" in culprit.error["message"]
    assert culprit.is_done
    await wait_for_status(target, 200, within=20.0)
    assert (await stream_all(target, bodies[:1]))[0].same_as(undisturbed[0])


async def test_quarantine_is_a_500(start_target: Any) -> None:
    """A request whose answer has not begun gets a status, not an event."""
    target = start_target()
    async with http_client() as client:
        answer = await client.post(
            target.url + "/v1/completions", json={"prompt": "die!", "max_tokens": 40}
        )
    assert answer.status_code == 500
    assert "in flight when the engine crashed, twice" in answer.json()["error"]["message"]
    await wait_for_status(target, 200, within=20)


async def test_a_request_in_two_crashes_is_failed_and_a_newer_one_lives(
    start_target: Any, body: dict[str, Any]
) -> None:
    target = start_target()
    async with http_client() as client:
        (alone,) = await stream_all(target, [body])
        events = Counter()
        old = asyncio.create_task(
            stream(
                client,
                target,
                {**body, "prompt": body["prompt"] * 4, "max_tokens": 250},
                events.add,
            )
        )
        await events.wait_for(4)
        await crash(target)
        new = asyncio.create_task(stream(client, target, body, events.add))
        await asyncio.sleep(0.3)
        await crash(target)
        assert (await new).same_as(alone)
        failed = await old
    assert failed.error is not None
    assert "twice" in failed.error["message"]


async def crash(target: Target) -> None:
    """Kill the engine and wait for the next one."""
    target.kill("octavo: engine")
    await wait_for_status(target, 503, within=1.0)
    await wait_for_status(target, 200, within=20.0)


async def check_totals(target: Target) -> None:
    """Kill the engine; what /metrics had counted only grows."""
    await stream_all(target, mixed_bodies(4, 8))
    before = await totals_of(target)
    assert before["vllm:prefix_cache_queries_total"] > 0
    await crash(target)
    after = await totals_of(target)
    assert after.pop("vllm:engine_restarts_total") == before.pop("vllm:engine_restarts_total") + 1
    assert all(after[name] >= value for name, value in before.items()), (before, after)
    await stream_all(target, mixed_bodies(4, 8))
    more = await totals_of(target)
    assert more["vllm:prefix_cache_queries_total"] > before["vllm:prefix_cache_queries_total"]


async def totals_of(target: Target) -> dict[str, float]:
    """The counters of /metrics, over all labels."""
    totals: dict[str, float] = {}
    async with http_client() as client:
        for line in (await client.get(target.url + "/metrics")).text.splitlines():
            name = line.partition("{")[0]
            if name.endswith("_total") and not line.startswith("#"):
                totals[name] = totals.get(name, 0.0) + float(line.split()[-1])
    return totals


async def test_counters_never_go_back(start_target: Any) -> None:
    await check_totals(start_target())


async def test_a_control_that_counts_from_zero_is_noticed(start_target: Any) -> None:
    target = start_target("front_that_begins_to_count_again")
    with pytest.raises(AssertionError, match="prefix_cache_queries"):
        await check_totals(target)


async def test_three_crashes_end_the_server(start_front: Any, body: dict[str, Any]) -> None:
    front = start_front().wait_ready()
    target = Target(front.url, front.process.pid)
    await crash(target)
    await crash(target)
    events = Counter()
    running = asyncio.create_task(stream_all(target, [body], events.add))
    await events.wait_for(3)
    target.kill("octavo: engine")
    (answer,) = await running
    assert answer.error is not None
    assert answer.error["code"] == "engine_dead"
    assert await asyncio.to_thread(front.process.wait, 20) == 1
    last = front.stderr.splitlines()[-1]
    assert "3 times within 10 minutes" in last
    assert "killed" in last
    assert "Traceback" not in front.stderr


async def test_without_restarts_every_stream_gets_an_error_within_a_second(
    start_front: Any,
) -> None:
    front = start_front(engine_restart="false").wait_ready()
    target = Target(front.url, front.process.pid)
    events = Counter()
    running = asyncio.create_task(stream_all(target, mixed_bodies(8, 40), events.add))
    await events.wait_for(40)
    target.kill("octavo: engine")
    killed = time.monotonic()
    answers = await running
    assert time.monotonic() - killed < 1.0
    assert all(answer.error and answer.error["code"] == "engine_dead" for answer in answers)
    assert await asyncio.to_thread(front.process.wait, 20) == 1
    assert "engine" in front.stderr.splitlines()[-1]


async def test_new_requests_are_turned_away_meanwhile(start_target: Any) -> None:
    target = start_target("run_reluctant_engine")
    target.kill("octavo: engine")
    await wait_for_status(target, 503, within=1.0)
    async with http_client() as client:
        refused = await client.post(target.url + "/v1/completions", json={"prompt": "x"})
        health = await client.get(target.url + "/health")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_restarting"
    assert int(refused.headers["retry-after"]) > 0
    assert health.json()["status"] == "restarting"


async def test_a_client_that_leaves_meanwhile_is_forgotten(
    start_target: Any, body: dict[str, Any]
) -> None:
    target = start_target(max_num_queued_reqs=1)
    with httpx.stream(
        "POST", target.url + "/v1/completions", json={**body, "stream": True}, timeout=20
    ) as response:
        next(response.iter_lines())
        target.kill("octavo: engine")
        await wait_for_status(target, 503, within=1.0)
    await wait_for_status(target, 200, within=20.0)
    # The one place in line is free again.
    (answer,) = await stream_all(target, [body])
    assert json.dumps(answer.error) == "null"


if __name__ == "__main__":
    run_as_command(check)
