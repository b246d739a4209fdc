"""Constraints for calls that a request asks for: what they allow, by the real library."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_core.errors import InvalidRequestError
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server.grammar_vocabulary import model_vocabulary
from octavo_server.llguidance_backend import LLGuidanceBackend
from octavo_server.tokenizer import Tokenizer
from octavo_server.tool_parsers.forced import forced_arguments, forced_calls

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "title": "Weather",
        "properties": {
            "city": {"type": "string", "description": "d" * 1000},
            "title": {"type": "string", "format": "regex"},
            "inner": {"$ref": "#/$defs/Inner"},
        },
        "required": ["city"],
        "$defs": {"Inner": {"properties": {"again": {"$ref": "#/$defs/Inner"}}}},
    },
}
PING: dict[str, Any] = {"name": "ping"}


def allows(constraint: StructuredOutputsParams, text: str, tokenizer: Tokenizer) -> bool:
    """True if `text` is a whole answer under the constraint."""

    class Spec:
        vocab_size = tokenizer.vocab_size
        eos_token_ids = tokenizer.eos_token_ids

    backend = LLGuidanceBackend(lambda: model_vocabulary(tokenizer, Spec()))  # type: ignore[arg-type]
    matcher = backend.compile(constraint).new_matcher()
    try:
        matcher.accept_tokens(tokenizer.encode_plain(text))
    except ValueError:
        return False
    mask = int.from_bytes(matcher.bitmask(), "little")
    return matcher.is_terminated or any(mask >> i & 1 for i in tokenizer.eos_token_ids)


def call(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("calls", "allowed"),
    [
        ([call("get_weather", city="Paris")], True),
        ([call("get_weather", city="Paris", title="x", inner={"again": {"again": {}}})], True),
        ([call("ping"), call("get_weather", city="é")], True),
        ([call("ping", x=1)], False),
        ([call("get_weather")], False),
        ([call("get_weather", city="Paris", other=1)], False),
        ([call("pong")], False),
        ([], False),
    ],
)
def test_a_list_of_calls(
    starter_tokenizer: Tokenizer, calls: list[dict[str, Any]], allowed: bool
) -> None:
    constraint = forced_calls([WEATHER, PING], is_parallel=True)
    assert allows(constraint, json.dumps(calls, ensure_ascii=False), starter_tokenizer) is allowed


def test_one_call_only(starter_tokenizer: Tokenizer) -> None:
    constraint = forced_calls([PING], is_parallel=False)
    assert allows(constraint, json.dumps([call("ping")]), starter_tokenizer)
    assert not allows(constraint, json.dumps([call("ping")] * 2), starter_tokenizer)


def test_arguments_of_a_named_function(starter_tokenizer: Tokenizer) -> None:
    constraint = forced_arguments(WEATHER)
    assert allows(constraint, '{"city": "Paris"}', starter_tokenizer)
    assert not allows(constraint, "{}", starter_tokenizer)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"properties": {}}])
def test_g09_a_tool_without_parameters(starter_tokenizer: Tokenizer, parameters: Any) -> None:
    constraint = forced_arguments({"name": "ping", "parameters": parameters})
    assert allows(constraint, "{}", starter_tokenizer)
    assert not allows(constraint, '{"x": 1}', starter_tokenizer)


def test_an_object_of_any_members(starter_tokenizer: Tokenizer) -> None:
    parameters = {"type": "object", "additionalProperties": {"type": "integer"}}
    constraint = forced_arguments({"name": "f", "parameters": parameters})
    assert allows(constraint, '{"x": 1}', starter_tokenizer)


def test_strict_tools_keep_what_can_not_be_enforced(starter_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="format"):
        allows(forced_arguments({**WEATHER, "strict": True}), "{}", starter_tokenizer)


def test_comments_are_left_out() -> None:
    text = forced_calls([WEATHER], is_parallel=True).json or ""
    assert "ddd" not in text
    schema = json.loads(text)["$defs"]["tool_0"]
    assert "title" not in schema
    assert "title" in schema["properties"]


def test_too_many_tools_to_enforce_are_told() -> None:
    enum = {"properties": {"x": {"enum": ["y" * 100] * 1000}}}
    with pytest.raises(InvalidRequestError, match="tool_choice") as error:
        forced_calls([{"name": "f", "parameters": enum}], is_parallel=True)
    assert error.value.field == "tools"
