"""``POST /v1/embeddings``, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_core.pooling_params import PooledOutput, PoolingTask
from octavo_core.wire import EngineCoreRequest
from octavo_server.api.body import parse_body
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.generation import new_request_id
from octavo_server.api.openapi import documented
from octavo_server.api.pooling_answers import EmbeddingAnswer
from octavo_server.api.pooling_protocol import EmbeddingRequest, EncodingFormat, TextBody
from octavo_server.api.pooling_run import PooledTexts, answer_head, answer_pooled
from octavo_server.pooled_output import to_numbers
from octavo_server.pooling_input_processor import PoolingOptions

router = APIRouter()


@router.post("/v1/embeddings", **documented(body=EmbeddingRequest, answer=EmbeddingAnswer))
async def create_embeddings(request: Request) -> Response:
    """Make a vector of each text."""
    body = await parse_body(request, EmbeddingRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    request_id = new_request_id("embd")
    options = embedding_options(body, "embed")
    requests = await asyncio.to_thread(prepare_texts, request_id, body, options, model)

    def write(pooled: PooledTexts) -> dict[str, Any]:
        data = [
            {
                "index": index,
                "object": "embedding",
                "embedding": encode(output, body.encoding_format),
            }
            for index, output in enumerate(pooled.outputs)
        ]
        return {**answer_head(request_id, model), "data": data, "usage": pooled.usage()}

    return await answer_pooled(request, request_id, requests, write)


def embedding_options(body: EmbeddingRequest, task: PoolingTask) -> PoolingOptions:
    """Return what the body says about its texts and their vectors."""
    use = body.normalize if body.use_activation is None else body.use_activation
    return body.options().replace(task=task, dimensions=body.dimensions, use_activation=use)


def prepare_texts(
    request_id: str, body: TextBody, options: PoolingOptions, model: LoadedModel
) -> list[EngineCoreRequest]:
    """Check and tokenize the texts of a body.

    Raises:
        InvalidRequestError: A text or an option can't be used.
    """
    processor = model.pooling_processor()
    processor.check_options(options)
    return [
        processor.process_text(f"{request_id}-{number}", text, options, name)
        for number, (name, text) in enumerate(body.texts().items())
    ]


def encode(output: PooledOutput, encoding_format: EncodingFormat | None) -> list[float] | str:
    """Write a vector as numbers, or its float32 as base64.

    Raises:
        RequestFailedError: A number is NaN or infinite.
    """
    numbers = to_numbers(output)
    if encoding_format == "base64":
        return base64.b64encode(output.data).decode()
    return numbers
