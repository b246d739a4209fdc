"""``/v1/messages`` over HTTP, and through the official SDK.

The scripted model says what it is told to: ``say:Hello`` makes it answer ``Hello``.
"""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from support.streams import joined_message, named_events

PATH = "/v1/messages"
WRITE = '<tool_call>\n{"name": "Write", "arguments": {"p": "x"}}\n</tool_call>'
TOOLS = [
    {
        "name": "Write",
        "description": "Writes.",
        "input_schema": {"type": "object", "properties": {"p": {"type": "string"}}},
    },
    {"name": "Ping", "input_schema": {"type": "object"}},
]


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"say:{text}"}], "max_tokens": 600, **fields}


def events_of(front: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = front.post(PATH, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return named_events(response.text)


def both(front: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Ask with and without a stream, see that both say the same, and return the message."""
    response = front.post(PATH, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    streamed = joined_message(events_of(front, body))
    assert without_ids(streamed) == without_ids(whole)
    assert all(block.get("text") != "" for block in whole["content"])
    return whole


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    usage = message["usage"]
    # The second request finds the first one's prompt in the cache.
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    content = [{**block, "id": "…"} for block in message["content"]]
    same = {key: message[key] for key in ("type", "role", "model", "stop_reason", "stop_sequence")}
    return {
        **same,
        "content": content,
        "prompt": num_prompt,
        "output": usage["output_tokens"],
        "details": usage.get("output_tokens_details"),
    }


def test_a_message(talker: Any) -> None:
    message = both(talker, say("Hello é"))
    assert message["id"].startswith("msg")
    assert message["type"] == "message"
    assert message["role"] == "assistant"
    assert message["model"] == "bytes"
    assert message["content"] == [{"type": "text", "text": "Hello é"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len("Hello é".encode())
    assert usage["output_tokens"] == len("Hello é".encode()) + 1


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence", "shown"),
    [
        ("Hello", {"max_tokens": 2}, "max_tokens", None, "He"),
        ("Hello", {"stop_sequences": ["lo", "x"]}, "stop_sequence", "lo", "Hel"),
    ],
)
def test_stop_reasons(
    talker: Any, text: str, fields: dict[str, Any], reason: str, sequence: str | None, shown: str
) -> None:
    message = both(talker, say(text, **fields))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["content"] == [{"type": "text", "text": shown}]


def test_h17_a_call_ends_in_tool_use(talker: Any) -> None:
    message = both(talker, say(WRITE, tools=TOOLS))
    assert message["stop_reason"] == "tool_use"
    (block,) = message["content"]
    assert {**block, "id": "…"} == {
        "type": "tool_use",
        "id": "…",
        "name": "Write",
        "input": {"p": "x"},
    }


def test_h17_text_and_calls(talker: Any) -> None:
    message = both(talker, say(f"I write.\n{WRITE}\n\n{WRITE}", tools=TOOLS))
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
    assert message["content"][0]["text"] == "I write."
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "any"}, '[{"name": "Write", "parameters": {"p": "x"}}]'),
        ({"type": "tool", "name": "Write"}, '{"p": "x"}'),
    ],
)
def test_h17_forced_calls(talker: Any, choice: dict[str, Any], text: str) -> None:
    body = say(text, tools=TOOLS, tool_choice=choice, max_tokens=len(text) + 1)
    message = both(talker, body)
    assert message["stop_reason"] == "tool_use"
    assert [(block["name"], block["input"]) for block in message["content"]] == [
        ("Write", {"p": "x"})
    ]
    cut = talker.post(PATH, body | {"max_tokens": len(text) - 4}).json()
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][0]["input"] == {}


def test_thinking(talker: Any) -> None:
    message = both(talker, say("<think>Hm.</think>Yes."))
    thinking, text = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Yes."}
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_thinking_can_be_left_out(talker: Any) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    message = both(talker, say("<think>Hm.</think>Yes.", thinking=thinking))
    assert message["content"] == [{"type": "text", "text": "Yes."}]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_a_conversation_reaches_the_template(talker: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": "s"},
                {"type": "redacted_thinking", "data": "R"},
                {"type": "text", "text": "C"},
                {"type": "tool_use", "id": "t1", "name": "Write", "input": {"p": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "8"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                },
                {"type": "tool_result", "tool_use_id": "t3", "is_error": True},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    body = {"messages": messages, "system": [{"type": "text", "text": "S"}], "max_tokens": 400}
    assert both(talker, body)["content"][0]["text"] == (
        "system=S;user=a\nb;assistant=TCWrite([('p', 1)]);tool=8;tool=no;tool=The tool failed.;"
        "user=go on;a="
    )


def test_the_answer_goes_on_from_a_last_turn_of_the_model(talker: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
    message = both(talker, {"messages": messages, "max_tokens": 100})
    assert message["content"][0]["text"] == "user=hi;a=It is"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking=True;"),
        ({"thinking": {"type": "disabled"}}, "thinking=False;"),
        ({"output_config": {"effort": "high"}}, "thinking=True;"),
    ],
)
def test_thinking_reaches_the_template(talker: Any, fields: dict[str, Any], shown: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100, **fields}
    assert both(talker, body)["content"][0]["text"] == f"user=hi;{shown}a="


def test_tokens_are_counted(talker: Any) -> None:
    body = {key: value for key, value in say("Hello").items() if key != "max_tokens"}
    response = talker.post(f"{PATH}/count_tokens", body)
    assert response.json() == {"input_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_in_anthropics_shape(
    talker: Any, fields: dict[str, Any], words: str, stream: bool
) -> None:
    response = talker.post(PATH, say("x", stream=stream) | fields)
    assert response.status_code == 400, response.text
    content = response.json()
    assert content.keys() == {"type", "error"}
    assert content["type"] == "error"
    assert content["error"]["type"] == "invalid_request_error"
    assert words in content["error"]["message"]


def test_other_errors_are_in_anthropics_shape_too(talker: Any) -> None:
    unknown = talker.post(PATH, say("x", model="claude"))
    assert unknown.status_code == 404
    assert unknown.json()["error"]["type"] == "not_found_error"
    nowhere = talker.post(f"{PATH}/nope", {})
    assert nowhere.status_code == 404
    assert nowhere.json()["type"] == "error"
    broken = talker.post(PATH, say("break"))
    assert broken.status_code == 500
    assert broken.json()["error"]["type"] == "api_error"


def test_an_error_in_a_stream_is_an_event(talker: Any) -> None:
    *_, last = events_of(talker, say("slow slow slow crack"))
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"


@pytest.fixture
def sdk(talker: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=talker.url, api_key="none", max_retries=0)


def test_the_sdk_asks(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(
        model="bytes", max_tokens=100, messages=[{"role": "user", "content": "say:Hello"}]
    )
    assert message.content[0].text == "Hello"  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"


def test_the_sdk_streams(sdk: anthropic.Anthropic) -> None:
    text = f"<think>Hm.</think>I write.{WRITE}"
    with sdk.messages.stream(
        model="bytes",
        max_tokens=400,
        messages=[{"role": "user", "content": f"say:{text}"}],
        tools=TOOLS,  # type: ignore[arg-type]
    ) as stream:
        shown = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert shown == "I write."
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"p": "x"}  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 0


def test_the_sdk_counts_tokens(sdk: anthropic.Anthropic) -> None:
    count = sdk.messages.count_tokens(
        model="bytes", messages=[{"role": "user", "content": "say:Hello"}]
    )
    assert count.input_tokens == 5


def test_the_sdk_sees_typed_errors(sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(model="nope", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        sdk.messages.create(model="bytes", max_tokens=1, messages=[])
