"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import httpx

from octavo_client import calls
from octavo_client.calls import Call, Effect, Sleep
from octavo_client.connection import ClientSettings
from octavo_client.errors import ClosedError
from octavo_client.requests import (
    ChatOptions,
    CompletionOptions,
    EmbeddingOptions,
    HTTPRequest,
    Message,
    PoolingOptions,
    Prompt,
    RerankOptions,
    chat_request,
    completion_request,
    embedding_request,
    post_request,
    rerank_request,
    score_request,
)
from octavo_client.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Embeddings,
    Health,
    Model,
    Ranking,
    Scores,
)
from octavo_client.stream import Stream

T = TypeVar("T")


class Client:
    """Talks to one server. May be shared by threads.

    Args:
        base_url: Where the server listens; a ``/v1`` at the end makes no difference.
        api_key: Sent as a bearer token.
        timeout: Seconds without a byte from the server before a request fails.
        connect_timeout: Seconds until a connection must be there.
        max_retries: Most further tries, when no connection was made or the server
            refused with 429 or 503; see `RetryPolicy`. A stream that has begun is
            never repeated.

    Raises:
        InvalidArgumentError: `base_url` is no http or https URL, or another value can't work.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        connect_timeout: float = 5.0,
        max_retries: int = 2,
    ) -> None:
        self._settings = ClientSettings(base_url, api_key, timeout, connect_timeout, max_retries)
        self._http = httpx.Client(**self._settings.http_arguments())

    def complete(
        self, prompt: Prompt, *, model: str | None = None, **options: Unpack[CompletionOptions]
    ) -> Completion:
        """Continue `prompt` and return the whole answer.

        Args:
            model: Name of the model; None leaves it to the server.
            options: See `CompletionOptions` and `SamplingOptions`.

        Raises:
            APIError: The server refused or failed.
            APIConnectionError: There was no answer.
            InvalidArgumentError: JSON can't carry one of the values.
            ClosedError: The client was closed.
        """
        request = completion_request(prompt, model, options)
        return self._run(calls.fetch(request, self._settings.retry, Completion))

    def stream_complete(
        self, prompt: Prompt, *, model: str | None = None, **options: Unpack[CompletionOptions]
    ) -> Stream[Completion]:
        """Continue `prompt`, chunk by chunk. Arguments and errors as `complete`."""
        return self._stream(completion_request(prompt, model, options, stream=True), Completion)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion:
        """Answer the last of `messages` and return the whole answer.

        Args:
            messages: The conversation so far, oldest first.
            model: Name of the model; None leaves it to the server.
            options: See `ChatOptions` and `SamplingOptions`.

        Raises:
            APIError: The server refused or failed.
            APIConnectionError: There was no answer.
            InvalidArgumentError: JSON can't carry one of the values.
            ClosedError: The client was closed.
        """
        request = chat_request(messages, model, options)
        return self._run(calls.fetch(request, self._settings.retry, ChatCompletion))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream[ChatCompletionChunk]:
        """Answer the last of `messages`, chunk by chunk. Arguments and errors as `chat`."""
        return self._stream(
            chat_request(messages, model, options, stream=True), ChatCompletionChunk
        )

    def embeddings(
        self, input: Prompt, *, model: str | None = None, **options: Unpack[EmbeddingOptions]
    ) -> Embeddings:
        """Make a vector of each text.

        Args:
            input: A text or its token ids, or several of them.
            model: Name of the model; None leaves it to the server.
            options: See `EmbeddingOptions` and `PoolingOptions`.

        Raises:
            APIError: The server refused or failed.
            APIConnectionError: There was no answer.
            InvalidArgumentError: JSON can't carry one of the values.
            ClosedError: The client was closed.
        """
        request = embedding_request(input, model, options)
        return self._run(calls.fetch(request, self._settings.retry, Embeddings))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        model: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> Scores:
        """Say how well pairs of texts fit.

        Args:
            text_1: One text, or as many as there are in `text_2`.
            text_2: One text or several.
            model: Name of the model; None leaves it to the server.
            options: See `PoolingOptions`.

        Raises:
            APIError: The server refused or failed.
            APIConnectionError: There was no answer.
            InvalidArgumentError: JSON can't carry one of the values.
            ClosedError: The client was closed.
        """
        request = score_request(text_1, text_2, model, options)
        return self._run(calls.fetch(request, self._settings.retry, Scores))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Sort documents by how well they fit a query, the best first.

        Args:
            query: What is looked for.
            documents: Where it is looked for.
            model: Name of the model; None leaves it to the server.
            options: See `RerankOptions` and `PoolingOptions`.

        Raises:
            APIError: The server refused or failed.
            APIConnectionError: There was no answer.
            InvalidArgumentError: JSON can't carry one of the values.
            ClosedError: The client was closed.
        """
        request = rerank_request(query, documents, model, options)
        return self._run(calls.fetch(request, self._settings.retry, Ranking))

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = None) -> Any:
        """Send `body` to a route that has no method of its own, and return its JSON.

        Args:
            path: Below the server's root, for example ``/tokenize``.
            timeout: Seconds without a byte from the server, instead of the client's own.

        Raises:
            APIError: The server refused or failed.
            APIConnectionError: There was no answer.
            InvalidArgumentError: JSON can't carry one of the values, or `path` is none.
            ClosedError: The client was closed.
        """
        request = post_request(path, body, timeout)
        return self._run(calls.fetch(request, self._settings.retry, object))

    def models(self) -> list[Model]:
        """Return the models that the server answers for."""
        return self._run(calls.list_models(self._settings.retry))

    def health(self) -> Health:
        """Ask once whether the server is ready. See `calls.check_health`."""
        return self._run(calls.check_health())

    def wait_until_ready(
        self,
        timeout: float = 600.0,
        *,
        interval: float = 0.1,
        on_progress: Callable[[Health], None] | None = None,
    ) -> Health:
        """Return when the server is ready. See `calls.wait_until_ready`."""
        return self._run(calls.wait_until_ready(timeout, interval, on_progress))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stream(self, request: HTTPRequest, chunk_type: type[T]) -> Stream[T]:
        def open_response() -> httpx.Response:
            return self._run(calls.open_response(request, self._settings.retry, stream=True))

        return Stream(open_response, chunk_type)

    def _run(self, call: Call[T]) -> T:
        """Carry out the effects of `call` and return what it returns."""
        result: Any = None
        error: Exception | None = None
        try:
            while True:
                effect = call.send(result) if error is None else call.throw(error)
                result = error = None
                try:
                    result = self._perform(effect)
                except httpx.RequestError as raised:
                    error = raised
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _perform(self, effect: Effect) -> httpx.Response | None:
        if isinstance(effect, Sleep):
            time.sleep(effect.seconds)
            return None
        if self._http.is_closed:
            raise ClosedError("the client was closed")
        request = self._http.build_request(**self._settings.request_arguments(effect.request))
        response = self._http.send(request, stream=effect.stream)
        if not response.is_success:
            response.read()
        return response
