"""``GET /metrics`` and ``GET /load``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.answers import LoadAnswer
from octavo_server.api.context import context_of
from octavo_server.api.errors import json_response
from octavo_server.api.openapi import documented

router = APIRouter()


@router.get("/metrics", **documented(media_type="text/plain"))
async def metrics(request: Request) -> Response:
    """Answer the metrics in Prometheus' text format."""
    from octavo_server.metrics_export import CONTENT_TYPE

    context = context_of(request)
    totals = await context.fronts.totals()
    # 10 ms, for which no stream should have to wait.
    page = await asyncio.to_thread(context.exporter().render, totals)
    return Response(page, media_type=CONTENT_TYPE)


@router.get("/load", **documented(answer=LoadAnswer))
async def load(request: Request) -> Response:
    """Answer how many requests are being served."""
    return json_response({"server_load": sum(await context_of(request).fronts.call("num_open"))})
