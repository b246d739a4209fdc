"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.answers import ModelCard, ModelList
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.errors import json_response
from octavo_server.api.openapi import documented

router = APIRouter()


@router.get("/v1/models", **documented(answer=ModelList))
async def list_models(request: Request) -> Response:
    """List the one model."""
    model = context_of(request).loaded_model()
    return json_response({"object": "list", "data": [_card(model)]})


# A hub id has a slash in it.
@router.get("/v1/models/{model_id:path}", **documented(answer=ModelCard))
async def get_model(request: Request, model_id: str) -> Response:
    """Describe the model, or answer 404."""
    model = context_of(request).loaded_model()
    model.check_name(model_id)
    return json_response(_card(model))


def _card(model: LoadedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "octavo",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
