"""Lets web pages of other origins call, if the operator says which."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo_core.config import AccessConfig
from octavo_server.api.errors import ApiError

# What a page may read beside the answer itself.
EXPOSED_HEADERS = (
    *("Retry-After", "X-Request-Id", "Server-Timing"),
    *("X-Octavo-Preemptions", "X-Octavo-Cached-Tokens"),
)
_PREFLIGHT_SECONDS = 600


class _Origins(CORSMiddleware):
    """Starlette's, whose refusals are words alone, and here are errors like others."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer whether a page may send what it is about to send."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        words = bytes(answer.body).decode().removeprefix("Disallowed CORS ")
        error = ApiError(
            answer.status_code,
            f"the page's {words} is not allowed; see --allowed-origins, --allowed-methods and "
            f"--allowed-headers",
            code="origin_not_allowed",
        ).response()
        kept = {
            name: value
            for name, value in answer.headers.items()
            if name.startswith("access-control-") or name == "vary"
        }
        error.headers.update(kept)
        return error


def allow_origins(app: ASGIApp, access: AccessConfig) -> ASGIApp:
    """Return `app` with CORS headers on every answer, errors included, or as it is.

    It has to stand around the check of keys: browsers send their preflight without one.
    """
    if not access.allowed_origins:
        return app
    return _Origins(
        app,
        allow_origins=access.allowed_origins,
        allow_methods=access.allowed_methods,
        allow_headers=access.allowed_headers,
        allow_credentials=access.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
        max_age=_PREFLIGHT_SECONDS,
    )
