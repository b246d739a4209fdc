"""Constraints tried out in a process that is ended when it takes too much."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo_core.errors import InvalidRequestError, QueueFullError
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server import grammar_checker
from octavo_server.grammar_checker import MAX_VERDICTS, GrammarChecker

# What the library would be compiling for minutes.
BOMB = {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}


def of_schema(schema: Any, **fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(schema), **fields)


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()


async def test_what_is_good_passes(checker: GrammarChecker) -> None:
    params = of_schema({"type": "object"}, after="</think>")
    assert await checker.check(params) == params
    process = checker._process
    assert await checker.check(StructuredOutputsParams(regex="a+"))
    assert checker._process is process, "one process serves all"


async def test_gbnf_is_translated_once(checker: GrammarChecker) -> None:
    prepared = await checker.check(StructuredOutputsParams(grammar='root ::= "x" [0-9]'))
    assert prepared.grammar is not None
    assert "start:" in prepared.grammar
    assert await checker.check(prepared) == prepared


async def test_what_is_bad_is_told_under_the_name_of_its_field(checker: GrammarChecker) -> None:
    """G01"""
    params = of_schema({"type": "object", "properties": {"foo": "bar"}})
    with pytest.raises(InvalidRequestError, match="/properties/foo") as caught:
        await checker.check(params, "response_format")
    assert caught.value.field == "response_format"
    process = checker._process
    with pytest.raises(InvalidRequestError, match="/properties/foo"):
        await checker.check(params)
    assert checker._process is process


async def test_a_bomb_is_ended_and_remembered(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the clock lets it run, there are two seconds of CPU time and no more."""
    monkeypatch.setattr(grammar_checker, "_MAX_SECONDS", 60.0)
    await checker.check(of_schema({}))
    first = checker._process
    assert first is not None
    with pytest.raises(InvalidRequestError, match="takes more than 2 s"):
        await checker.check(of_schema(BOMB))
    assert first.returncode is not None
    with pytest.raises(InvalidRequestError, match="takes more than 2 s"):
        await checker.check(of_schema(BOMB))
    assert checker._process is None, "it is not tried again"
    assert await checker.check(of_schema({"type": "array"}))


async def test_the_clock_ends_a_bomb_too_and_holds_nothing_against_it(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a constraint may take long that is served another day."""
    monkeypatch.setattr(grammar_checker, "_MAX_SECONDS", 0.1)
    monkeypatch.setattr(grammar_checker, "_SHARE", 0.02)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="as busy as this one"):
            await checker.check(of_schema(BOMB))
    assert not checker._verdicts


async def test_who_gets_no_time_waits_for_it(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped stands for a machine that is too busy to run it."""
    monkeypatch.setattr(grammar_checker, "_MAX_SECONDS", 0.05)
    await checker.check(of_schema({}))
    process = checker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(checker.check(of_schema({"type": "array"})))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    process.send_signal(signal.SIGCONT)
    assert await waiting

    monkeypatch.setattr(grammar_checker, "_MAX_STARVED_SECONDS", 0.2)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(QueueFullError, match="try again"):
        await checker.check(of_schema({"type": "null"}))
    assert await checker.check(of_schema({"type": "null"}))


async def test_a_process_that_was_killed_in_between_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(of_schema({}))
    process = checker._process
    assert process is not None
    process.kill()
    await process.wait()
    assert await checker.check(of_schema({"type": "array"}))
    assert checker._process is not process


async def test_a_kill_is_not_held_against_the_constraint(checker: GrammarChecker) -> None:
    """The system may do that when its memory is short, to whomever it likes."""
    await checker.check(of_schema({}))
    process = checker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(checker.check(of_schema({"type": "array"})))
    await asyncio.sleep(0.1)
    process.kill()
    with pytest.raises(QueueFullError, match="try again"):
        await waiting
    assert await checker.check(of_schema({"type": "array"}))


@pytest.mark.parametrize("problem", ["it ends", "it can't be made"])
async def test_a_process_that_does_not_start_is_no_fault_of_the_server(
    checker: GrammarChecker, problem: str, tmp_path: Path
) -> None:
    name = "missing"
    if problem == "it ends":
        name = "false"
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / name))
        with pytest.raises(QueueFullError, match="try again"):
            await checker.check(of_schema({}))
    assert checker._process is None
    assert await checker.check(of_schema({}))


async def test_memory_is_limited(checker: GrammarChecker) -> None:
    await checker.check(of_schema({}))
    process = checker._process
    assert process is not None
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert int(line.split()[3]) < 2 * 1024**3


async def test_the_loop_is_never_blocked(checker: GrammarChecker) -> None:
    """While a bomb goes off, others that wait for nothing go on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_checker, "_MAX_SECONDS", 0.3)
        patch.setattr(grammar_checker, "_SHARE", 0.0)
        task = asyncio.create_task(checker.check(of_schema(BOMB)))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert ticks > 20
        with pytest.raises(InvalidRequestError):
            await task


async def test_who_waits_too_long_is_told_to_come_again(checker: GrammarChecker) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_checker, "_MAX_SECONDS", 1.0)
        patch.setattr(grammar_checker, "_SHARE", 0.0)
        patch.setattr(grammar_checker, "_QUEUE_SECONDS", 0.05)
        bomb = asyncio.create_task(checker.check(of_schema(BOMB)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="try again"):
            await checker.check(of_schema({"type": "null"}))
        with pytest.raises(InvalidRequestError):
            await bomb


async def test_a_client_that_leaves_takes_nobody_elses_answer(checker: GrammarChecker) -> None:
    await checker.check(of_schema({}))
    leaving = asyncio.create_task(checker.check(of_schema(BOMB)))
    await asyncio.sleep(0.05)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    with pytest.raises(InvalidRequestError, match="/type"):
        await checker.check(of_schema({"type": "strng"}))
    assert await checker.check(of_schema({"type": "string"}))


async def test_verdicts_are_bounded(checker: GrammarChecker) -> None:
    """K11"""
    for number in range(MAX_VERDICTS + 10):
        await checker.check(StructuredOutputsParams(regex=f"a{{{number}}}"))
    assert len(checker._verdicts) == MAX_VERDICTS


async def test_closing_ends_the_process(checker: GrammarChecker) -> None:
    await checker.check(of_schema({}))
    process = checker._process
    assert process is not None
    await checker.close()
    assert process.returncode is not None
    await checker.close()
