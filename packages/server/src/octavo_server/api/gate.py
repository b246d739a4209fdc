"""Turns requests away while the server loads, drains or has lost its engine.

And those for another kind of model than it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.api.context import ServerContext
from octavo_server.api.errors import SERVICE_UNAVAILABLE, ApiError
from octavo_server.engine_handle import EngineState

# These answer in every state: they are how one finds out about it.
ALWAYS_OPEN = frozenset(
    {"/health", "/load", "/metrics", "/openapi.json", "/ping", "/ready", "/version"}
)
# These answer while the server sleeps, too: how else would it wake up?
OPEN_WHILE_ASLEEP = frozenset(
    {"/abort_requests", "/is_sleeping", "/reset_prefix_cache", "/sleep", "/v1/models", "/wake_up"}
)

_RETRY_AFTER_SECONDS = 5

Result = TypeVar("Result")


class AvailabilityGate:
    """ASGI middleware that answers 503 for everything that needs a ready engine, and counts it."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http" or scope["path"] in ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        reason = _why_closed(self._context, path) or _why_wrong(self._context, path)
        if reason is not None:
            await reason.response(path)(scope, receive, send)
            return
        self._context.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._context.num_open -= 1


def _why_closed(context: ServerContext, path: str) -> ApiError | None:
    client = context.client
    if client.state is EngineState.DEAD:
        return _unavailable(f"the engine has ended: {client.stage}", "engine_dead")
    if context.draining:
        return _shutting_down()
    if context.sleeping:
        if path in OPEN_WHILE_ASLEEP:
            return None
        return _unavailable("the server sleeps; POST /wake_up wakes it", "sleeping")
    if client.state is EngineState.RESTARTING:
        return _unavailable(
            f"the engine has crashed and another one is starting ({client.stage}); see /health",
            "engine_restarting",
        )
    if client.state is EngineState.STARTING or context.model is None:
        return _unavailable(
            f"the model is still loading ({client.stage}); see /health", "model_loading"
        )
    return None


def _why_wrong(context: ServerContext, path: str) -> ApiError | None:
    """Refuse what another kind of model would answer."""
    assert context.model is not None, "the gate is closed without a model"
    message = context.model.refused_apis.get(path)
    return None if message is None else ApiError(400, message, code="unsupported_api")


async def unless_draining(context: ServerContext, work: Awaitable[Result]) -> Result:
    """Await `work`, but no longer than new requests are taken.

    Raises:
        ApiError: 503, the server is shutting down.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(context.drain.wait())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _shutting_down()
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()


def _shutting_down() -> ApiError:
    return _unavailable("the server is shutting down", "shutting_down")


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, SERVICE_UNAVAILABLE, code=code, retry_after=_RETRY_AFTER_SECONDS)
