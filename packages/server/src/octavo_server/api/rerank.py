"""``POST /rerank``: documents in the order in which they fit a query, as with Jina and Cohere."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.body import parse_body
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.generation import new_request_id
from octavo_server.api.openapi import documented
from octavo_server.api.pooling_answers import RerankAnswer
from octavo_server.api.pooling_protocol import RerankRequest
from octavo_server.api.pooling_run import PooledTexts, answer_pooled
from octavo_server.scored_pairs import ScoredPairs, prepare_pairs

router = APIRouter()


@router.post("/rerank", **documented(body=RerankRequest, answer=RerankAnswer))
@router.post("/v1/rerank", **documented(body=RerankRequest, answer=RerankAnswer))
@router.post("/v2/rerank", **documented(body=RerankRequest, answer=RerankAnswer))
async def rerank(request: Request) -> Response:
    """Sort documents by how well they fit a query, the best first."""
    body = await parse_body(request, RerankRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    request_id = new_request_id("rerank")
    texts = body.texts()
    pairs = await asyncio.to_thread(_prepare, request_id, body, texts, model)

    def write(pooled: PooledTexts) -> dict[str, Any]:
        scores = pairs.scores(pooled.outputs)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {
                "index": index,
                **({} if body.return_documents is False else {"document": {"text": texts[index]}}),
                "relevance_score": scores[index],
            }
            for index in order[: body.top_n or len(order)]
        ]
        return {
            "id": request_id,
            "model": model.name,
            "usage": pooled.usage(),
            "results": results,
        }

    return await answer_pooled(request, request_id, pairs.requests, write)


def _prepare(
    request_id: str, body: RerankRequest, texts: list[str], model: LoadedModel
) -> ScoredPairs:
    processor = model.pooling_processor()
    limit = body.max_tokens_per_doc
    if limit:
        texts = [processor.cut(text, limit) for text in texts]
    names = ("query", "documents")
    return prepare_pairs(processor, request_id, body.query, texts, body.options(), names)
