"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI

from octavo_server import __version__
from octavo_server.api import chat_completions, completions, health, models, tokenize
from octavo_server.api.context import ServerContext
from octavo_server.api.errors import install_error_handlers
from octavo_server.api.gate import AvailabilityGate
from octavo_server.api.request_id import RequestIdEcho


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
    for module in (health, models, completions, chat_completions, tokenize):
        app.include_router(module.router)
    install_error_handlers(app)
    app.add_middleware(AvailabilityGate, context=context)
    app.add_middleware(RequestIdEcho)
    return app
