"""Fronts with one protection switched off, or one part broken, for tests of what it protects.

Each function changes the process that it is called in and returns what the engine process runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from octavo_core.wire import EngineCoreOutput, SchedulerStats
from octavo_server import output_processor
from octavo_server.detokenizer import Detokenizer
from octavo_server.engine_keeper import EngineKeeper
from octavo_server.engine_process import EngineTarget
from octavo_server.grammar_check_process import Verdict, too_slow
from octavo_server.grammar_checker import GrammarChecker
from octavo_server.http_protocol import BoundedProtocol
from octavo_server.input_processor import InputProcessor
from octavo_server.request_ledger import RequestLedger
from support.scripted_engine import run_scripted_engine


def forgetful_front() -> EngineTarget:
    """A front that does not keep the tokens of requests in flight."""

    def note(self: Any, outputs: Sequence[EngineCoreOutput]) -> None:
        self.remove([output.request_id for output in outputs if output.finish_reason])

    RequestLedger.note = note  # type: ignore[method-assign]
    return run_scripted_engine


def front_that_begins_to_count_again() -> EngineTarget:
    """A front that forgets what engines before this one had counted."""

    def forget(self: Any) -> None:
        self._stats = SchedulerStats()

    EngineKeeper._forget_load = forget  # type: ignore[method-assign]
    return run_scripted_engine


def front_that_cannot_spell() -> EngineTarget:
    """A front whose detokenizer fails on the letters ``urs``."""
    push = Detokenizer.push

    def faulty_push(self: Any, token_id: int) -> str:
        text = push(self, token_id)
        self.tail = (getattr(self, "tail", "") + text)[-3:]
        if self.tail == "urs":
            raise RuntimeError("unspeakable")
        return text

    Detokenizer.push = faulty_push  # type: ignore[method-assign]
    return run_scripted_engine


def front_that_trusts_its_speller() -> EngineTarget:
    """The same, and nothing catches it."""
    output_processor.Exception = ZeroDivisionError  # type: ignore[attr-defined]
    return front_that_cannot_spell()


def run_faulty_engine() -> EngineTarget:
    """A front on the real engine of `support.faulty_engine`."""
    from support.faulty_engine import run_faulty_engine  # imports torch, which a front must not

    return run_faulty_engine


def constrained_engine() -> EngineTarget:
    """An engine that follows grammars."""
    from support.constrained_engine import run_constrained_engine

    return run_constrained_engine


def front_that_compiles_itself() -> EngineTarget:
    """A front that tries out constraints in its event loop, for some seconds and no more."""

    async def try_out(self: Any, params: Any) -> Verdict:
        time.sleep(5.0)
        return Verdict(error=too_slow())

    GrammarChecker._try_out = try_out  # type: ignore[method-assign]
    return run_scripted_engine


def front_that_chokes() -> EngineTarget:
    """A front that has an unexpected error where it makes the engine's requests."""
    process = InputProcessor.process

    def choke(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if prompt == "choke":
            raise ZeroDivisionError
        return process(self, request_id, prompt, *args, **kwargs)

    InputProcessor.process = choke  # type: ignore[method-assign]
    return run_scripted_engine


def front_that_tokenizes_everything() -> EngineTarget:
    """A front that finds out that a prompt is too long when it has all of its tokens."""
    InputProcessor.check_length = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return run_scripted_engine


def front_that_polls_readers() -> EngineTarget:
    """A front that looks at each stalled connection 50 times a second, for 2 ms."""
    pause = BoundedProtocol.pause_writing

    def poll(self: Any) -> None:
        time.sleep(0.002)
        if not self.transport.is_closing():
            self.loop.call_later(0.02, poll, self)

    def pause_and_poll(self: Any) -> None:
        pause(self)
        poll(self)

    BoundedProtocol.pause_writing = pause_and_poll  # type: ignore[method-assign]
    return run_scripted_engine


def front_that_keeps_everything() -> EngineTarget:
    """A front that leaks 8 KiB with each request."""
    kept: list[bytearray] = []
    add = RequestLedger.add

    def leak(self: Any, *args: Any, **kwargs: Any) -> None:
        kept.append(bytearray(8192))
        add(self, *args, **kwargs)

    RequestLedger.add = leak  # type: ignore[method-assign]
    return run_scripted_engine


def run_pooling() -> EngineTarget:
    """An engine that pools texts."""
    from support.scripted_pooling import run_scripted_pooling

    return run_scripted_pooling
