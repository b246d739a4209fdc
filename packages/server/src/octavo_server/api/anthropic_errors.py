"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Any, Protocol

PATH_PREFIX = "/v1/messages"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class HttpError(Protocol):
    """What there is to tell of an error."""

    status: int
    message: str


def anthropic_error(error: HttpError) -> dict[str, Any]:
    """Return an error as it is sent, in a response or in a stream."""
    kind = _TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def is_anthropic_path(path: str) -> bool:
    """True for routes of Anthropic's API."""
    return path == PATH_PREFIX or path.startswith(PATH_PREFIX + "/")
