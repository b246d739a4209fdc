"""Calls an ASGI application without a socket, with paths and headers that no client would send."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from octavo_core.config import EngineConfig
from octavo_core.wire import SchedulerStats
from octavo_server.api.app import create_app, guard_app
from octavo_server.api.context import ServerContext
from octavo_server.engine_handle import EngineState
from octavo_server.keys import make_key_ring
from octavo_server.metrics import ServingMetrics


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


def loading_context(config: EngineConfig) -> ServerContext:
    """A server whose engine is still starting: all that needs it is a 503."""
    client: Any = SimpleNamespace(
        engine=None,
        state=EngineState.STARTING,
        stage="loading",
        progress=None,
        stats=SchedulerStats(),
        metrics=ServingMetrics(),
        limits=None,
        num_restarts=0,
    )
    return ServerContext(client, config)


def guarded_app(config: EngineConfig) -> Any:
    """The whole application of a server that is still loading."""
    context = loading_context(config)
    return guard_app(create_app(context), context, make_key_ring(config.access))


def routes_of(app: Any) -> list[Any]:
    """Every route of the application, those of its included routers too."""
    found = []
    for route in app.routes:
        router = getattr(route, "original_router", None)
        found += routes_of(router) if router is not None else [route]
    return found


def call(
    app: Any,
    method: str = "GET",
    target: str = "/",
    headers: list[tuple[str, str]] | None = None,
    *,
    kind: str = "http",
) -> Answer:
    """Send one request without a body; `target` is what stands in the request's first line."""
    raw_path, _, query = target.partition("?")
    scope = {
        "type": kind,
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "root_path": "",
        "path": unquote(raw_path),
        "raw_path": raw_path.encode(),
        "query_string": query.encode(),
        "headers": [
            (name.lower().encode(), value.encode("latin-1")) for name, value in headers or []
        ],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 8000),
    }
    answer = Answer()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message["type"] == "http.response.body":
            answer.body += message.get("body", b"")
        else:
            answer.status = message["code"]

    asyncio.run(app(scope, receive, send))
    return answer
