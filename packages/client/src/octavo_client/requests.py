"""What a caller may ask for, and the HTTP requests that carry it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from octavo_client.errors import InvalidArgumentError

Message = Mapping[str, Any]
"""One message of a chat: ``{"role": "user", "content": "Hello"}``."""

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A text or its token ids, or several of them."""


_MAX_PATH_CHARS = 2048


class SamplingOptions(TypedDict, total=False):
    """Options that completions and chat share. What is left out is the server's default.

    Attributes:
        n: How many answers.
        stop: Strings that end the text.
        extra_body: Further fields of the request, for servers that know more.
        timeout: Seconds without a byte from the server, instead of the client's own.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    min_tokens: int
    skip_special_tokens: bool
    return_token_ids: bool
    cache_salt: str
    extra_body: Mapping[str, Any]
    timeout: float


class CompletionOptions(SamplingOptions, total=False):
    """Options of a completion.

    Attributes:
        logprobs: How many of the likeliest tokens to report at each position.
        echo: Begin the text with the prompt.
    """

    logprobs: int
    echo: bool


class ChatOptions(SamplingOptions, total=False):
    """Options of a chat.

    Attributes:
        logprobs: Whether to report log-probabilities.
        top_logprobs: How many of the likeliest tokens to report at each position.
    """

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    add_generation_prompt: bool
    chat_template_kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class HTTPRequest:
    """One HTTP request, before any connection.

    Attributes:
        path: Below the server's root, for example ``/v1/models``.
        content: JSON body.
        timeout: Seconds without a byte from the server; None means the client's own.
    """

    method: str
    path: str
    content: bytes | None = None
    timeout: float | None = None


def completion_request(
    prompt: Prompt, model: str | None, options: CompletionOptions, *, stream: bool = False
) -> HTTPRequest:
    """Build ``POST /v1/completions``.

    Raises:
        InvalidArgumentError: JSON can't carry one of the values.
    """
    return _generation("/v1/completions", {"prompt": prompt}, model, options, stream)


def chat_request(
    messages: Sequence[Message], model: str | None, options: ChatOptions, *, stream: bool = False
) -> HTTPRequest:
    """Build ``POST /v1/chat/completions``.

    Raises:
        InvalidArgumentError: JSON can't carry one of the values.
    """
    return _generation("/v1/chat/completions", {"messages": messages}, model, options, stream)


class PoolingOptions(TypedDict, total=False):
    """Options of embeddings, scores and ranks. What is left out is the server's default.

    Attributes:
        truncate_prompt_tokens: Keep this many tokens of each text; -1 keeps what the context
            holds.
        extra_body: Further fields of the request, for servers that know more.
        timeout: Seconds without a byte from the server, instead of the client's own.
    """

    truncate_prompt_tokens: int
    extra_body: Mapping[str, Any]
    timeout: float


class EmbeddingOptions(PoolingOptions, total=False):
    """Options of embeddings.

    Attributes:
        dimensions: Keep this many numbers of each vector, if the model was made for that.
    """

    dimensions: int


class RerankOptions(PoolingOptions, total=False):
    """Options of a rank.

    Attributes:
        top_n: How many documents to return; all, if left out.
        return_documents: Whether their texts come back.
        max_tokens_per_doc: Keep this many tokens of each document.
    """

    top_n: int
    return_documents: bool
    max_tokens_per_doc: int


def embedding_request(input: Prompt, model: str | None, options: EmbeddingOptions) -> HTTPRequest:
    """Build ``POST /v1/embeddings``.

    Raises:
        InvalidArgumentError: JSON can't carry one of the values.
    """
    # A third of the bytes that the numbers would take as text.
    body = {"input": input, "encoding_format": "base64"}
    return _generation("/v1/embeddings", body, model, options, False)


def score_request(
    text_1: str | Sequence[str],
    text_2: str | Sequence[str],
    model: str | None,
    options: PoolingOptions,
) -> HTTPRequest:
    """Build ``POST /v1/score``.

    Raises:
        InvalidArgumentError: JSON can't carry one of the values.
    """
    body = {"text_1": text_1, "text_2": text_2}
    return _generation("/v1/score", body, model, options, False)


def rerank_request(
    query: str, documents: Sequence[str], model: str | None, options: RerankOptions
) -> HTTPRequest:
    """Build ``POST /v1/rerank``.

    Raises:
        InvalidArgumentError: JSON can't carry one of the values.
    """
    body = {"query": query, "documents": documents}
    return _generation("/v1/rerank", body, model, options, False)


def post_request(path: str, body: Mapping[str, Any], timeout: float | None) -> HTTPRequest:
    """Build a POST of any body to any route.

    Raises:
        InvalidArgumentError: JSON can't carry one of the values, or the path leads elsewhere or
            can't be sent.
    """
    # The HTTP library would take "//host/path" for another server, which would get the key.
    if not path.startswith("/") or path.startswith("//"):
        raise InvalidArgumentError(f"path {path!r} must start with one slash")
    if len(path) > _MAX_PATH_CHARS or not path.isprintable():
        raise InvalidArgumentError(
            f"path {path[:80]!r} must have no more than {_MAX_PATH_CHARS} characters, all printable"
        )
    return HTTPRequest("POST", path, _encode(dict(body)), timeout)


def _generation(
    path: str, body: dict[str, Any], model: str | None, options: Mapping[str, Any], stream: bool
) -> HTTPRequest:
    fields = dict(options)
    timeout = fields.pop("timeout", None)
    extra_body = fields.pop("extra_body", {})
    if model is not None:
        body["model"] = model
    body.update(fields)
    if stream:
        body["stream"] = True
        # Usage costs one chunk more, and without it a stream tells less than a whole answer.
        body["stream_options"] = {"include_usage": True}
    body.update(extra_body)
    return HTTPRequest("POST", path, _encode(body), timeout)


def _encode(body: dict[str, Any]) -> bytes:
    try:
        for name, value in body.items():
            # Encoded, these would be null: the server would take them for not given.
            _refuse_non_finite(name, value)
        return msgspec.json.encode(body)
    # In turn: a type that JSON has no word for, a lone surrogate, a value that holds itself.
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the request can't be written as JSON: {error}") from error


def _refuse_non_finite(name: str, value: Any) -> None:
    """Refuse infinity and NaN in `value`, however deep; `name` is for the message."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _refuse_non_finite(f"{name}.{key}", entry)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            # A prompt may be a million token ids: only what can hold a float is looked into.
            if isinstance(entry, float | Mapping | list | tuple):
                _refuse_non_finite(f"{name}[{index}]", entry)
