"""``/v1/chat/completions`` over HTTP, and through the official SDK.

The scripted model repeats the rendered conversation: ``user=hi;a=``.
"""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

PATH = "/v1/chat/completions"


def chat(front: Any, *messages: dict[str, Any], **fields: Any) -> str:
    response = front.post(PATH, {"messages": list(messages), **fields})
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_chat(front: Any) -> None:
    body = front.post(PATH, {"messages": [user("hi")]}).json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "user=hi;a=", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_text_parts_are_joined_and_missing_content_is_empty(front: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        user(parts),
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        user("c"),
    ]
    assert chat(front, *turns) == "system=S;user=a\nb;assistant=;assistant=;assistant=;user=c;a="


def test_a_developer_is_a_system(front: Any) -> None:
    assert chat(front, {"role": "developer", "content": "D"}, user("u")) == "system=D;user=u;a="


def test_the_generation_prompt_can_be_left_out(front: Any) -> None:
    assert chat(front, user("u"), add_generation_prompt=False) == "user=u;"


def test_max_completion_tokens_wins(front: Any) -> None:
    assert chat(front, user("hi"), max_completion_tokens=2, max_tokens=4) == "us"
    assert chat(front, user("hi"), max_tokens=4) == "user"


def test_a_stream(front: Any) -> None:
    body = {
        "messages": [user("grüße 😀")],
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    *events, last = front.events(PATH, body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert last["usage"]["total_tokens"] == sum(
        last["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )
    for index in range(2):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == "user=grüße 😀;a="
        assert "\ufffd" not in text


def test_logprobs(front: Any) -> None:
    body = {"messages": [user("hi")], "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    logprobs = front.post(PATH, body).json()["choices"][0]["logprobs"]
    first, second = logprobs["content"]
    assert first["token"] == "u"
    assert first["bytes"] == [ord("u")]
    assert [top["token"] for top in first["top_logprobs"]] == ["u", "v"]
    streamed = [
        entry
        for event in front.events(PATH, body)
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == [first, second]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, None),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": ""}, None),
        ({"stop": ["x"] * 17}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"x": [1]}}, None),
    ],
)
def test_what_is_wrong_is_named(front: Any, fields: dict[str, Any], param: str | None) -> None:
    response = front.post(PATH, {"messages": [user("hi")], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]


def test_an_image_is_refused(front: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    response = front.post(PATH, {"messages": [user([part])]})
    assert response.status_code == 400
    assert "image_url" in response.json()["error"]["message"]


def test_an_earlier_tool_call_is_accepted(front: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"l":1}'}}
    turns = [
        user("w?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "8"},
    ]
    # The template knows nothing of tools, so the turns are written as text.
    call_text = '<tool_call>\n{"name": "w", "arguments": {"l": 1}}\n</tool_call>'
    result = "<tool_response>\n8\n</tool_response>"
    assert chat(front, *turns) == f"user=w?;assistant={call_text};user={result};a="


def test_deep_arguments_of_a_tool_call_are_refused(front: Any) -> None:
    call = {"id": "c", "function": {"name": "w", "arguments": "[" * 5000 + "]" * 5000}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert front.post(PATH, {"messages": [message]}).status_code == 400


@pytest.fixture
def sdk(front: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


def test_the_sdk_chats(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "hi"}], n=2, logprobs=True
    )
    assert [choice.message.content for choice in answer.choices] == ["user=hi;a="] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user=hi;a=")


def test_the_sdk_streams(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="bytes", messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "user=hi;a="


def test_the_sdk_parses(talker: Any) -> None:
    class City(pydantic.BaseModel):
        name: str

    sdk = openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0)
    # The grammar is the engine's business; here the model says what it would allow.
    messages: Any = [{"role": "user", "content": 'say:{"name": "Paris"}'}]
    answer = sdk.chat.completions.parse(model="bytes", messages=messages, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Paris")


def test_the_sdk_sees_typed_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        sdk.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(model="bytes", messages=[])
    assert [model.id for model in sdk.models.list()] == ["bytes"]
    assert sdk.models.retrieve("bytes").id == "bytes"
