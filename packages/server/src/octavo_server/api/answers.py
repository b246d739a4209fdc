"""The shapes of answers, for the OpenAPI document. Routes write them as plain dicts.

Fields that only come when a request asks for them may be absent.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of all answers; a later version may add fields."""

    model_config = ConfigDict(extra="allow")


class ErrorBody(Answer):
    """What went wrong; ``param`` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Any answer with a status of 400 and above."""

    error: ErrorBody


class HealthAnswer(Answer):
    """Whether requests are served, and how far the start-up is."""

    status: Literal["ok", "loading", "restarting", "shutting_down", "sleeping", "dead"]
    stage: str
    progress: float | None


class VersionAnswer(Answer):
    """The version of Octavo."""

    version: str


class LoadAnswer(Answer):
    """How many requests are being served."""

    server_load: int


class ModelCard(Answer):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class PromptTokensDetails(Answer):
    """How many tokens of the prompt were in the cache."""

    cached_tokens: int


class Usage(Answer):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class CompletionAnswer(Answer):
    """Answer of ``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatAnswerMessage(Answer):
    """The assistant's turn."""

    role: str
    content: str | None


class ChatChoice(Answer):
    """One next message."""

    index: int
    message: ChatAnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class ChatCompletionAnswer(Answer):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class InputTokensDetails(Answer):
    """How many tokens of the prompt were in the cache."""

    cached_tokens: int


class OutputTokensDetails(Answer):
    """How many tokens of the answer were reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Counts of tokens, as the Responses API names them."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(Answer):
    """Answer of ``POST /v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


class DeletedResponse(Answer):
    """Answer of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response.deleted"]
    deleted: bool


class ItemList(Answer):
    """Items of a conversation."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseTokenCount(Answer):
    """Answer of ``POST /v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class MessageUsage(Answer):
    """Counts of tokens, as Anthropic's API names them."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int


class MessageAnswer(Answer):
    """Answer of ``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    """Answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class MessageErrorBody(Answer):
    """What went wrong."""

    type: str
    message: str


class MessageErrorAnswer(Answer):
    """Any answer of Anthropic's API with a status of 400 and above."""

    type: Literal["error"]
    error: MessageErrorBody


class TokenizeAnswer(Answer):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(Answer):
    """Answer of ``POST /detokenize``."""

    prompt: str
