"""`langchain-openai`: a tool loop, streams, structured output and token usage."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_openai")

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'


class City(BaseModel):
    """A city."""

    name: str
    population: int


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def model(url: str, name: str = "script", **fields: object) -> ChatOpenAI:
    key = SecretStr("none")
    return ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=name, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_tool_loop(script: str, use_responses_api: bool) -> None:
    llm = model(script, use_responses_api=use_responses_api).bind_tools([add])
    messages: list[object] = [HumanMessage(f"{CALL}|||It is 8.")]
    asked = llm.invoke(messages)
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 5, "b": 3})
    messages += [asked, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]
    assert llm.invoke(messages).text == "It is 8."


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_stream_of_a_call_adds_up(script: str, use_responses_api: bool) -> None:
    llm = model(script, use_responses_api=use_responses_api).bind_tools([add])
    whole = None
    for chunk in llm.stream(f"{CALL}"):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 5, "b": 3})


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_stream_tells_its_usage(script: str, use_responses_api: bool) -> None:
    llm = model(script, use_responses_api=use_responses_api, stream_usage=True)
    chunks = list(llm.stream("Hello there."))
    assert "".join(chunk.text for chunk in chunks) == "Hello there."
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    whole = llm.invoke("Hello there.").usage_metadata
    assert whole is not None
    assert usage["input_tokens"] == whole["input_tokens"] == len("Hello there.")
    assert usage["output_tokens"] == whole["output_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(script: str, method: str) -> None:
    # Of a call that is asked for by name the model writes the arguments alone.
    text = '{"name": "Paris", "population": 2}'
    answer = model(script).with_structured_output(City, method=method).invoke(text)
    assert answer == City(name="Paris", population=2)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_a_real_model(starter: str, method: str) -> None:
    llm = model(starter, "starter", temperature=0, max_tokens=120)
    answer = llm.with_structured_output(City, method=method).invoke("Tell me about Paris.")
    assert isinstance(answer, City)


async def test_many_at_once(script: str) -> None:
    texts = [f"Number {number}" for number in range(8)]
    answers = await model(script).abatch(texts)
    assert [answer.text for answer in answers] == texts
