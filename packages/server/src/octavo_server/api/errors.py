"""Every error leaves as ``{"error": {"message", "type", "param", "code"}}``.

Those of Anthropic's API leave in its own shape.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo_core.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    QueueFullError,
    RequestFailedError,
)
from octavo_server.api.anthropic_errors import anthropic_error, is_anthropic_path

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"
SERVICE_UNAVAILABLE = "service_unavailable_error"

# Not a registered status. Nobody reads it: the client has gone.
_CLIENT_CLOSED_REQUEST = 499


class ApiError(Exception):
    """An error with its HTTP status.

    Args:
        status: HTTP status.
        message: For a person to read.
        type: OpenAI's class of error.
        param: Field of the request at fault.
        code: Machine-readable word.
        retry_after: Seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID_REQUEST,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return the error as it is sent, in a response or in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str = "") -> Response:
        """Return the whole response, in the shape of the API that `path` belongs to."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        body = anthropic_error(self) if is_anthropic_path(path) else self.body()
        return json_response(body, self.status, headers)


def to_api_error(error: Exception) -> ApiError:
    """Find the status for an error that a handler or a stream raised."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, error.message, param=error.field, code=error.code)
        case QueueFullError():
            return ApiError(429, error.message, RATE_LIMIT, code="queue_full", retry_after=1)
        case EngineDeadError():
            message = str(error)
            return ApiError(503, message, SERVICE_UNAVAILABLE, code="engine_dead", retry_after=5)
        case DeadlineExceededError():
            return ApiError(504, str(error), SERVER_ERROR, code="deadline_exceeded")
        case RequestFailedError():
            return ApiError(500, str(error), SERVER_ERROR)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), code=None)
        case _:
            logger.error("A request failed", exc_info=error)
            return ApiError(500, "the server failed; its log has the cause", SERVER_ERROR)


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Encode `content` with msgspec, which is several times quicker than ``json``."""
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` leave in OpenAI's shape."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        api_error = to_api_error(error)
        if isinstance(error, HTTPException):
            api_error.message = _route_message(request, error)
            response = api_error.response(request.url.path)
            response.headers.update(error.headers or {})
            return response
        return api_error.response(request.url.path)

    app.add_exception_handler(HTTPException, handle)
    app.add_exception_handler(ApiError, handle)
    # `Exception` alone would let Starlette raise the error again after it was answered.
    for error_type in (OctavoError, ClientDisconnect):
        app.add_exception_handler(error_type, handle)
    app.add_exception_handler(Exception, handle)


def _route_message(request: Request, error: HTTPException) -> str:
    path = request.url.path
    if error.status_code == 404:
        return f"there is no route {request.method} {path}"
    if error.status_code == 405:
        return f"{path} does not take {request.method}"
    return str(error.detail)
