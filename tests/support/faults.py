"""What the checks of tests/faults share: a server to hurt, and streams to compare.

Each check is a coroutine that takes a `Target`, raises AssertionError where a promise is broken,
and returns what it measured. Its file is a test module, and a command for a running server:

    PYTHONPATH=tests python -m faults.test_killed_engine --url http://127.0.0.1:8000 --pid 1234
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from support.server import children_of, command_line, is_running

Figures = dict[str, float]

# For what takes minutes, or starts a real model several times: `nox -s faults` runs it.
LONG = pytest.mark.skipif(
    not os.environ.get("OCTAVO_LONG_FAULTS"), reason="a long one: nox -s faults"
)


@dataclass
class Target:
    """A running server.

    Attributes:
        pid: Process id of its front, where a check has to signal processes.
    """

    url: str
    pid: int = 0

    def process(self, title: str) -> int:
        """Return the id of the child with a title such as ``octavo: engine``."""
        found = self.find(title)
        assert found is not None, f"there is no process named {title!r}"
        return found

    def find(self, title: str) -> int | None:
        for pid in children_of(self.pid):
            with contextlib.suppress(OSError):
                if command_line(pid) == title and is_running(pid):
                    return pid
        return None

    def kill(self, title: str, signal_number: int = signal.SIGKILL) -> int:
        pid = self.process(title)
        os.kill(pid, signal_number)
        return pid


@dataclass
class Answer:
    """What one request got."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_done: bool = False
    num_completion_tokens: int = 0
    longest_pause: float = 0.0

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def same_as(self, other: Answer) -> bool:
        """Compare all that must not depend on what happened meanwhile."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("status", "texts", "logprobs", "finish_reasons", "error", "is_done")
        ) and (self.num_completion_tokens == other.num_completion_tokens)


@contextlib.asynccontextmanager
async def http_client(timeout: float = 120.0) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
        yield client


async def stream(
    client: httpx.AsyncClient,
    target: Target,
    body: dict[str, Any],
    on_event: Callable[[], None] = lambda: None,
    path: str = "/v1/completions",
) -> Answer:
    """Stream one request and take it apart."""
    answer = Answer()
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", target.url + path, json=body) as response:
        answer.status = response.status_code
        if response.status_code != 200:
            answer.error = json.loads(await response.aread())["error"]
            return answer
        last = time.monotonic()
        async for line in response.aiter_lines():
            now = time.monotonic()
            answer.longest_pause, last = max(answer.longest_pause, now - last), now
            if line.startswith("data: "):
                _take(answer, line.removeprefix("data: "))
                on_event()
    return answer


def _take(answer: Answer, data: str) -> None:
    if data == "[DONE]":
        answer.is_done = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]
        return
    if event.get("usage"):
        answer.num_completion_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        index = choice["index"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        answer.texts[index] = answer.texts.get(index, "") + text
        if choice.get("logprobs"):
            answer.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"]:
            answer.finish_reasons[index] = choice["finish_reason"]


def mixed_bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Greedy and seeded requests; some with log-probabilities, choices, or a least length.

    They run on any model. On the scripted one the first makes each step take 20 ms.
    """
    bodies: list[dict[str, Any]] = []
    for index in range(count):
        pace = "quick" if index else "slow"
        prompt = f"{pace} {index}: once upon a time there was a king who had {index + 2} sons, and "
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        if index % 2:
            body |= {"temperature": 0.9, "seed": 1000 + index, "top_p": 0.95}
        if index % 4 == 0:
            body |= {"logprobs": 2}
        if index % 5 == 0:
            body |= {"min_tokens": max_tokens // 2}
        if index % 7 == 1:
            body |= {"n": 2}
        bodies.append(body)
    return bodies


async def stream_all(
    target: Target, bodies: list[dict[str, Any]], on_event: Callable[[], None] = lambda: None
) -> list[Answer]:
    async with http_client() as client:
        return await asyncio.gather(*(stream(client, target, body, on_event) for body in bodies))


async def status_of(client: httpx.AsyncClient, target: Target, path: str = "/ready") -> int:
    return (await client.get(target.url + path)).status_code


async def wait_for_status(
    target: Target, status: int, within: float, path: str = "/ready"
) -> float:
    """Wait until a probe answers `status`; return how long that took."""
    started = time.monotonic()
    async with http_client() as client:
        while await status_of(client, target, path) != status:
            assert time.monotonic() - started < within, f"{path} is not {status} in {within} s"
            await asyncio.sleep(0.01)
    return time.monotonic() - started


def run_as_command(check: Callable[[Target], Awaitable[Figures]]) -> None:
    """Run a check against a server that somebody else has started, and print its figures."""
    parser = argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, default=0, help="process id of `octavo: front`")
    options = parser.parse_args()

    async def run() -> Figures:
        return await check(Target(options.url, options.pid))

    for name, value in asyncio.run(run()).items():
        print(f"{name}: {value:.4g}")
