"""Calls on the starter model: it is too small to call by itself, so a grammar makes it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest

from support.answers import joined_chunks
from support.server import Server

QUESTION = "What is the weather like in Paris?"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
}
FUNCTION = {"name": "get_weather", "description": "Tells the weather.", "parameters": PARAMETERS}
TOOLS = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "ping"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Weather(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=20)
    unit: str = pydantic.Field(pattern="^(celsius|fahrenheit)$")
    days: int = pydantic.Field(ge=1, le=9)


def check(name: str, arguments: str | dict[str, Any]) -> None:
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name == "get_weather":
        Weather.model_validate(value)
    else:
        assert (name, value) == ("ping", {})


def chat(server: Server, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask with and without a stream."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, **fields}
    url = f"{server.url}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=60)
    assert whole.status_code == 200, whole.text
    streamed = httpx.post(url, json=body | {"stream": True}, timeout=60)
    *events, done, _ = streamed.text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return whole.json()["choices"][0], joined_chunks(chunks)[0]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_valid(server: Server, choice: Any) -> None:
    whole, streamed = chat(
        server, tools=TOOLS, tool_choice=choice, max_tokens=200, parallel_tool_calls=False
    )
    for answer in (whole, streamed):
        (call,) = answer["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])
        assert answer["message"]["content"] is None
        assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    assert [answer["message"]["tool_calls"][0]["function"] for answer in (whole, streamed)] == [
        whole["message"]["tool_calls"][0]["function"]
    ] * 2


def test_several_calls_at_once(server: Server) -> None:
    whole, _ = chat(server, tools=TOOLS, tool_choice="required", max_tokens=120, temperature=1)
    calls = whole["message"]["tool_calls"]
    complete = calls if whole["finish_reason"] == "tool_calls" else calls[:-1]
    for call in complete:
        check(call["function"]["name"], call["function"]["arguments"])


def test_g13_a_forced_call_that_is_cut_off(server: Server) -> None:
    for max_tokens in (1, 3, 8, 15):
        for choice in ("required", NAMED):
            for answer in chat(server, tools=TOOLS, tool_choice=choice, max_tokens=max_tokens):
                assert answer["finish_reason"] == "length"


def test_with_tools_it_still_answers_in_text(server: Server) -> None:
    for answer in chat(server, tools=TOOLS, max_tokens=20):
        assert answer["message"]["content"]


def test_a_schema_that_can_not_be_enforced_is_told_as_tools(server: Server) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "no"}}}}
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "stream": True,
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


def test_anthropics_sdk(server: Server) -> None:
    sdk = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    request: dict[str, Any] = {
        "model": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"],
        "max_tokens": 200,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        # The SDK has no such argument any more.
        "extra_body": {"temperature": 0},
    }
    message = sdk.messages.create(**request)
    with sdk.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    for answer in (message, streamed):
        (block,) = answer.content
        assert block.type == "tool_use"
        check(block.name, block.input)
        assert answer.stop_reason == "tool_use"
    assert sdk.messages.count_tokens(
        model=request["model"], messages=request["messages"], tools=request["tools"]
    ).input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_the_responses_api_calls_and_goes_on(server: Server) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = sdk.models.list().data[0].id
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    first = sdk.responses.create(
        model=model,
        input=QUESTION,
        tools=tools,
        tool_choice="required",
        temperature=0,
        max_output_tokens=200,
        parallel_tool_calls=False,
    )
    (item,) = first.output
    assert item.type == "function_call"
    check(item.name, item.arguments)
    second = sdk.responses.create(
        model=model,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": item.call_id, "output": "It is sunny."}],
        max_output_tokens=20,
        temperature=0,
    )
    assert second.output_text


def test_the_responses_api_parses(server: Server) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = sdk.models.list().data[0].id
    response = sdk.responses.parse(
        model=model, input=QUESTION, text_format=Weather, max_output_tokens=200, temperature=0
    )
    assert isinstance(response.output_parsed, Weather)
