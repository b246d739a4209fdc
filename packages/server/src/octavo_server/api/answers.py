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

    status: Literal["ok", "loading", "shutting_down", "sleeping", "dead"]
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
