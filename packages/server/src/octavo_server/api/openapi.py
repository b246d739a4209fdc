"""``GET /openapi.json``: the API for tools, from the same schema that checks the bodies."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.answers import ErrorAnswer, MessageErrorAnswer
from octavo_server.api.anthropic_errors import is_anthropic_path
from octavo_server.api.errors import json_response

if TYPE_CHECKING:
    from octavo_server.api.context import ServerContext

router = APIRouter()

_REF = "#/components/schemas/{model}"
_MODEL_KEY = "x-model"
_OPEN_PATHS = frozenset({"/health", "/ready"})
# FastAPI's own, for a check of parameters that no route of ours uses.
_NOT_OURS = frozenset({"HTTPValidationError", "ValidationError"})

_models: dict[str, type[BaseModel]] = {}


def documented(
    *,
    body: type[BaseModel] | None = None,
    body_required: bool = True,
    answer: type[BaseModel] | None = None,
    streams: bool = False,
    parameters: list[dict[str, Any]] | None = None,
    media_type: str = "application/json",
) -> dict[str, Any]:
    """Return what a route's decorator needs for the OpenAPI document.

    Routes read and write raw bytes, so FastAPI can't see their shapes.

    Args:
        body: What the route gives to `parse_body`.
        answer: Shape of the answer with status 200.
        streams: The answer can also be a stream of events.
        parameters: From `query_parameter`.
        media_type: Of an answer that is no JSON.
    """
    schema = _reference(answer) if answer is not None else {}
    content: dict[str, Any] = {media_type: {"schema": schema}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {
            "required": body_required,
            "content": {"application/json": {"schema": _reference(body)}},
        }
    if parameters is not None:
        extra["parameters"] = parameters
    return {
        "openapi_extra": extra,
        "responses": {200: {"description": "Done", "content": content}},
    }


def query_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an optional part of a query."""
    return {"name": name, "in": "query", "required": False, "schema": schema}


@router.get("/openapi.json", **documented())
async def openapi(request: Request) -> Response:
    """Answer this document."""
    app: FastAPI = request.app
    if app.openapi_schema is None:
        app.openapi_schema = build_openapi(app, app.state.context)
    return json_response(app.openapi_schema)


def build_openapi(app: FastAPI, context: ServerContext) -> dict[str, Any]:
    """Describe every route of `app`.

    Operations get ids of their own, errors their shape and, if there are keys, security.
    """
    with warnings.catch_warnings():
        # Routes with several methods share an id, which is replaced below.
        warnings.filterwarnings("ignore", message="Duplicate Operation ID")
        document = get_openapi(
            title=app.title, version=app.version, routes=app.routes, description=_DESCRIPTION
        )
    access = context.config.access
    has_keys = bool(access.api_key or access.api_key_file)
    for path, operations in document["paths"].items():
        operations.pop("head", None)
        for method, operation in operations.items():
            error = MessageErrorAnswer if is_anthropic_path(path) else ErrorAnswer
            _finish(operation, f"{method}_{_slug(path)}", error)
            if has_keys and path in _OPEN_PATHS:
                operation["security"] = []
    components = document.setdefault("components", {})
    schemas = {
        name: schema
        for name, schema in components.get("schemas", {}).items()
        if name not in _NOT_OURS
    }
    components["schemas"] = schemas | _schemas()
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        document["security"] = [{"bearer": []}, {"key": []}]
    return document


_DESCRIPTION = "OpenAI's shape, with vLLM's names where it has more."


def _finish(operation: dict[str, Any], operation_id: str, error: type[BaseModel]) -> None:
    operation["operationId"] = operation_id
    responses = operation["responses"]
    responses.pop("422", None)
    for status, words in (("4XX", "The request can't be served"), ("5XX", "The server can't")):
        responses[status] = {
            "description": words,
            "content": {"application/json": {"schema": _reference(error)}},
        }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    known = _models.setdefault(model.__name__, model)
    assert known is model, f"two models are called {model.__name__}"
    return {"$ref": _REF.format(model=model.__name__)}


def _schemas() -> dict[str, Any]:
    inputs: Any = [(model, "validation") for model in _models.values()]
    _, document = models_json_schema(inputs, ref_template=_REF)
    schemas: dict[str, Any] = _plain(document["$defs"])
    return schemas


def _plain(schema: Any) -> Any:
    """Rewrite what is right for pydantic and not for others.

    A union whose branch is chosen by a function is written as ``oneOf``, though 1 is an integer
    as well as a number. Defaults are values in Python: null for not given, or text for JSON that
    is kept as it came.
    """
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _plain(field) for name, field in value.items()}
        elif key != "default":
            plain["anyOf" if key == "oneOf" else key] = _plain(value)
    return plain


def _slug(path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", path.lower()).strip("_")
