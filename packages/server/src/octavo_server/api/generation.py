"""A completion or chat: choices, in chunks or whole, with their usage.

A route brings its own `ChoiceFormat`; everything else about its answer is here, so that both
treat streams and usage alike.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo_core.wire import EngineCoreRequest, TokenLogprobs
from octavo_server.api.context import LoadedModel
from octavo_server.api.errors import ApiError
from octavo_server.api.logprobs import prompt_logprobs
from octavo_server.api.protocol import GenerationRequest
from octavo_server.api.respond import respond
from octavo_server.api.sse import DONE, encode, event
from octavo_server.api.timing import Timing
from octavo_server.api.usage import UsageCounter
from octavo_server.position_logprobs import to_prompt_positions
from octavo_server.request_output import CompletionOutput, OutputAccumulator, OutputDelta

Result = TypeVar("Result")


def new_request_id(prefix: str) -> str:
    """Return a new id such as ``cmpl-1f0c…``."""
    return f"{prefix}-{uuid.uuid4().hex}"


def chosen_id(prefix: str, body: GenerationRequest) -> str | None:
    """Return the response's id that a body asks for, if it does."""
    return None if body.request_id is None else f"{prefix}-{body.request_id}"


class ChoiceFormat(Protocol):
    """How a route writes its choices."""

    object: str
    chunk_object: str

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the choices to send before any token, one for each event."""
        ...

    def chunks(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return the choices to send for `delta`, one for each event; none if nothing shows."""
        ...

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""
        ...


@dataclass
class Job:
    """A request that was checked and tokenized.

    Attributes:
        request_id: The id under which it runs.
        requests: One for each choice, prompt by prompt.
        choices_per_prompt: The request's ``n``.
        constraint_field: What the request calls its constraint, if it has one.
        extra: Top-level fields of the response, or of the stream's first chunk.
        usage_details: Returns further fields of ``usage``, once the answer is complete.
        prompt_logprobs: How many alternatives a top-level field of that name has for each
            token of the prompt; None for no such field.
        drop_answer: What the engine answers is of no interest, only the prompt is.
        include_timing: The answer tells how long its parts took.
        has_running_usage: Each chunk of a stream tells the usage so far.
        answer_id: The response's id, where the request chose one; the engine's is our own.
    """

    request_id: str
    model: LoadedModel
    requests: list[EngineCoreRequest]
    choices_per_prompt: int
    stream: bool
    include_usage: bool
    format: ChoiceFormat
    constraint_field: str = "structured_outputs"
    extra: dict[str, Any] = field(default_factory=dict)
    usage_details: Callable[[], dict[str, Any]] = dict
    prompt_logprobs: int | None = None
    drop_answer: bool = False
    include_timing: bool = False
    has_running_usage: bool = False
    answer_id: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def usage_counter(self) -> UsageCounter:
        """Return a counter that knows this job's prompts."""
        first_choices = self.requests[:: self.choices_per_prompt]
        return UsageCounter(
            [len(request.prompt_token_ids) for request in first_choices], self.choices_per_prompt
        )

    def about_prompt(self, entries: list[TokenLogprobs] | None) -> dict[str, Any]:
        """Return the top-level field ``prompt_logprobs``, if it is wanted and known."""
        if entries is None or self.prompt_logprobs is None:
            return {}
        positions = to_prompt_positions(self.model.tokenizer, entries, self.prompt_logprobs)
        return {"prompt_logprobs": prompt_logprobs(positions)}

    def shown(self, delta: OutputDelta) -> OutputDelta:
        """Return what of a delta is answered."""
        if not self.drop_answer or delta.error is not None:
            return delta
        reason = delta.finish_reason and "length"
        return msgspec.structs.replace(
            delta, text="", token_ids=[], finish_reason=reason, stop_reason=None
        )

    def head(self, object_name: str) -> dict[str, Any]:
        """Return the fields that every response and chunk starts with."""
        return {
            "id": self.answer_id or self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model.name,
        }


async def answer(request: Request, job: Job) -> Response:
    """Run `job` and answer `request`, as a stream or whole.

    Raises:
        OctavoError: The engine refused the request, or failed.
        ClientDisconnect: The client left; the engine's work was aborted.
    """
    writer = _ChunkWriter(job) if job.stream else _WholeWriter(job)
    return await respond(
        request,
        job.request_id,
        job.requests,
        writer,
        stream=job.stream,
        constraint_field=job.constraint_field,
        choices_per_prompt=job.choices_per_prompt,
        note_timing=writer.note_timing,
        is_scored=job.drop_answer,
    )


class _TimedWriter:
    """What the two writers have in common: the field ``timing``."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._timing: Timing | None = None

    def note_timing(self, timing: Timing) -> None:
        if self._job.include_timing:
            self._timing = timing

    def timing_field(self) -> dict[str, Any]:
        return {} if self._timing is None else {"timing": self._timing.field()}


class _WholeWriter(_TimedWriter):
    """Puts a whole answer together."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._counter = job.usage_counter()
        self._accumulator = OutputAccumulator(job.request_id, None, [], len(job.requests))

    def begin(self) -> bytes:
        return b""

    async def step(self, deltas: Sequence[OutputDelta]) -> bytes:
        for delta in map(self._job.shown, deltas):
            self._counter.add(delta)
            self._accumulator.add(delta)
        return b""

    def end(self) -> bytes:
        return b""

    def fail(self, error: ApiError) -> bytes:
        return b""

    async def result(self) -> dict[str, Any]:
        job = self._job
        outputs = self._accumulator.result().outputs
        choices, about_prompt = await _off_loop_if(
            outputs[0].prompt_logprobs is not None, partial(_write_outputs, job, outputs)
        )
        return {
            **job.head(job.format.object),
            "choices": choices,
            "usage": self._counter.usage() | job.usage_details(),
            **job.extra,
            **about_prompt,
            **self.timing_field(),
        }


class _ChunkWriter(_TimedWriter):
    """Writes the chunks of a stream."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._counter = job.usage_counter()
        self._head = job.head(job.format.chunk_object)
        # A stream that ends with the usage says null before, so that each chunk has the field.
        self._tail: dict[str, Any] = {"usage": None} if job.include_usage else {}
        # What stands around the choice in each chunk, encoded once: 2 µs a token.
        around = event({**self._head, "choices": [0], **self._tail})
        self._before, self._after = around.split(b'"choices":[0]')

    def begin(self) -> bytes:
        chunks = self._job.format.first_chunks()
        extra = self._job.extra | self._running_usage()
        return b"".join(self._chunk(choice, extra) for choice in chunks)

    async def step(self, deltas: Sequence[OutputDelta]) -> bytes:
        written = []
        for delta in map(self._job.shown, deltas) if self._job.drop_answer else deltas:
            self._counter.add(delta)
            running = self._running_usage()
            if delta.prompt_logprobs is None:
                chunks = self._job.format.chunks(delta)
                written += [self._chunk(choice, running) for choice in chunks]
                continue
            # In a thread: a long prompt's report takes 0.2 s to write.
            choices, about_prompt = await asyncio.to_thread(_write_delta, self._job, delta)
            for choice in choices:
                written.append(self._chunk(choice, about_prompt | running))
                about_prompt = {}
        return b"".join(written)

    def end(self) -> bytes:
        last = self.timing_field()
        if self._job.include_usage:
            last["usage"] = self._counter.usage() | self._job.usage_details()
        return (event({**self._head, "choices": [], **last}) if last else b"") + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    async def result(self) -> dict[str, Any]:
        raise AssertionError("a stream has no whole")

    def _running_usage(self) -> dict[str, Any]:
        return {"usage": self._counter.usage()} if self._job.has_running_usage else {}

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        if extra:
            return event({**self._head, "choices": [choice], **self._tail, **extra})
        return b'%b"choices":[%b]%b' % (self._before, encode(choice), self._after)


def _write_outputs(
    job: Job, outputs: list[CompletionOutput]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    choices = [job.format.choice(output) for output in outputs]
    return choices, job.about_prompt(outputs[0].prompt_logprobs)


def _write_delta(job: Job, delta: OutputDelta) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return job.format.chunks(delta), job.about_prompt(delta.prompt_logprobs)


async def _off_loop_if(is_long: bool, work: Callable[[], Result]) -> Result:
    """Do `work`, in a thread if it `is_long`: a long prompt's report takes 0.2 s to write."""
    return await asyncio.to_thread(work) if is_long else work()
