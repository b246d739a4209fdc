"""The asyncio client."""

from __future__ import annotations

import asyncio
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
from octavo_client.stream import AsyncStream

T = TypeVar("T")


class AsyncClient:
    """Talks to one server from one event loop. Arguments as `Client`."""

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
        self._http = httpx.AsyncClient(**self._settings.http_arguments())

    async def complete(
        self, prompt: Prompt, *, model: str | None = None, **options: Unpack[CompletionOptions]
    ) -> Completion:
        """Continue `prompt` and return the whole answer. See `Client.complete`."""
        request = completion_request(prompt, model, options)
        return await self._run(calls.fetch(request, self._settings.retry, Completion))

    def stream_complete(
        self, prompt: Prompt, *, model: str | None = None, **options: Unpack[CompletionOptions]
    ) -> AsyncStream[Completion]:
        """Continue `prompt`, chunk by chunk. See `Client.complete`."""
        return self._stream(completion_request(prompt, model, options, stream=True), Completion)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion:
        """Answer the last of `messages` and return the whole answer. See `Client.chat`."""
        request = chat_request(messages, model, options)
        return await self._run(calls.fetch(request, self._settings.retry, ChatCompletion))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream[ChatCompletionChunk]:
        """Answer the last of `messages`, chunk by chunk. See `Client.chat`."""
        return self._stream(
            chat_request(messages, model, options, stream=True), ChatCompletionChunk
        )

    async def embeddings(
        self, input: Prompt, *, model: str | None = None, **options: Unpack[EmbeddingOptions]
    ) -> Embeddings:
        """Make a vector of each text. See `Client`."""
        request = embedding_request(input, model, options)
        return await self._run(calls.fetch(request, self._settings.retry, Embeddings))

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        model: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> Scores:
        """Say how well pairs of texts fit. See `Client`."""
        request = score_request(text_1, text_2, model, options)
        return await self._run(calls.fetch(request, self._settings.retry, Scores))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Sort documents by how well they fit a query, the best first. See `Client`."""
        request = rerank_request(query, documents, model, options)
        return await self._run(calls.fetch(request, self._settings.retry, Ranking))

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout: float | None = None
    ) -> Any:
        """Send `body` to a route that has no method of its own. See `Client.post`."""
        request = post_request(path, body, timeout)
        return await self._run(calls.fetch(request, self._settings.retry, object))

    async def models(self) -> list[Model]:
        """Return the models that the server answers for."""
        return await self._run(calls.list_models(self._settings.retry))

    async def health(self) -> Health:
        """Ask once whether the server is ready. See `calls.check_health`."""
        return await self._run(calls.check_health())

    async def wait_until_ready(
        self,
        timeout: float = 600.0,
        *,
        interval: float = 0.1,
        on_progress: Callable[[Health], None] | None = None,
    ) -> Health:
        """Return when the server is ready. See `calls.wait_until_ready`."""
        return await self._run(calls.wait_until_ready(timeout, interval, on_progress))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _stream(self, request: HTTPRequest, chunk_type: type[T]) -> AsyncStream[T]:
        async def open_response() -> httpx.Response:
            return await self._run(calls.open_response(request, self._settings.retry, stream=True))

        return AsyncStream(open_response, chunk_type)

    async def _run(self, call: Call[T]) -> T:
        """Carry out the effects of `call` and return what it returns."""
        result: Any = None
        error: Exception | None = None
        try:
            while True:
                effect = call.send(result) if error is None else call.throw(error)
                result = error = None
                try:
                    result = await self._perform(effect)
                except httpx.RequestError as raised:
                    error = raised
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _perform(self, effect: Effect) -> httpx.Response | None:
        if isinstance(effect, Sleep):
            await asyncio.sleep(effect.seconds)
            return None
        if self._http.is_closed:
            raise ClosedError("the client was closed")
        request = self._http.build_request(**self._settings.request_arguments(effect.request))
        response = await self._http.send(request, stream=effect.stream)
        if not response.is_success:
            await response.aread()
        return response
