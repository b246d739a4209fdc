"""``POST /classify``, in vLLM's shape."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.body import parse_body
from octavo_server.api.context import context_of
from octavo_server.api.embeddings import prepare_texts
from octavo_server.api.generation import new_request_id
from octavo_server.api.openapi import documented
from octavo_server.api.pooling_answers import ClassificationAnswer
from octavo_server.api.pooling_protocol import ClassificationRequest
from octavo_server.api.pooling_run import PooledTexts, answer_head, answer_pooled
from octavo_server.pooled_output import to_numbers

router = APIRouter()


@router.post("/classify", **documented(body=ClassificationRequest, answer=ClassificationAnswer))
async def classify(request: Request) -> Response:
    """Say for each text which class it is of, and how likely each is."""
    body = await parse_body(request, ClassificationRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    request_id = new_request_id("classify")
    options = body.options().replace(task="classify")
    requests = await asyncio.to_thread(prepare_texts, request_id, body, options, model)
    labels = model.pooling_processor().pooler.labels

    def write(pooled: PooledTexts) -> dict[str, Any]:
        data = [
            _result(index, to_numbers(output), labels)
            for index, output in enumerate(pooled.outputs)
        ]
        return {**answer_head(request_id, model), "data": data, "usage": pooled.usage()}

    return await answer_pooled(request, request_id, requests, write)


def _result(index: int, probs: list[float], labels: tuple[str, ...]) -> dict[str, Any]:
    return {
        "index": index,
        "label": labels[probs.index(max(probs))],
        "probs": probs,
        "num_classes": len(probs),
    }
