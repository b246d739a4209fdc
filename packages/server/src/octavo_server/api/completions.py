"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_core.wire import EngineCoreRequest
from octavo_server.api.body import parse_body
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.errors import json_response
from octavo_server.api.generation import Job, answer, new_request_id
from octavo_server.api.logprobs import completion_logprobs
from octavo_server.api.protocol import CompletionRequest
from octavo_server.api.sampling import to_sampling_params
from octavo_server.api.sse import DONE, EventStream, event
from octavo_server.detokenizer import TextOffsets
from octavo_server.request_output import CompletionOutput, OutputDelta
from octavo_server.tokenizer import Tokenizer

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Complete one or more prompts."""
    body = await parse_body(request, CompletionRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    # Tokenizing a long prompt takes long enough to be felt by every stream.
    job = await asyncio.to_thread(_prepare, body, model)
    if body.max_tokens == 0:
        return _answer_echo(job)
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
    request_id = new_request_id("cmpl")
    prompts = body.prompts()
    requests: list[EngineCoreRequest] = []
    for number, prompt in enumerate(prompts):
        requests += model.input_processor.process(
            f"{request_id}-{number}",
            prompt,
            params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            tenant=body.tenant,
            add_special_tokens=body.add_special_tokens is not False,
            field=f"prompt[{number}]" if len(prompts) > 1 else "prompt",
        )
    echoes = [_text_of(prompt, model) for prompt in prompts] if body.echo else None
    return Job(
        request_id=request_id,
        model=model,
        requests=requests,
        choices_per_prompt=params.n,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        format=_CompletionFormat(
            model.tokenizer, requests, params.n, echoes, bool(body.return_token_ids)
        ),
    )


def _text_of(prompt: str | list[int], model: LoadedModel) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt, skip_special_tokens=False)


def _answer_echo(job: Job) -> Response:
    """Answer with the prompts alone; the engine has nothing to do."""
    assert isinstance(job.format, _CompletionFormat)
    usage = job.usage_counter().usage()
    headers = {"X-Request-Id": job.request_id}
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
        tokenizer: Tells where in the text a token starts.
        requests: The engine's requests, by index of the choice.
        choices_per_prompt: The request's ``n``.
        echoes: Each prompt as text, if it is to be repeated in the answer.
        return_token_ids: Add the ids of prompt and answer.
    """

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        requests: list[EngineCoreRequest],
        choices_per_prompt: int,
        echoes: list[str] | None,
        return_token_ids: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._requests = requests
        self._choices_per_prompt = choices_per_prompt
        self._echoes = echoes
        self._return_token_ids = return_token_ids
        self._offsets = [self._new_offsets(index) for index in range(len(requests))]

    def first_chunks(self) -> list[dict[str, Any]]:
        """Send the echoes, and the prompts' ids, before any token."""
        if self._echoes is None and not self._return_token_ids:
            return []
        return [
            self._choice(index, self._echo(index), None, None, None, self._ids(index, []))
            for index in range(len(self._requests))
        ]

    def chunks(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Write one delta."""
        shown = delta.text or delta.finish_reason or delta.logprobs
        if not shown and not (self._return_token_ids and delta.token_ids):
            return []
        logprobs = completion_logprobs(delta.logprobs, self._offsets[delta.index])
        extra = {"token_ids": delta.token_ids} if self._return_token_ids else {}
        choice = self._choice(
            delta.index, delta.text, logprobs, delta.finish_reason, delta.stop_reason, extra
        )
        return [choice]

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        """Write a whole choice."""
        logprobs = completion_logprobs(output.logprobs, self._new_offsets(output.index))
        return self._choice(
            output.index,
            self._echo(output.index) + output.text,
            logprobs,
            output.finish_reason,
            output.stop_reason,
            self._ids(output.index, output.token_ids),
        )

    def _new_offsets(self, index: int) -> TextOffsets:
        params = self._requests[index].sampling_params
        return TextOffsets(self._tokenizer, skip_special_tokens=params.skip_special_tokens)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices_per_prompt] if self._echoes else ""

    def _ids(self, index: int, token_ids: list[int]) -> dict[str, Any]:
        if not self._return_token_ids:
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
