"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_core.wire import EngineCoreRequest, TokenLogprobs
from octavo_server.api.answers import CompletionAnswer
from octavo_server.api.body import parse_body
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.errors import json_response
from octavo_server.api.generation import Job, answer, chosen_id, new_request_id
from octavo_server.api.logprobs import CompletionLogprobs, join_logprobs, prompt_logprobs
from octavo_server.api.openapi import documented
from octavo_server.api.protocol import (
    CompletionRequest,
)
from octavo_server.api.request_id import client_request_id
from octavo_server.api.sampling import engine_options, to_sampling_params
from octavo_server.api.sse import DONE, EventStream, event
from octavo_server.api.structured_outputs import constraint_field, response_format
from octavo_server.position_logprobs import to_prompt_positions
from octavo_server.request_output import CompletionOutput, OutputDelta
from octavo_server.tokenizer import Tokenizer

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post(
    "/v1/completions",
    **documented(body=CompletionRequest, answer=CompletionAnswer, streams=True),
)
async def create_completion(request: Request) -> Response:
    """Complete one or more prompts."""
    body = await parse_body(request, CompletionRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    # Tokenizing a long prompt takes long enough to be felt by every stream.
    job = await asyncio.to_thread(_prepare, body, model)
    if body.max_tokens == 0 and job.requests[0].sampling_params.prompt_logprobs is None:
        return _answer_echo(job, client_request_id(request) or job.request_id)
    return await answer(request, job)


def _prepare(body: CompletionRequest, model: LoadedModel) -> Job:
    """Check and tokenize the prompts.

    Raises:
        InvalidRequestError: A prompt doesn't fit, or fields contradict each other.
    """
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = to_sampling_params(
        body,
        model.sampling_defaults,
        # With nothing to generate, the prompt is still checked as if for one token.
        max_tokens=max(1, max_tokens),
        logprobs=body.logprobs,
    )
    if body.max_tokens == 0:
        params = msgspec.structs.replace(params, logprobs=None)
    request_id = new_request_id("cmpl")
    prompts = body.prompts()
    requests: list[EngineCoreRequest] = []
    for number, prompt in enumerate(prompts):
        requests += model.input_processor.process(
            f"{request_id}-{number}",
            prompt,
            params,
            add_special_tokens=body.add_special_tokens is not False,
            **engine_options(body, body.tenant),
            field=f"prompt[{number}]" if len(prompts) > 1 else "prompt",
        )
    return Job(
        request_id=request_id,
        model=model,
        requests=requests,
        choices_per_prompt=params.n,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        has_running_usage=body.has_running_usage,
        constraint_field=constraint_field(body, response_format(body)),
        format=_CompletionFormat(body, model.tokenizer, requests, params.n),
        drop_answer=body.max_tokens == 0,
        include_timing=bool(body.include_timing),
        answer_id=chosen_id("cmpl", body),
    )


def _answer_echo(job: Job, shown_id: str) -> Response:
    """Answer with the prompts alone; the engine has nothing to do."""
    assert isinstance(job.format, _CompletionFormat)
    usage = job.usage_counter().usage()
    headers = {"X-Request-Id": shown_id}
    empty = [
        CompletionOutput(index=index, text="", token_ids=[], finish_reason="length")
        for index in range(len(job.requests))
    ]
    choices = [job.format.choice(output) for output in empty]
    head = job.head("text_completion")
    if not job.stream:
        return json_response({**head, "choices": choices, "usage": usage}, headers=headers)

    async def events() -> Any:
        tail: dict[str, Any] = {"usage": None} if job.include_usage else {}
        for choice in choices:
            yield event({**head, "choices": [choice], **tail})
        if job.include_usage:
            yield event({**head, "choices": [], "usage": usage})
        yield DONE

    return EventStream(events(), lambda: None, headers)


class _CompletionFormat:
    """Choices of ``/v1/completions``.

    Args:
        body: Says what the answer has besides the text.
        tokenizer: The model's.
        requests: The engine's requests, by index of the choice.
        choices_per_prompt: The request's ``n``.
    """

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        tokenizer: Tokenizer,
        requests: list[EngineCoreRequest],
        choices_per_prompt: int,
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._requests = requests
        self._echoes = (
            [self._echo_text(index // choices_per_prompt, r) for index, r in enumerate(requests)]
            if body.echo
            else [""] * len(requests)
        )
        # A stream's, which go on from chunk to chunk.
        self._logprobs = [self._new_logprobs(index) for index in range(len(requests))]

    def first_chunks(self) -> list[dict[str, Any]]:
        """Send the echoes, and the prompts' ids, before any token.

        An echo that comes with log-probabilities has to wait for them.
        """
        shows_echo = self._body.echo and self._body.logprobs is None
        if not shows_echo and not self._body.return_token_ids:
            return []
        return [
            self._choice(index, echo if shows_echo else "", None, None, None, self._ids(index, []))
            for index, echo in enumerate(self._echoes)
        ]

    def chunks(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Write one delta."""
        shown = delta.text or delta.finish_reason or delta.logprobs or delta.prompt_logprobs
        if not shown and not (self._body.return_token_ids and delta.token_ids):
            return []
        extra: dict[str, Any] = (
            {"token_ids": delta.token_ids} if self._body.return_token_ids else {}
        )
        writer, text, logprobs = self._logprobs[delta.index], delta.text, None
        if delta.prompt_logprobs is not None:
            logprobs, more = self._about_prompt(delta.index, writer, delta.prompt_logprobs)
            extra |= more
            if logprobs is not None:
                text = self._echoes[delta.index] + text
        if delta.logprobs is not None:
            logprobs = join_logprobs(logprobs, writer.answer(delta.logprobs))
        choice = self._choice(
            delta.index, text, logprobs, delta.finish_reason, delta.stop_reason, extra
        )
        return [choice]

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        """Write a whole choice."""
        extra = self._ids(output.index, output.token_ids)
        writer, logprobs = self._new_logprobs(output.index), None
        if output.prompt_logprobs is not None:
            logprobs, more = self._about_prompt(output.index, writer, output.prompt_logprobs)
            extra |= more
        if output.logprobs is not None:
            logprobs = join_logprobs(logprobs, writer.answer(output.logprobs))
        return self._choice(
            output.index,
            self._echoes[output.index] + output.text,
            logprobs,
            output.finish_reason,
            output.stop_reason,
            extra,
        )

    def _about_prompt(
        self, index: int, writer: CompletionLogprobs, entries: list[TokenLogprobs]
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the echo's ``logprobs``, if there are any, and the field ``prompt_logprobs``."""
        echoed, wanted = self._body.echoed_logprobs, self._body.prompt_logprobs
        logprobs, extra = None, {}
        if echoed is not None:
            positions = to_prompt_positions(self._tokenizer, entries, echoed)
            logprobs = writer.prompt(self._requests[index].prompt_token_ids, positions)
        if wanted is not None:
            positions = to_prompt_positions(self._tokenizer, entries, wanted)
            extra["prompt_logprobs"] = prompt_logprobs(positions)
        return logprobs, extra

    def _new_logprobs(self, index: int) -> CompletionLogprobs:
        return CompletionLogprobs(
            self._tokenizer,
            skip_special_tokens=self._requests[index].sampling_params.skip_special_tokens,
            as_token_ids=bool(self._body.return_tokens_as_token_ids),
            echo=self._echoes[index],
        )

    def _echo_text(self, prompt_index: int, request: EngineCoreRequest) -> str:
        """Return the prompt as text, or what truncation has left of it."""
        prompt = self._body.prompts()[prompt_index]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)

    def _ids(self, index: int, token_ids: list[int]) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {
            "token_ids": token_ids,
            "prompt_token_ids": self._requests[index].prompt_token_ids,
        }

    @staticmethod
    def _choice(
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        stop_reason: int | str | None,
        extra: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            **extra,
        }
