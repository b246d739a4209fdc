"""``POST /pooling``: whatever the model pools, of texts or of each of their tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_core.pooling_params import PooledOutput
from octavo_server.api.body import parse_body
from octavo_server.api.context import context_of
from octavo_server.api.embeddings import embedding_options, encode, prepare_texts
from octavo_server.api.generation import new_request_id
from octavo_server.api.openapi import documented
from octavo_server.api.pooling_answers import PoolingAnswer
from octavo_server.api.pooling_protocol import EncodingFormat, PoolingRequest
from octavo_server.api.pooling_run import PooledTexts, answer_head, answer_pooled
from octavo_server.pooled_output import to_rows

router = APIRouter()


@router.post("/pooling", **documented(body=PoolingRequest, answer=PoolingAnswer))
async def pool_texts(request: Request) -> Response:
    """Make a vector of each text, or of each of its tokens."""
    body = await parse_body(request, PoolingRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    request_id = new_request_id("pool")
    # Without a word, as in vLLM, there is a vector for each token.
    task = body.task or model.pooling_processor().pooler.tasks[-1]
    options = embedding_options(body, task)
    requests = await asyncio.to_thread(prepare_texts, request_id, body, options, model)

    def write(pooled: PooledTexts) -> dict[str, Any]:
        data = [
            {"index": index, "object": "pooling", "data": _write(output, body.encoding_format)}
            for index, output in enumerate(pooled.outputs)
        ]
        return {**answer_head(request_id, model), "data": data, "usage": pooled.usage()}

    return await answer_pooled(request, request_id, requests, write)


def _write(output: PooledOutput, encoding_format: EncodingFormat | None) -> Any:
    if encoding_format == "base64" or len(output.shape) == 1:
        return encode(output, encoding_format)
    return to_rows(output)
