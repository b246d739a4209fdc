"""Runs one request and answers it, as a stream of events or whole.

Each API brings a writer. All else about answering is here: what can be refused is refused
before the first byte, a client that leaves ends the engine's work, an error in a stream is an
event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo_core.wire import EngineCoreRequest
from octavo_server.api.context import context_of
from octavo_server.api.deadline import with_deadline
from octavo_server.api.errors import ApiError, json_response, to_api_error
from octavo_server.api.request_id import client_request_id
from octavo_server.api.sse import EventStream, until_disconnect
from octavo_server.api.structured_outputs import check_grammars
from octavo_server.api.timing import Timing, timing_of
from octavo_server.generation import Generation
from octavo_server.request_output import OutputDelta


class AnswerWriter(Protocol):
    """How an API writes an answer. Each method returns encoded events, maybe none."""

    def begin(self) -> bytes:
        """Write what comes before any delta."""
        ...

    async def step(self, deltas: Sequence[OutputDelta]) -> bytes:
        """Write one step's deltas, of which none is an error."""
        ...

    def end(self) -> bytes:
        """Write what comes after the last delta."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Write an error; nothing comes after it."""
        ...

    async def result(self) -> dict[str, Any]:
        """Return the whole answer, after `end`."""
        ...


async def respond(
    request: Request,
    request_id: str,
    requests: Sequence[EngineCoreRequest],
    writer: AnswerWriter,
    *,
    stream: bool,
    constraint_field: str = "structured_outputs",
    choices_per_prompt: int = 1,
    note_timing: Callable[[Timing], None] | None = None,
    is_scored: bool = False,
) -> Response:
    """Run `requests` as the choices of one answer.

    Args:
        request_id: The answer's id.
        constraint_field: What the request calls its constraint, if it has one.
        choices_per_prompt: How many choices follow each other that have one prompt.
        note_timing: Called once the last token is there, before the writer's `end`.
        is_scored: Only the prompts are of interest; no token of an answer is counted.

    Raises:
        OctavoError: The engine refused the request, or failed.
        ClientDisconnect: The client left; the engine's work was aborted.
    """
    headers = {"X-Request-Id": client_request_id(request) or request_id}
    context = context_of(request)
    checked = await until_disconnect(
        request.receive, check_grammars(context.grammar_checker, requests, constraint_field)
    )
    generation = context.client.generate(request_id, with_deadline(request, checked))
    generation.client_request_id = client_request_id(request)
    for progress in generation.progress:
        progress.is_scored = is_scored

    def at_end() -> Timing:
        timing = timing_of(generation.progress, choices_per_prompt)
        if note_timing is not None:
            note_timing(timing)
        return timing

    try:
        if not stream:
            content, timing = await until_disconnect(
                request.receive, collect_answer(generation, writer, at_end)
            )
            return json_response(content, headers=headers | timing.headers())
        first = await until_disconnect(request.receive, first_deltas(generation))
    except BaseException:
        generation.close()
        raise
    events = answer_events(first, generation, writer, at_end)
    return EventStream(events, generation.close, headers)


async def collect_answer(
    generation: Generation, writer: AnswerWriter, at_end: Callable[[], Timing]
) -> tuple[dict[str, Any], Timing]:
    """Return the whole answer, and how long it took.

    Raises:
        OctavoError: The engine failed.
    """
    writer.begin()
    async for deltas in generation:
        raise_errors(deltas)
        await writer.step(deltas)
    timing = at_end()
    writer.end()
    return await writer.result(), timing


async def first_deltas(generation: Generation) -> list[OutputDelta]:
    """Return what the engine's first step brings.

    Raises:
        OctavoError: The engine refused the request, or failed.
    """
    deltas = await anext(generation)
    raise_errors(deltas)
    return deltas


async def answer_events(
    first: list[OutputDelta],
    generation: Generation,
    writer: AnswerWriter,
    at_end: Callable[[], Timing],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer, each step's in one piece."""
    try:
        data = writer.begin()
        deltas = first
        while deltas:
            raise_errors(deltas)
            data += await writer.step(deltas)
            if data:
                yield data
            data = b""
            deltas = await anext(generation, [])
        at_end()
        yield data + writer.end()
    except Exception as error:
        # The status has gone out as 200; the stream itself has to say it.
        yield writer.fail(to_api_error(error))


def raise_errors(deltas: Sequence[OutputDelta]) -> None:
    """Raise the error that a delta carries."""
    for delta in deltas:
        if delta.error is not None:
            raise delta.error.to_exception()
