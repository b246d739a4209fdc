"""The request schemas: every field has its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from octavo_server.api.anthropic_protocol import CountTokensRequest, MessagesRequest
from octavo_server.api.chat_protocol import ChatCompletionRequest
from octavo_server.api.pooling_protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from octavo_server.api.protocol import (
    CompletionRequest,
    StrictModel,
)
from octavo_server.api.responses_protocol import ResponsesRequest
from octavo_server.api.tokenize_protocol import (
    DetokenizeRequest,
    TokenizeRequest,
)


def unbounded_fields(model: type[BaseModel]) -> list[str]:
    schema = model.model_json_schema()
    found = list(_walk(schema, "body"))
    for name, definition in schema.get("$defs", {}).items():
        found += _walk(definition, name)
    return found


def _walk(node: dict[str, Any], path: str) -> Iterator[str]:
    for name, child in node.get("properties", {}).items():
        yield from _walk(child, f"{path}.{name}")
    branches = node.get("anyOf", []) + node.get("oneOf", [])
    for branch in branches:
        yield from _walk(branch, path)
    if "$ref" in node or branches or "const" in node or "enum" in node:
        return
    match node.get("type"):
        case "string" if "maxLength" not in node:
            yield path
        case "integer" | "number" if not _has_both_limits(node):
            yield path
        case "array":
            if "maxItems" not in node:
                yield path
            yield from _walk(node.get("items", {}), f"{path}[]")
        case "object" if "properties" not in node:
            if "maxProperties" not in node:
                yield path
            yield from _walk(node.get("additionalProperties", {}), f"{path}{{}}")
        case None:
            yield path


def _has_both_limits(node: dict[str, Any]) -> bool:
    low = "minimum" in node or "exclusiveMinimum" in node
    return low and ("maximum" in node or "exclusiveMaximum" in node)


@pytest.mark.parametrize(
    "model",
    [
        CompletionRequest,
        ChatCompletionRequest,
        MessagesRequest,
        CountTokensRequest,
        ResponsesRequest,
        TokenizeRequest,
        DetokenizeRequest,
        EmbeddingRequest,
        PoolingRequest,
        ClassificationRequest,
        ScoreRequest,
        RerankRequest,
    ],
)
def test_every_field_is_bounded(model: type[BaseModel]) -> None:
    assert unbounded_fields(model) == []


def test_the_walk_finds_what_has_no_bounds() -> None:
    class Loose(StrictModel):
        text: str
        number: float
        half: Annotated[int, Field(ge=0)]
        items: list[Annotated[int, Field(ge=0, le=1)]]
        mapping: dict[str, Annotated[int, Field(ge=0, le=1)]]
        anything: Any
        fine: Annotated[str, Field(max_length=3)] | None = None

    assert unbounded_fields(Loose) == [
        "body.text",
        "body.number",
        "body.half",
        "body.items",
        "body.mapping",
        "body.anything",
    ]
