"""What each method of a client does, without doing any I/O.

A call is a generator: it yields the effects that it needs, gets their results
sent in, and returns the answer. `Client` carries effects out with blocking I/O
and `AsyncClient` with asyncio, so that retries, time-outs and errors are
written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from octavo_client.errors import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    InvalidResponseError,
    OctavoClientError,
    error_from_response,
)
from octavo_client.requests import HTTPRequest
from octavo_client.responses import Health, Model, ModelList
from octavo_client.retry import RetryPolicy, parse_retry_after

T = TypeVar("T")

HEALTH_TIMEOUT = 5.0  # seconds; a server that is loading still answers /health at once


@dataclass(frozen=True)
class Send:
    """Send a request; the result is its response.

    Attributes:
        stream: Return as soon as the headers are there. The body of an error is
            read all the same.
    """

    request: HTTPRequest
    stream: bool = False


@dataclass(frozen=True)
class Sleep:
    """Wait for some seconds; there is no result."""

    seconds: float


Effect = Send | Sleep
Call = Generator[Effect, Any, T]


def open_response(
    request: HTTPRequest, retry: RetryPolicy, *, stream: bool = False
) -> Call[httpx.Response]:
    """Send `request`, again if `retry` says so, and return a 2xx response.

    Raises:
        APIError: The server answered with another status.
        APIConnectionError: There was no answer.
    """
    num_retries = 0
    while True:
        try:
            response: httpx.Response = yield from _send(request, stream)
            if response.is_success:
                return response
            raise _status_error(response)
        except OctavoClientError as error:
            delay = retry.delay(num_retries, error)
            if delay is None:
                raise
        num_retries += 1
        yield Sleep(delay)


def fetch(request: HTTPRequest, retry: RetryPolicy, answer_type: type[T]) -> Call[T]:
    """Send `request` and return its answer, decoded.

    Raises:
        InvalidResponseError: The body is no `answer_type`.
    """
    response = yield from open_response(request, retry)
    return decode_answer(response.content, answer_type)


def list_models(retry: RetryPolicy) -> Call[list[Model]]:
    """Return the models that the server answers for."""
    models = yield from fetch(HTTPRequest("GET", "/v1/models"), retry, ModelList)
    return models.data


def check_health() -> Call[Health]:
    """Ask once whether the server is ready.

    Raises:
        APIError: ``/health`` answered with neither 200 nor 503.
        APIConnectionError: Nothing listens there.
    """
    request = HTTPRequest("GET", "/health", timeout=HEALTH_TIMEOUT)
    response: httpx.Response = yield from _send(request, stream=False)
    if response.is_success:
        return Health(ready=True, status=response.status_code)
    if response.status_code != 503:
        raise _status_error(response)
    return _loading_health(response.content)


class _Loading(msgspec.Struct):
    """What a server says of its start-up, if it says anything."""

    stage: str | None = None
    progress: float | None = None


def _loading_health(body: bytes) -> Health:
    """Read how far the start-up is, from whatever a 503 says."""
    try:
        loading = msgspec.json.decode(body, type=_Loading)
    except (msgspec.DecodeError, UnicodeDecodeError):
        loading = _Loading()
    return Health(ready=False, status=503, stage=loading.stage, progress=loading.progress)


def wait_until_ready(
    timeout: float, interval: float, on_progress: Callable[[Health], None] | None
) -> Call[Health]:
    """Ask until the server is ready. A server that can't be reached yet is waited for too.

    Args:
        timeout: Most seconds to wait.
        interval: Seconds between two questions.
        on_progress: Called with each answer; it may raise to end the waiting.

    Raises:
        APITimeoutError: The server was not ready in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        reason = "it is not ready"
        try:
            health = yield from check_health()
        except APIConnectionError as error:
            health, reason = Health(), str(error)
        if on_progress is not None:
            on_progress(health)
        if health.ready:
            return health
        if time.monotonic() >= deadline:
            raise APITimeoutError(
                f"the server was not ready within {timeout:g} s: {health.stage or reason}"
            )
        yield Sleep(interval)


def decode_answer(body: bytes, answer_type: type[T]) -> T:
    """Decode a JSON body.

    Raises:
        InvalidResponseError: The body is no `answer_type`.
    """
    try:
        return msgspec.json.decode(body, type=answer_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidResponseError(
            f"the server's answer is no {answer_type.__name__}: {error}"
        ) from error


def connection_error(error: httpx.RequestError) -> APIConnectionError:
    """Turn an error of httpx into ours."""
    connected = not isinstance(
        error,
        httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.UnsupportedProtocol,
    )
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        what = "no byte from the server" if connected else "no connection"
        return APITimeoutError(f"{what} within the time-out ({reason})", connected=connected)
    if connected:
        return APIConnectionError(f"the connection broke: {reason}")
    return APIConnectionError(f"the server can't be reached: {reason}", connected=False)


def _send(request: HTTPRequest, stream: bool) -> Call[httpx.Response]:
    try:
        response: httpx.Response = yield Send(request, stream)
    except httpx.RequestError as error:
        raise connection_error(error) from error
    return response


def _status_error(response: httpx.Response) -> APIError:
    return error_from_response(
        response.status_code,
        response.content,
        request_id=response.headers.get("x-request-id"),
        retry_after=parse_retry_after(response.headers.get("retry-after")),
    )
