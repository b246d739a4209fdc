"""Answers find those who asked, whenever they come."""

from __future__ import annotations

import asyncio

import pytest

from octavo_core.errors import EngineDeadError, RequestFailedError
from octavo_server.pending_calls import PendingCalls


async def test_answers_come_in_any_order() -> None:
    calls = PendingCalls()
    sent: list[int] = []
    asking = [asyncio.create_task(calls.ask(sent.append, name, 10)) for name in "ab"]
    await asyncio.sleep(0)
    calls.settle(sent[1], "second")
    calls.settle(sent[0], "first")
    assert await asyncio.gather(*asking) == ["first", "second"]


async def test_an_answer_may_come_while_the_question_is_sent() -> None:
    calls = PendingCalls()
    assert await calls.ask(lambda call_id: calls.settle(call_id, 7), "it", 10) == 7


async def test_refusals_and_silence_are_errors() -> None:
    calls = PendingCalls()
    with pytest.raises(RequestFailedError, match="no such method"):
        await calls.ask(lambda call_id: calls.settle(call_id, None, "no such method"), "it", 10)
    sent: list[int] = []
    with pytest.raises(RequestFailedError, match="sleep got no answer in time"):
        await calls.ask(sent.append, "sleep", 0.01)
    calls.settle(sent[0], "too late")  # nobody is told


async def test_all_end_when_there_is_nobody_to_answer() -> None:
    calls = PendingCalls()
    asking = [asyncio.create_task(calls.ask(lambda _: None, "it", 10)) for _ in range(3)]
    await asyncio.sleep(0)
    calls.fail_all(EngineDeadError("it has ended"))
    for task in asking:
        with pytest.raises(EngineDeadError, match="it has ended"):
            await task


async def test_the_numbers_of_another_front_are_not_its_own() -> None:
    """What was answered to a front that is gone does not settle its successor's question."""
    calls = PendingCalls(first_id=1_000_000)
    asking = asyncio.create_task(calls.ask(lambda _: None, "it", 0.05))
    await asyncio.sleep(0)
    calls.settle(1, "meant for another one")
    with pytest.raises(RequestFailedError):
        await asking
