"""The errors that a client raises.

OctavoClientError
├── APIError                    the server answered with an error
│   ├── BadRequestError         the request can't be served as it stands   (400, 413, 422)
│   ├── AuthenticationError     the key is missing or refused              (401, 403)
│   ├── NotFoundError           no such model or route                     (404)
│   ├── RateLimitError          too much waits on the server already       (429)
│   └── ServerError             the server's own fault, or not ready yet   (5xx)
├── APIConnectionError          no connection, or it broke before the answer was whole
│   └── APITimeoutError         nothing came within the time allowed
├── StreamError                 an error event inside a stream that had begun well
├── InvalidResponseError        an answer that does not follow the protocol
├── InvalidArgumentError        a value that can't be sent or can't work; also a ValueError
└── ClosedError                 the client was closed, or the stream was read already
"""

from __future__ import annotations

from typing import Any

import msgspec


class OctavoClientError(Exception):
    """Base of every error that a client raises on purpose."""


class APIError(OctavoClientError):
    """The server answered with an error status.

    Attributes:
        status: HTTP status.
        message: What the server says, for a person.
        code: Machine-readable word or number, if the server gave one.
        param: Name of the request field at fault, if the server named it.
        request_id: The answer's ``X-Request-Id``, to find the request in the server's log.
        retry_after: Seconds after which the server asks to be tried again, if it said so.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | int | None = None,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        self.retry_after = retry_after


class BadRequestError(APIError):
    """The request can't be served as it stands (HTTP 400, 413, 422)."""


class AuthenticationError(APIError):
    """The API key is missing or refused (HTTP 401, 403)."""


class NotFoundError(APIError):
    """The server has no such model or route (HTTP 404)."""


class RateLimitError(APIError):
    """Too much waits on the server already (HTTP 429)."""


class ServerError(APIError):
    """The server failed, or is not ready yet (HTTP 5xx)."""


class APIConnectionError(OctavoClientError):
    """There was no connection, or it broke before the answer was whole.

    Attributes:
        connected: Whether there was a connection, so that the server may have begun.
    """

    def __init__(self, message: str, *, connected: bool = True) -> None:
        super().__init__(message)
        self.connected = connected


class APITimeoutError(APIConnectionError):
    """Nothing came from the server within the time allowed."""


class StreamError(OctavoClientError):
    """The server reported an error inside a stream that had begun well.

    Attributes:
        message: What the server says, for a person.
        code: Machine-readable word or number, if the server gave one.
        param: Name of the request field at fault, if the server named it.
    """

    def __init__(
        self, message: str, *, code: str | int | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidResponseError(OctavoClientError):
    """The server's answer does not follow the protocol."""


class InvalidArgumentError(OctavoClientError, ValueError):
    """A value can't be sent or can't work. Nothing was sent."""


class ClosedError(OctavoClientError):
    """The client was closed, or the stream was read or closed already."""


_BY_STATUS: dict[int, type[APIError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    413: BadRequestError,
    422: BadRequestError,
    429: RateLimitError,
}


def error_from_response(
    status: int, body: bytes, *, request_id: str | None = None, retry_after: float | None = None
) -> APIError:
    """Make the error for an answer whose status is not 2xx.

    Args:
        body: The answer's body; any shape will do, OpenAI's is read best.
    """
    detail = read_error(body)
    kind = _BY_STATUS.get(status) or (ServerError if status >= 500 else APIError)
    return kind(
        detail.message or "the server gave no reason",
        status=status,
        code=detail.code,
        param=detail.param,
        request_id=request_id,
        retry_after=retry_after,
    )


class ErrorDetail(msgspec.Struct, frozen=True):
    """The fields of OpenAI's error object that we keep."""

    message: str = ""
    code: str | int | None = None
    param: str | None = None


def read_error(body: bytes) -> ErrorDetail:
    """Read ``{"error": {...}}``, ``{"error": "text"}``, ``{"detail": "text"}`` or plain text."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A proxy's HTML page can be long; its start says enough.
        return ErrorDetail(message=body[:500].decode("utf-8", "replace").strip())
    if isinstance(value, dict):
        value = value.get("error") or value.get("detail") or value.get("message") or value
    if not isinstance(value, dict):
        return ErrorDetail(message=value if isinstance(value, str) else str(value)[:500])
    message, code, param = value.get("message"), value.get("code"), value.get("param")
    return ErrorDetail(
        message=message if isinstance(message, str) else str(value)[:500],
        code=code if isinstance(code, str | int) else None,
        param=param if isinstance(param, str) else None,
    )
