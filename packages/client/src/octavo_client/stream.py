"""Answers that come in chunks.

    with client.stream_chat(messages) as stream:
        for chunk in stream:
            print(chunk.text, end="")

Leaving the block, or the loop, closes the connection; the server then stops
computing the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx
import msgspec

from octavo_client.calls import connection_error
from octavo_client.errors import ClosedError, InvalidResponseError, StreamError, read_error
from octavo_client.sse import SSEParser

T = TypeVar("T")

_DONE = "[DONE]"


class ChunkDecoder(Generic[T]):
    """Turns the bytes of a stream into chunks.

    Attributes:
        done: Whether the server has said that the answer is whole.
    """

    def __init__(self, chunk_type: type[T]) -> None:
        self.done = False
        self._parser = SSEParser()
        self._decoder = msgspec.json.Decoder(_ChunkOrError)
        self._chunk_decoder = msgspec.json.Decoder(chunk_type)

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the chunks that `data` completes.

        Raises:
            StreamError: The server reported an error.
            InvalidResponseError: An event is no chunk.
        """
        for event in self._parser.feed(data):
            if event.data == _DONE:
                self.done = True
                return
            yield self._decode(event.data)

    def finish(self) -> None:
        """Tell that no bytes follow.

        Raises:
            StreamError: The answer is not whole.
        """
        if not self.done:
            raise StreamError("the server ended the stream before the answer was whole")

    def _decode(self, data: str) -> T:
        try:
            if self._decoder.decode(data).error is not None:
                detail = read_error(data.encode())
                raise StreamError(detail.message, code=detail.code, param=detail.param)
            return self._chunk_decoder.decode(data)
        except msgspec.DecodeError as error:
            raise InvalidResponseError(f"an event of the stream is no chunk: {error}") from error


class _ChunkOrError(msgspec.Struct):
    """Enough of an event to tell an error from a chunk."""

    error: Any = None


class Stream(Generic[T]):
    """Chunks of one answer, to be read once.

    The request is sent by ``with``, or by the loop if there is none.
    """

    def __init__(self, open_response: Callable[[], httpx.Response], chunk_type: type[T]) -> None:
        self._open_response = open_response
        self._decoder = ChunkDecoder(chunk_type)
        self._response: httpx.Response | None = None

    def __enter__(self) -> Self:
        if self._response is None:
            self._response = self._open_response()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        with self as stream:
            assert stream._response is not None
            try:
                for data in stream._response.iter_bytes():
                    yield from stream._decoder.feed(data)
                    if stream._decoder.done:
                        return
            except httpx.RequestError as error:
                raise connection_error(error) from error
            except httpx.StreamError as error:
                raise ClosedError("the stream was read or closed already") from error
            stream._decoder.finish()

    def close(self) -> None:
        """Close the connection; if the answer is not whole, the server drops it."""
        if self._response is not None:
            self._response.close()


class AsyncStream(Generic[T]):
    """Chunks of one answer, to be read once, for ``async with`` and ``async for``."""

    def __init__(
        self, open_response: Callable[[], Awaitable[httpx.Response]], chunk_type: type[T]
    ) -> None:
        self._open_response = open_response
        self._decoder = ChunkDecoder(chunk_type)
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> Self:
        if self._response is None:
            self._response = await self._open_response()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[T]:
        async with self as stream:
            assert stream._response is not None
            try:
                async for data in stream._response.aiter_bytes():
                    for chunk in stream._decoder.feed(data):
                        yield chunk
                    if stream._decoder.done:
                        return
            except httpx.RequestError as error:
                raise connection_error(error) from error
            except httpx.StreamError as error:
                raise ClosedError("the stream was read or closed already") from error
            stream._decoder.finish()

    async def close(self) -> None:
        """Close the connection; if the answer is not whole, the server drops it."""
        if self._response is not None:
            await self._response.aclose()
