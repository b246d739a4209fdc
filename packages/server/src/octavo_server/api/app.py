"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from octavo_server import __version__
from octavo_server.api import (
    anthropic_messages,
    chat_completions,
    classify,
    completions,
    embeddings,
    health,
    metrics_route,
    models,
    openapi,
    operator,
    pooling,
    rerank,
    responses,
    score,
    tokenize,
)
from octavo_server.api.auth import KeyCheck
from octavo_server.api.context import ServerContext
from octavo_server.api.cors import allow_origins
from octavo_server.api.errors import install_error_handlers
from octavo_server.api.gate import AvailabilityGate
from octavo_server.api.header_limit import HeaderLimit
from octavo_server.api.request_id import RequestIdEcho
from octavo_server.api.request_log import RequestLog
from octavo_server.api.trace_context import TraceContext
from octavo_server.keys import KeyRing
from octavo_server.logging_setup import access_logger


def create_app(context: ServerContext) -> FastAPI:
    """Build the application around `context`, which may still be loading."""
    # Without a redirect for a trailing slash, a wrong path is a 404 for POST as well.
    app = FastAPI(
        title="Octavo",
        version=__version__,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    for module in (
        *(health, metrics_route, openapi, models),
        *(completions, chat_completions, responses, anthropic_messages, tokenize),
        *(embeddings, pooling, classify, score, rerank),
    ):
        app.include_router(module.router)
    is_open = context.config.access.enable_operator_routes
    app.include_router(operator.router if is_open else operator.closed_router)
    install_error_handlers(app)
    app.add_middleware(AvailabilityGate, context=context)
    return app


def guard_app(app: ASGIApp, context: ServerContext, keys: KeyRing | None) -> ASGIApp:
    """Put around the application what concerns each request, whatever its path.

    This is not FastAPI's own middleware: its handler of unexpected errors stands around that,
    and its answers would have no CORS headers.

    Args:
        keys: What a request needs one of, or None if anybody may call.
    """
    if keys is not None:
        app = KeyCheck(app, keys)
    if context.client.metrics.tracer is not None:
        app = TraceContext(app)
    app = HeaderLimit(app, context.config.limits.max_request_headers)
    app = RequestIdEcho(app)
    app = allow_origins(app, context.config.access)
    log = access_logger() if context.config.observability.access_log else None
    return RequestLog(app, context.http, log)
