"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.answer_events import (
    AnswerEvent,
    ArgumentsDelta,
    CallStart,
    CollectedAnswer,
    ReasoningDelta,
    collect,
)
from octavo_server.api.answer_reader import AnswerReader, by_kind
from octavo_server.api.answers import ChatCompletionAnswer
from octavo_server.api.body import parse_body
from octavo_server.api.chat_protocol import (
    ChatCompletionRequest,
)
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.conversation import Conversation, PreparedConversation, prepare
from octavo_server.api.generation import Job, answer, chosen_id, new_request_id
from octavo_server.api.logprobs import chat_logprobs
from octavo_server.api.messages import to_template_messages
from octavo_server.api.openapi import documented
from octavo_server.api.sampling import engine_options, to_sampling_params
from octavo_server.api.structured_outputs import constraint_field, response_format
from octavo_server.api.tool_use import tool_use_of
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
    messages = to_template_messages(body.messages)
    goes_on = bool(body.continue_final_message)
    conversation = Conversation(
        messages=messages[:-1] if goes_on else messages,
        prefill=messages[-1]["content"] if goes_on else None,
        params=params,
        tool_use=tool_use_of(body),
        template_options=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning_effort,
        shows_reasoning=body.include_reasoning is not False,
        add_generation_prompt=goes_on or body.add_generation_prompt is not False,
        request_options=engine_options(body, body.tenant),
    )
    prepared = prepare(model, request_id, conversation)
    return_token_ids = bool(body.return_token_ids)
    requests = prepared.requests
    extra = {"prompt_token_ids": requests[0].prompt_token_ids} if return_token_ids else {}
    chat_format = _ChatFormat(
        prepared,
        return_token_ids,
        bool(body.return_tokens_as_token_ids),
        _echo(messages[-1]) if body.echo else "",
    )
    return Job(
        request_id=request_id,
        model=model,
        requests=requests,
        choices_per_prompt=params.n,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        has_running_usage=body.has_running_usage,
        constraint_field=prepared.constraint_field(constraint_field(body, response_format(body))),
        format=chat_format,
        extra=extra,
        prompt_logprobs=body.prompt_logprobs,
        include_timing=bool(body.include_timing),
        answer_id=chosen_id("chatcmpl", body),
        usage_details=chat_format.usage_details,
    )


class _ChatFormat:
    """Choices of ``/v1/chat/completions``.

    Args:
        prepared: The conversation.
        return_token_ids: Add the answer's token ids.
        as_token_ids: Write ids in place of the tokens' texts in log-probabilities.
        echo: What the content begins with.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, prepared: PreparedConversation, return_token_ids: bool, as_token_ids: bool, echo: str
    ) -> None:
        self._echo = echo
        self._as_token_ids = as_token_ids
        self._return_token_ids = return_token_ids
        self._choices = [AnswerReader(prepared) for _ in prepared.requests]

    def first_chunks(self) -> list[dict[str, Any]]:
        """Say who speaks, and what has been said."""
        delta = {"role": "assistant", "content": self._echo}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(self._choices))
        ]

    def chunks(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Write one delta, each kind of content in a chunk of its own."""
        reader = self._choices[delta.index]
        parts = [_delta(part) for part in by_kind(reader.push(delta))]
        if not parts:
            shown = delta.finish_reason or delta.logprobs or delta.prompt_logprobs
            if not shown and not (self._return_token_ids and delta.token_ids):
                return []
            parts = [{} if delta.finish_reason else {"content": ""}]
        chunks: list[dict[str, Any]] = [
            {"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None}
            for part in parts
        ]
        chunks[0]["logprobs"] = chat_logprobs(delta.logprobs, as_token_ids=self._as_token_ids)
        if delta.finish_reason is not None:
            chunks[-1]["finish_reason"] = reader.finish_reason
            chunks[-1]["stop_reason"] = delta.stop_reason
        if self._return_token_ids:
            chunks[0]["token_ids"] = delta.token_ids
        return chunks

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        """Write a whole choice."""
        reader = self._choices[output.index]
        answer = collect(reader.push_whole(output))
        choice = {
            "index": output.index,
            "message": _message(answer, self._echo),
            "logprobs": chat_logprobs(output.logprobs, as_token_ids=self._as_token_ids),
            "finish_reason": reader.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def usage_details(self) -> dict[str, Any]:
        """Return how many tokens were reasoning, where it can be told."""
        counts = [reader.num_reasoning_tokens() for reader in self._choices if reader.can_reason]
        if not counts:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": sum(counts)}}


def _delta(events: list[AnswerEvent]) -> dict[str, Any]:
    """Write events of one kind as the ``delta`` of a chunk."""
    if isinstance(events[0], CallStart | ArgumentsDelta):
        return {"tool_calls": _call_fragments(events)}
    text = "".join(event.text for event in events if not isinstance(event, CallStart))
    if isinstance(events[0], ReasoningDelta):
        return {"reasoning": text, "reasoning_content": text}
    return {"content": text}


def _call_fragments(events: list[AnswerEvent]) -> list[dict[str, Any]]:
    fragments: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            fragments[event.index] = {"id": event.id, "type": "function", "function": function}
        elif isinstance(event, ArgumentsDelta):
            fragment = fragments.setdefault(event.index, {"function": {"arguments": ""}})
            fragment["function"]["arguments"] += event.text
    return [{"index": index, **fragment} for index, fragment in fragments.items()]


def _echo(last_message: dict[str, Any]) -> str:
    """Return the last message, if it is the model's own."""
    return str(last_message["content"]) if last_message["role"] == "assistant" else ""


def _message(answer: CollectedAnswer, echo: str) -> dict[str, Any]:
    has_more = answer.reasoning is not None or bool(answer.calls)
    content = answer.text if answer.text is not None or has_more else ""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": echo + (content or "") if echo else content,
        "refusal": None,
    }
    if answer.reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message
