"""Promise: a server that has served for long is the size that it was.

After a warm-up the front and the engine grow by at most 1 MiB per 1,000 mixed requests, and
have as many threads and open files as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from faults.test_clients import leave_early
from support.faults import LONG, Figures, Target, http_client, run_as_command, stream

MIB = 1 << 20
GROWTH_PER_1000 = 1 * MIB
AT_ONCE = 16


async def check(target: Target, count: int = 10_000, warm_up: int = 2000) -> Figures:
    """Send mixed requests, and compare sizes after a warm-up with those at the end."""
    await send_mixed(target, warm_up, seed=0)
    before = sizes_of(target)
    await send_mixed(target, count, seed=1)
    after = sizes_of(target)
    growth = {name: after[name][0] - before[name][0] for name in before}
    figures = {"requests": float(count)}
    for name, bytes_more in growth.items():
        figures[f"MiB more per 1,000 requests, {name}"] = bytes_more / MIB / (count / 1000)
        threads = after[name][1] - before[name][1]
        files = after[name][2] - before[name][2]
        figures[f"threads more, {name}"] = threads
        figures[f"open files more, {name}"] = files
        assert threads <= 1, figures
        assert files <= 2, figures
        assert bytes_more <= GROWTH_PER_1000 * count / 1000, figures
    return figures


def sizes_of(target: Target) -> dict[str, tuple[int, int, int]]:
    """Resident bytes, threads and open files of the front and the engine."""
    pids = {"front": target.pid, "engine": target.process("octavo: engine")}
    return {name: sizes_of_process(pid) for name, pid in pids.items()}


def sizes_of_process(pid: int) -> tuple[int, int, int]:
    process = Path(f"/proc/{pid}")
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))


async def send_mixed(target: Target, count: int, seed: int) -> None:
    """Streams and whole answers, choices, log-probabilities, mistakes, and clients that leave."""
    chance = random.Random(seed)
    gate = asyncio.Semaphore(AT_ONCE)
    async with http_client() as client:

        async def one(number: int, kind: int) -> None:
            async with gate:
                with contextlib.suppress(OSError):
                    await send(client, target, number, kind)

        await asyncio.gather(*(one(number, chance.randrange(8)) for number in range(count)))


async def send(client: httpx.AsyncClient, target: Target, number: int, kind: int) -> None:
    # Each prompt is a new one, so that tables by prompt would show.
    body: dict[str, Any] = {"prompt": f"{number} bottles of beer on the wall", "max_tokens": 8}
    if kind == 0:
        await leave_early(target, "quick", number % 2 == 0, 0.01)
    elif kind == 1:
        await client.post(target.url + "/v1/completions", json={**body, "temperature": "hot"})
    elif kind == 2:
        await client.post(target.url + "/v1/completions", json={**body, "n": 3, "logprobs": 5})
    elif kind == 3:
        messages = [{"role": "user", "content": body["prompt"]}]
        await client.post(
            target.url + "/v1/chat/completions", json={"messages": messages, "max_tokens": 8}
        )
    elif kind == 4:
        await client.get(target.url + f"/nowhere/{number}")
    else:
        await stream(client, target, body | {"stop": ["er o"], "user": f"user {number}"})


async def test_a_short_soak(start_target: Any) -> None:
    target = start_target()
    await send_mixed(target, 150, seed=0)
    before = sizes_of(target)
    await send_mixed(target, 150, seed=1)
    after = sizes_of(target)
    for name in before:
        assert after[name][1] - before[name][1] <= 1
        assert after[name][2] - before[name][2] <= 2


@LONG
@pytest.mark.timeout(7200)
async def test_soak(start_target: Any) -> None:
    """K11: resident memory does not grow with the number of requests."""
    count = int(os.environ.get("OCTAVO_SOAK_REQUESTS", "10000"))
    figures = await check(start_target(), count)
    print(*(f"{name}: {value:.3g}" for name, value in figures.items()), sep="\n")


@LONG
@pytest.mark.timeout(1800)
async def test_a_control_that_keeps_its_requests_is_noticed(start_target: Any) -> None:
    target = start_target("front_that_keeps_everything")
    with pytest.raises(AssertionError, match="MiB more"):
        await check(target, 1000, warm_up=500)


if __name__ == "__main__":
    run_as_command(check)
