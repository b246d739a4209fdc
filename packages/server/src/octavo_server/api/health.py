"""``/health`` and its likes: is the server up, loading or lost?"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server import __version__
from octavo_server.api.answers import HealthAnswer, VersionAnswer
from octavo_server.api.context import ServerContext, context_of
from octavo_server.api.errors import json_response
from octavo_server.api.openapi import documented
from octavo_server.engine_group import EngineGroup
from octavo_server.engine_handle import EngineState
from octavo_server.engine_keeper import EngineKeeper

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"], **documented(answer=HealthAnswer))
@router.api_route("/ready", methods=["GET", "HEAD"], **documented(answer=HealthAnswer))
@router.api_route("/ping", methods=["GET", "HEAD", "POST"], **documented(answer=HealthAnswer))
async def health(request: Request) -> Response:
    """Answer 200 if requests are served; else 503 with the start-up stage and progress.

    A server that sleeps is well, but not ready.
    """
    context = context_of(request)
    status = _status(context)
    content: dict[str, Any] = {
        "status": status,
        "stage": context.client.stage,
        "progress": context.client.progress,
    }
    if isinstance(context.client.engine, EngineGroup):
        content["engines"] = [_engine(keeper) for keeper in context.client.engine.keepers]
    is_well = status == "ok" or (status == "sleeping" and request.url.path != "/ready")
    return json_response(content, 200 if is_well else 503)


@router.get("/version", **documented(answer=VersionAnswer))
async def version() -> Response:
    """Answer the version of Octavo."""
    return json_response({"version": __version__})


def _engine(keeper: EngineKeeper) -> dict[str, Any]:
    return {
        "state": keeper.state.value,
        "stage": keeper.stage,
        "num_in_flight": keeper.num_in_flight,
        "num_restarts": keeper.num_restarts,
        "kv_cache_usage": keeper.stats.kv_cache_usage,
    }


def _status(context: ServerContext) -> str:
    if context.client.state is EngineState.DEAD:
        return "dead"
    if context.draining:
        return "shutting_down"
    if context.sleeping:
        return "sleeping"
    if context.client.state is EngineState.RESTARTING:
        return "restarting"
    if context.client.state is EngineState.STARTING or context.model is None:
        return "loading"
    return "ok"
