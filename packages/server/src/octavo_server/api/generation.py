"""One generating request, whichever route it came by: submit, stream or collect.

A route brings its own `ChoiceFormat`; everything else about answering is here, so both
routes treat errors, disconnects and usage alike.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo_core.wire import EngineCoreRequest
from octavo_server.api.context import LoadedModel
from octavo_server.api.deadline import generate
from octavo_server.api.errors import json_response, to_api_error
from octavo_server.api.sse import DONE, EventStream, event, until_disconnect
from octavo_server.api.usage import UsageCounter
from octavo_server.engine_client import Generation
from octavo_server.request_output import CompletionOutput, OutputAccumulator, OutputDelta


def new_request_id(prefix: str) -> str:
    """Return a new id such as ``cmpl-1f0c…``."""
    return f"{prefix}-{uuid.uuid4().hex}"


class ChoiceFormat(Protocol):
    """How a route writes its choices."""

    object: str
    chunk_object: str

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the choices to send before any token, one for each event."""
        ...

    def chunk(self, delta: OutputDelta) -> dict[str, Any] | None:
        """Return the choice to send for `delta`, or None if it has nothing to show."""
        ...

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""
        ...


@dataclass
class Job:
    """A request that was checked and tokenized.

    Attributes:
        request_id: The response's id.
        requests: One for each choice, prompt by prompt.
        choices_per_prompt: The request's ``n``.
        extra: Top-level fields of the response, or of the stream's first chunk.
    """

    request_id: str
    model: LoadedModel
    requests: list[EngineCoreRequest]
    choices_per_prompt: int
    stream: bool
    include_usage: bool
    format: ChoiceFormat
    extra: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def usage_counter(self) -> UsageCounter:
        """Return a counter that knows this job's prompts."""
        first_choices = self.requests[:: self.choices_per_prompt]
        return UsageCounter(
            [len(request.prompt_token_ids) for request in first_choices], self.choices_per_prompt
        )

    def head(self, object_name: str) -> dict[str, Any]:
        """Return the fields that every response and chunk starts with."""
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model.name,
        }


async def answer(request: Request, job: Job) -> Response:
    """Run `job` and answer `request`, as a stream or whole.

    Whatever can be refused is refused before the first byte: a stream starts only when the
    engine has given its first tokens.

    Raises:
        OctavoError: The engine refused the request, or failed.
        ClientDisconnect: The client left; the engine's work was aborted.
    """
    headers = {"X-Request-Id": job.request_id}
    generation = generate(request, job.request_id, job.requests)
    try:
        if not job.stream:
            content = await until_disconnect(request.receive, _collect(job, generation))
            return json_response(content, headers=headers)
        first = await until_disconnect(request.receive, _first_deltas(generation))
    except BaseException:
        generation.close()
        raise
    return EventStream(_events(job, first, generation), generation.close, headers)


async def _collect(job: Job, generation: Generation) -> dict[str, Any]:
    counter = job.usage_counter()
    accumulator = OutputAccumulator(job.request_id, None, [], len(job.requests))
    async for deltas in generation:
        _raise_errors(deltas)
        for delta in deltas:
            counter.add(delta)
            accumulator.add(delta)
    choices = [job.format.choice(output) for output in accumulator.result().outputs]
    return {
        **job.head(job.format.object),
        "choices": choices,
        "usage": counter.usage(),
        **job.extra,
    }


async def _first_deltas(generation: Generation) -> list[OutputDelta]:
    deltas = await anext(generation)
    _raise_errors(deltas)
    return deltas


async def _events(
    job: Job, first: list[OutputDelta], generation: Generation
) -> AsyncGenerator[bytes, None]:
    counter = job.usage_counter()
    head = job.head(job.format.chunk_object)
    # A stream that ends with the usage says null before, so that each chunk has the field.
    tail: dict[str, Any] = {"usage": None} if job.include_usage else {}

    def chunk(choice: dict[str, Any], **extra: Any) -> bytes:
        return event({**head, "choices": [choice], **tail, **extra})

    try:
        parts = [chunk(choice, **job.extra) for choice in job.format.first_chunks()]
        deltas = first
        while deltas:
            _raise_errors(deltas)
            for delta in deltas:
                counter.add(delta)
                choice = job.format.chunk(delta)
                if choice is not None:
                    parts.append(chunk(choice))
            if parts:
                yield b"".join(parts)
            parts = []
            deltas = await anext(generation, [])
        if job.include_usage:
            yield event({**head, "choices": [], "usage": counter.usage()})
    except Exception as error:
        # The status has gone out as 200; the stream itself has to say it.
        yield event(to_api_error(error).body())
    yield DONE


def _raise_errors(deltas: list[OutputDelta]) -> None:
    for delta in deltas:
        if delta.error is not None:
            raise delta.error.to_exception()
