"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.answers import ChatCompletionAnswer
from octavo_server.api.body import parse_body
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.generation import Job, answer, new_request_id
from octavo_server.api.logprobs import chat_logprobs
from octavo_server.api.messages import to_template_messages
from octavo_server.api.openapi import documented
from octavo_server.api.protocol import ChatCompletionRequest
from octavo_server.api.sampling import to_sampling_params
from octavo_server.api.structured_outputs import constraint_field
from octavo_server.request_output import CompletionOutput, OutputDelta

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **documented(body=ChatCompletionRequest, answer=ChatCompletionAnswer, streams=True),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await parse_body(request, ChatCompletionRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    # The template and the tokenizer take long enough to be felt by every stream.
    job = await asyncio.to_thread(_prepare, body, model)
    return await answer(request, job)


def _prepare(body: ChatCompletionRequest, model: LoadedModel) -> Job:
    """Render the template and tokenize.

    Raises:
        InvalidRequestError: The prompt doesn't fit, or fields contradict each other.
    """
    max_tokens = body.max_completion_tokens
    params = to_sampling_params(
        body,
        model.sampling_defaults,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    request_id = new_request_id("chatcmpl")
    requests = model.input_processor.process_chat(
        request_id,
        to_template_messages(body.messages),
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        tenant=body.tenant,
        add_generation_prompt=body.add_generation_prompt is not False,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        **_template_options(body),
    )
    return_token_ids = bool(body.return_token_ids)
    extra = {"prompt_token_ids": requests[0].prompt_token_ids} if return_token_ids else {}
    return Job(
        request_id=request_id,
        model=model,
        requests=requests,
        choices_per_prompt=params.n,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        constraint_field=constraint_field(body),
        format=_ChatFormat(params.n, return_token_ids, bool(body.return_tokens_as_token_ids)),
        extra=extra,
        prompt_logprobs=body.prompt_logprobs,
    )


# Names that `process_chat` takes for itself, which a template option must not override.
_RESERVED = frozenset(
    {
        "self",
        "request_id",
        "messages",
        "params",
        "arrival_time",
        "priority",
        "cache_salt",
        "tenant",
        "add_generation_prompt",
        "truncate_prompt_tokens",
        "tools",
    }
)


def _template_options(body: ChatCompletionRequest) -> dict[str, Any]:
    options = body.chat_template_kwargs or {}
    return {name: value for name, value in options.items() if name not in _RESERVED}


class _ChatFormat:
    """Choices of ``/v1/chat/completions``.

    Args:
        num_choices: The request's ``n``.
        return_token_ids: Add the answer's token ids.
        as_token_ids: Write ids in place of the tokens' texts in log-probabilities.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, num_choices: int, return_token_ids: bool, as_token_ids: bool) -> None:
        self._num_choices = num_choices
        self._as_token_ids = as_token_ids
        self._return_token_ids = return_token_ids

    def first_chunks(self) -> list[dict[str, Any]]:
        """Say who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self._num_choices)
        ]

    def chunk(self, delta: OutputDelta) -> dict[str, Any] | None:
        """Write one delta."""
        shown = delta.text or delta.finish_reason or delta.logprobs or delta.prompt_logprobs
        if not shown and not (self._return_token_ids and delta.token_ids):
            return None
        choice = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": chat_logprobs(delta.logprobs, as_token_ids=self._as_token_ids),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return self._with_ids(choice, delta.token_ids)

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        """Write a whole choice."""
        choice = {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": chat_logprobs(output.logprobs, as_token_ids=self._as_token_ids),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return self._with_ids(choice, output.token_ids)

    def _with_ids(self, choice: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        if self._return_token_ids:
            choice["token_ids"] = token_ids
        return choice
