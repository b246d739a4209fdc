"""Promise: a request that makes a step fail is failed by itself, with a 500 that names it.

Faults are injected at each stage that a request goes through. The 31 requests beside it get
their texts, byte for byte.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import faulty_engine
from support.faults import Target, http_client, mixed_bodies, stream, stream_all
from support.faulty_engine import GRAMMAR_POISON, VARIABLE
from support.front import FrontUnderTest

NUM_STREAMS = 32
MEMORY = 40  # requests in a step that still fit
STAGES = {666: "prepare", 667: "forward", 668: "sample"}
OVERSIZED = 669


@pytest.fixture(scope="module")
def faulty_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    """The starter model, with a fault for each of `STAGES`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, json.dumps({**STAGES, OVERSIZED: "oversized", "memory": MEMORY}))
        front = FrontUnderTest(
            tmp_path_factory.mktemp("front"), "run_faulty_engine", model="", max_model_len=256
        )
    try:
        yield front.wait_ready()
    finally:
        front.stop()


@pytest.fixture
def target(faulty_front: FrontUnderTest) -> Target:
    return Target(faulty_front.url, faulty_front.process.pid)


def poison(seed: int) -> dict[str, Any]:
    return {"prompt": "I am the one", "max_tokens": 8, "seed": seed, "temperature": 1}


async def test_each_stage_fails_one_request_and_no_neighbour(target: Target) -> None:
    """All four faults at once. Some neighbours are under a grammar as well."""
    bodies = mixed_bodies(NUM_STREAMS - 1, 8)
    bodies[-1] |= {"structured_outputs": {"regex": "[a-f ]+"}}
    cursed = {"structured_outputs": {"regex": f"({GRAMMAR_POISON} ?)+"}, "max_tokens": 20}
    alone = await stream_all(target, bodies)
    answers = await stream_all(target, [*bodies, *map(poison, STAGES), poison(1) | cursed])
    neighbours, culprits = answers[: len(bodies)], answers[len(bodies) :]
    assert sum(got.same_as(expected) for got, expected in zip(neighbours, alone, strict=True)) == 31
    by_grammar = culprits.pop()
    assert by_grammar.error is not None
    assert by_grammar.error["type"] == "server_error"
    for culprit in culprits:
        # Its answer had not begun, so that it is a status and not an event.
        assert culprit.status == 500
        assert culprit.error is not None
        assert "made the engine's step fail" in culprit.error["message"]
        assert "cmpl-" in culprit.error["message"]


async def test_steps_that_run_out_of_memory_are_divided(
    target: Target, faulty_front: FrontUnderTest
) -> None:
    """Nobody is to blame, and nobody fails."""
    bodies = [{"prompt": f"{i} is", "max_tokens": 3, "temperature": 0} for i in range(MEMORY + 8)]
    half = len(bodies) // 2
    alone = [*await stream_all(target, bodies[:half]), *await stream_all(target, bodies[half:])]
    assert "OutOfMemoryError" not in faulty_front.stderr
    together = await stream_all(target, bodies)
    assert "OutOfMemoryError" in faulty_front.stderr
    assert all(got.same_as(expected) for got, expected in zip(together, alone, strict=True))


async def test_a_request_that_fits_nowhere_fails_alone(target: Target) -> None:
    """It runs out of memory by itself, too, so that the others finish without it."""
    bodies = mixed_bodies(7, 8)
    alone = await stream_all(target, bodies)
    *others, culprit = await stream_all(target, [*bodies, poison(OVERSIZED)])
    assert all(got.same_as(expected) for got, expected in zip(others, alone, strict=True))
    assert culprit.status == 500
    assert culprit.error is not None
    assert "OutOfMemoryError" in culprit.error["message"]


async def test_the_engine_is_the_same_one_afterwards(target: Target) -> None:
    engine = target.process("octavo: engine")
    (answer,) = await stream_all(target, [poison(667)])
    assert answer.status == 500
    assert target.process("octavo: engine") == engine


async def test_a_fault_in_detokenizing(start_target: Any) -> None:
    """It is the front's own, where all streams pass through one task."""
    target = start_target("front_that_cannot_spell")
    bodies = mixed_bodies(NUM_STREAMS - 1, 30)
    alone = await stream_all(target, bodies)
    await expect_one_failure(target, bodies, alone)


async def test_a_control_without_isolation_is_noticed(start_target: Any) -> None:
    target = start_target("front_that_trusts_its_speller", engine_restart="false")
    bodies = mixed_bodies(4, 30)
    alone = await stream_all(target, bodies)
    with pytest.raises(AssertionError):
        await expect_one_failure(target, bodies, alone)


async def expect_one_failure(target: Target, bodies: list[Any], alone: list[Any]) -> None:
    """Send `bodies` with one request beside them that can't be spelt out."""
    async with http_client() as client:
        culprit = {"prompt": "a cursed word comes late", "max_tokens": 40}
        *neighbours, failed = await asyncio.gather(
            *(stream(client, target, body) for body in [*bodies, culprit])
        )
    assert all(got.same_as(expected) for got, expected in zip(neighbours, alone, strict=True))
    assert failed.error is not None
    assert failed.error["type"] == "server_error"
    assert "cmpl-" in failed.error["message"]
    assert "~" not in failed.error["message"]


def test_the_hook_is_out_of_reach(tmp_path: Path) -> None:
    """No part of the packages reads the variable that injects faults."""
    root = Path(faulty_engine.__file__).parents[2]
    assert not [
        path
        for path in (root / "packages").rglob("*.py")
        if VARIABLE in path.read_text() or "faulty_engine" in path.read_text()
    ]
