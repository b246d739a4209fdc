"""``POST /score``: how well texts fit each other, in vLLM's shape."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.body import parse_body
from octavo_server.api.context import context_of
from octavo_server.api.generation import new_request_id
from octavo_server.api.openapi import documented
from octavo_server.api.pooling_answers import ScoreAnswer
from octavo_server.api.pooling_protocol import ScoreRequest
from octavo_server.api.pooling_run import PooledTexts, answer_head, answer_pooled
from octavo_server.scored_pairs import prepare_pairs

router = APIRouter()


@router.post("/score", **documented(body=ScoreRequest, answer=ScoreAnswer))
@router.post("/v1/score", **documented(body=ScoreRequest, answer=ScoreAnswer))
async def score(request: Request) -> Response:
    """Score pairs of texts."""
    body = await parse_body(request, ScoreRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    request_id = new_request_id("score")
    first, second = body.sides()
    pairs = await asyncio.to_thread(
        prepare_pairs,
        model.pooling_processor(),
        request_id,
        first,
        second,
        body.options(),
        body.names(),
    )

    def write(pooled: PooledTexts) -> dict[str, Any]:
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(pairs.scores(pooled.outputs))
        ]
        return {**answer_head(request_id, model), "data": data, "usage": pooled.usage()}

    return await answer_pooled(request, request_id, pairs.requests, write)
