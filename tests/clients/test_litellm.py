"""`litellm`: OpenAI's and Anthropic's format through one library."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

litellm = pytest.importorskip("litellm")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
# To litellm a base of Anthropic's API is without the version.
BASES = {"openai/script": "/v1", "hosted_vllm/script": "/v1", "anthropic/script": ""}


HELLO = [{"role": "user", "content": "Hello there."}]


def ask(url: str, model: str, text: str, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": text}])
    return litellm.completion(
        model=model,
        api_base=url + BASES[model],
        api_key="none",
        messages=messages,
        max_tokens=300,
        **fields,
    )


@pytest.mark.parametrize("model", BASES)
def test_a_chat(script: str, model: str) -> None:
    answer = ask(script, model, "Hello there.")
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len("Hello there.")
    assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize("model", BASES)
def test_a_stream(script: str, model: str) -> None:
    chunks = list(ask(script, model, "Hello there.", stream=True))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Hello there."
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("model", BASES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop(script: str, model: str, stream: bool) -> None:
    first = {"role": "user", "content": f"{CALL}|||It is 8."}
    answer = ask(script, model, "", messages=[first], tools=[TOOL], stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 5, "b": 3})
    assert answer.choices[0].finish_reason == "tool_calls"
    messages = [
        first,
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "8"},
    ]
    answer = ask(script, model, "", messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "It is 8."


def test_anthropics_own_format(script: str) -> None:
    async def create() -> Any:
        return await litellm.anthropic.messages.acreate(
            model="anthropic/script",
            api_base=script,
            api_key="none",
            max_tokens=50,
            messages=HELLO,
        )

    answer = asyncio.run(create())
    assert answer["content"][0]["text"] == "Hello there."
    assert answer["stop_reason"] == "end_turn"


def test_a_mistake_has_its_class(script: str) -> None:
    with pytest.raises(litellm.BadRequestError):
        ask(script, "openai/script", "x", temperature=9)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="openai/other", api_base=f"{script}/v1", api_key="none", messages=HELLO
        )
