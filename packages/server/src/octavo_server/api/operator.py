"""Routes that act on the whole server, behind ``--enable-operator-routes``."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo_core.errors import InvalidRequestError
from octavo_server.api.body import parse_body
from octavo_server.api.context import ServerContext, context_of
from octavo_server.api.errors import SERVER_ERROR, ApiError, json_response
from octavo_server.api.gate import unless_draining
from octavo_server.api.openapi import documented, query_parameter
from octavo_server.api.protocol import (
    Name,
    StrictModel,
)

router = APIRouter(tags=["operator"])

SLEEP_LEVELS = (0, 1, 2)
SLEEP_MODES = ("abort", "wait")
WAKE_UP_TAGS = ("weights", "kv_cache")
MAX_REQUEST_IDS = 65536

_POLL_SECONDS = 0.02


class AbortRequestsRequest(StrictModel):
    """Body of ``POST /abort_requests``."""

    request_ids: Annotated[list[Name], Field(max_length=MAX_REQUEST_IDS)] | None = None


@router.post("/reset_prefix_cache", **documented())
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached KV blocks; answers that run go on."""
    context = _operated(request)
    await context.client.call("reset_prefix_cache")
    return json_response({"status": "ok"})


@router.post("/abort_requests", **documented(body=AbortRequestsRequest, body_required=False))
async def abort_requests(request: Request) -> Response:
    """End the answers with the given ids, or all, with the finish reason ``abort``."""
    context = _operated(request)
    has_body = request.headers.get("content-length", "0") != "0"
    if has_body or "transfer-encoding" in request.headers:
        body = await parse_body(request, AbortRequestsRequest)
    else:
        body = AbortRequestsRequest()
    aborted = await context.fronts.call("abort_requests", body.request_ids)
    return json_response({"aborted": [name for names in aborted for name in names]})


@router.post(
    "/sleep",
    **documented(
        parameters=[
            query_parameter("level", {"type": "integer", "enum": list(SLEEP_LEVELS)}),
            query_parameter("mode", {"type": "string", "enum": list(SLEEP_MODES)}),
        ]
    ),
)
async def sleep(request: Request) -> Response:
    """Take no new requests, end or await those that run, and free what they have cached.

    From level 1 on the engine's process ends, and with it weights and KV cache are gone.
    """
    context = _operated(request)
    level, mode = _sleep_options(request)
    await context.fronts.call("set_sleep_level", level)
    if mode == "abort":
        await context.fronts.call("abort_requests", None)
    while any(await context.fronts.call("num_in_flight")) and context.sleeping:
        await asyncio.sleep(_POLL_SECONDS)
    if context.sleeping:
        await context.client.call("sleep" if level else "reset_prefix_cache")
    return json_response({"is_sleeping": context.sleeping})


@router.post(
    "/wake_up",
    **documented(
        parameters=[
            query_parameter(
                "tags",
                {
                    "type": "array",
                    "items": {"type": "string", "enum": list(WAKE_UP_TAGS)},
                    "maxItems": 2,
                },
            )
        ]
    ),
)
async def wake_up(request: Request) -> Response:
    """Load what a sleep has freed, and take requests again."""
    context = _operated(request)
    _check_tags(request)
    # A model may take minutes to load.
    await unless_draining(context, context.client.call("wake_up"))
    await context.fronts.call("set_sleep_level", None)
    return json_response({"is_sleeping": False})


@router.get("/is_sleeping", **documented())
async def is_sleeping(request: Request) -> Response:
    """Answer whether the server was put to sleep."""
    return json_response({"is_sleeping": context_of(request).sleeping})


@router.post("/v1/load_lora_adapter", **documented())
@router.post("/v1/unload_lora_adapter", **documented())
async def change_adapters(request: Request) -> Response:
    """Answer 501: there are no adapters yet."""
    _operated(request)
    raise ApiError(501, "LoRA adapters are not supported yet", SERVER_ERROR, code="not_supported")


async def answer_closed(request: Request) -> Response:
    """Answer 404, with the flag that opens the route."""
    raise ApiError(
        404,
        f"there is no route {request.method} {request.url.path} unless the server is started with "
        f"--enable-operator-routes",
    )


closed_router = APIRouter()
for path in sorted({route.path for route in router.routes if isinstance(route, APIRoute)}):
    closed_router.add_api_route(
        path, answer_closed, methods=["GET", "POST"], include_in_schema=False
    )


def _operated(request: Request) -> ServerContext:
    """Return the context, unless a web page is behind the request.

    A page can send a POST without a body to a server on its reader's machine without asking,
    but not without saying where it comes from.

    Raises:
        ApiError: 403, the page's origin is none of ``--allowed-origins``.
    """
    context = context_of(request)
    origin = request.headers.get("origin")
    allowed = context.config.access.allowed_origins
    if origin is not None and origin not in allowed and "*" not in allowed:
        raise ApiError(
            403,
            "this route is not for web pages; --allowed-origins can make an exception",
            code="origin_not_allowed",
        )
    return context


def _sleep_options(request: Request) -> tuple[int, str]:
    """Read ``level`` and ``mode`` of the query; the defaults are vLLM's."""
    level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
    levels = {str(level): level for level in SLEEP_LEVELS}
    if level not in levels:
        raise InvalidRequestError(f"level is {level[:20]!r}; it must be 0, 1 or 2", field="level")
    if mode not in SLEEP_MODES:
        raise InvalidRequestError(f"mode is {mode[:20]!r}; it must be abort or wait", field="mode")
    return levels[level], mode


def _check_tags(request: Request) -> None:
    """Refuse to bring back a part of what vLLM's ``tags`` name."""
    tags = set(request.query_params.getlist("tags"))
    if tags and tags != set(WAKE_UP_TAGS):
        raise InvalidRequestError(
            f"tags is {', '.join(sorted(tags))[:40]!r}; weights and kv_cache come back together, "
            f"so leave it out or name both",
            field="tags",
        )
