"""Lets web pages of other origins call, if the operator says which."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from octavo_core.config import AccessConfig

# What a page may read beside the answer itself.
EXPOSED_HEADERS = (
    *("Retry-After", "X-Request-Id", "Server-Timing"),
    *("X-Octavo-Preemptions", "X-Octavo-Cached-Tokens"),
)
_PREFLIGHT_SECONDS = 600


def allow_origins(app: ASGIApp, access: AccessConfig) -> ASGIApp:
    """Return `app` with CORS headers on every answer, errors included, or as it is.

    It has to stand around the check of keys: browsers send their preflight without one.
    """
    if not access.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=access.allowed_origins,
        allow_methods=access.allowed_methods,
        allow_headers=access.allowed_headers,
        allow_credentials=access.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
        max_age=_PREFLIGHT_SECONDS,
    )
