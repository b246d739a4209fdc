"""The OpenAPI document: valid, complete, bounded, and true."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import validate
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from octavo_core.config import resolve_config
from octavo_server.api import answers
from octavo_server.api.app import create_app
from octavo_server.api.openapi import build_openapi
from support.asgi import loading_context, routes_of

CONFIG = resolve_config({"enable_operator_routes": True, "api_key": ["k"]})
CONTEXT = loading_context(CONFIG)
APP = create_app(CONTEXT)
DOCUMENT = json.loads(json.dumps(build_openapi(APP, CONTEXT)))
SCHEMAS = DOCUMENT["components"]["schemas"]

# POST routes that take no body.
NO_BODY = {
    "/ping",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/responses/{response_id}/cancel",
}


def test_it_is_valid() -> None:
    validate(DOCUMENT)


def test_every_route_is_in_it_with_its_body() -> None:
    described = {path for path in DOCUMENT["paths"] if "{" not in path}
    served = {route.path for route in routes_of(APP) if "{" not in route.path}
    assert served == described
    for path, operations in DOCUMENT["paths"].items():
        has_body = "requestBody" in operations.get("post", {"requestBody": None})
        assert has_body is (path not in NO_BODY), path
        for operation in operations.values():
            assert set(operation["responses"]) == {"200", "4XX", "5XX"}
    ids = [
        operation["operationId"]
        for path in DOCUMENT["paths"].values()
        for operation in path.values()
    ]
    assert len(set(ids)) == len(ids)


def test_keys_are_told() -> None:
    assert DOCUMENT["security"] == [{"bearer": []}, {"key": []}]
    assert DOCUMENT["paths"]["/health"]["get"]["security"] == []
    assert "security" not in DOCUMENT["paths"]["/ping"]["get"]
    open_context = loading_context(resolve_config())
    assert "security" not in build_openapi(create_app(open_context), open_context)


def unbounded(schema: Any, place: str) -> Iterator[str]:
    """Yield each place in a schema of a request that a client can fill without a limit."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        yield from unbounded(SCHEMAS[name], f"{place}:{name}")
        return
    for number, branch in enumerate([*schema.get("anyOf", []), *schema.get("allOf", [])]):
        yield from unbounded(branch, f"{place}|{number}")
    if "enum" in schema or "const" in schema:
        return
    kind = schema.get("type")
    if kind == "string" and "maxLength" not in schema:
        yield f"{place}: string without maxLength"
    if kind in ("integer", "number"):
        if not {"minimum", "exclusiveMinimum"} & set(schema):
            yield f"{place}: {kind} without minimum"
        if not {"maximum", "exclusiveMaximum"} & set(schema):
            yield f"{place}: {kind} without maximum"
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{place}: array without maxItems"
        yield from unbounded(schema.get("items", {}), f"{place}[]")
    if kind == "object":
        for name, field in schema.get("properties", {}).items():
            yield from unbounded(field, f"{place}.{name}")
        yield from unbounded_names(schema, place)
    if kind is None and not {"anyOf", "allOf"} & set(schema):
        yield f"{place}: anything"


def unbounded_names(schema: Any, place: str) -> Iterator[str]:
    """The same for an object whose fields the client names."""
    others = schema.get("additionalProperties", "properties" not in schema)
    if others is False:
        return
    if "maxProperties" not in schema and (others is not True or "properties" not in schema):
        yield f"{place}: object without maxProperties"
    if isinstance(others, dict):
        yield from unbounded(others, f"{place}.*")


def test_every_field_of_a_request_is_bounded() -> None:
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]
        for operations in DOCUMENT["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    ]
    assert len(bodies) >= 3
    found = [place for body in bodies for place in unbounded(body, "")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "number", "maximum": 0},
        {"type": "array", "items": {"type": "boolean"}},
        {"type": "array", "maxItems": 1, "items": {"type": "string"}},
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        {"type": "object"},
        {"anyOf": [{"type": "null"}, {"type": "string"}]},
        {"type": "object", "properties": {"x": {}}},
        {},
    ],
)
def test_the_walk_finds_an_unbounded_field(schema: Any) -> None:
    assert list(unbounded(schema, ""))


@pytest.fixture(scope="module")
def operated(start_shared_front: Any) -> Any:
    return start_shared_front(enable_operator_routes="true").wait_ready()


@pytest.fixture(scope="module")
def served_schema(operated: Any) -> Any:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.config.update(base_url=operated.url)
    return schema


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("method", "path", "body", "model"),
    [
        ("GET", "/health", None, answers.HealthAnswer),
        ("GET", "/version", None, answers.VersionAnswer),
        ("GET", "/load", None, answers.LoadAnswer),
        ("GET", "/v1/models", None, answers.ModelList),
        ("GET", "/v1/models/bytes", None, answers.ModelCard),
        ("GET", "/v1/models/other", None, answers.ErrorAnswer),
        ("POST", "/v1/completions", {"prompt": "x", "logprobs": 1}, answers.CompletionAnswer),
        ("POST", "/v1/completions", {"prompt": 5}, answers.ErrorAnswer),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES}, answers.ChatCompletionAnswer),
        ("POST", "/v1/responses", {"input": "hi"}, answers.ResponseAnswer),
        ("POST", "/v1/responses/input_tokens", {"input": "hi"}, answers.ResponseTokenCount),
        ("GET", "/v1/responses/other", None, answers.ErrorAnswer),
        ("POST", "/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, answers.MessageAnswer),
        ("POST", "/v1/messages/count_tokens", {"messages": MESSAGES}, answers.TokenCount),
        ("POST", "/v1/messages", {"messages": MESSAGES}, answers.MessageErrorAnswer),
    ],
)
def test_answers_have_the_shape_that_is_told(
    operated: Any, method: str, path: str, body: Any, model: type[answers.Answer]
) -> None:
    response = httpx.request(method, operated.url + path, json=body)
    model.model_validate_json(response.content, strict=True)


# One puts the server to sleep, which all others would feel; those of adapters answer 501.
LEFT_OUT = ["/sleep", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
NUM_EXAMPLES = int(os.environ.get("OCTAVO_SCHEMATHESIS_EXAMPLES", "4"))


def varied() -> Iterator[tuple[str, str, GenerationMode]]:
    """Yield the operations that a request can vary, with right and with wrong values."""
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            if path in LEFT_OUT:
                continue
            if "parameters" in operation:
                yield method, path, GenerationMode.POSITIVE
            if "requestBody" in operation:
                yield method, path, GenerationMode.POSITIVE
                yield method, path, GenerationMode.NEGATIVE


@pytest.mark.parametrize(("method", "path", "mode"), list(varied()))
def test_no_request_makes_the_server_fail(
    served_schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    """Right requests and wrong ones; `nox -s schemathesis` tries many more of them."""
    operation = served_schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        response = case.call(timeout=60)
        # Who gives a request no time gets none.
        asked = response.status_code == 504 and isinstance(case.body, dict)
        if not (asked and case.body.get("timeout") is not None):
            case.validate_response(response, checks=[not_a_server_error])

    run()
