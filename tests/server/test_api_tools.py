"""Tools and reasoning in ``/v1/chat/completions``, streamed and not.

The scripted model says what it is told to: ``say:Hello`` makes it answer ``Hello``.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from support.answers import joined_chunks
from support.scripted_engine import SAY_TEMPLATE

PATH = "/v1/chat/completions"
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "ping"}}]


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"say:{text}"}], "tools": TOOLS, **fields}


def both(front: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Ask with and without a stream, see that both say the same, and return the choice."""
    response = front.post(PATH, body)
    assert response.status_code == 200, response.text
    whole = response.json()["choices"]
    streamed = joined_chunks(front.events(PATH, body))
    assert [without_ids(choice) for choice in streamed] == [without_ids(c) for c in whole]
    choice: dict[str, Any] = whole[0]
    return choice


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in choice["message"].items() if key != "refusal"}
    ids = [call["id"] for call in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)
    calls = [{**call, "id": "…"} for call in message.pop("tool_calls", [])]
    return {"message": message, "calls": calls, "finish_reason": choice["finish_reason"]}


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_a_call(talker: Any) -> None:
    choice = both(talker, say(PARIS))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert calls_of(choice) == [("get_weather", {"city": "Paris"})]


def test_text_and_calls(talker: Any) -> None:
    choice = both(talker, say(f"I look.\n{PARIS}\n{PING}", n=2))
    assert choice["message"]["content"] == "I look."
    assert calls_of(choice) == [("get_weather", {"city": "Paris"}), ("ping", {})]


def test_only_one_call_without_parallel_calls(talker: Any) -> None:
    choice = both(talker, say(PARIS + PING, parallel_tool_calls=False))
    assert calls_of(choice) == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
def test_without_tools_there_are_no_calls(talker: Any, fields: dict[str, Any]) -> None:
    choice = both(talker, say(PARIS, **fields))
    assert choice["message"]["content"] == PARIS
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_what_is_no_call_is_text(talker: Any) -> None:
    text = '<tool_call>{"name": "ping", "arguments": {oops}}</tool_call>'
    assert both(talker, say(text))["message"]["content"] == text


FORCED: list[tuple[Any, str, str]] = [
    ("auto", PARIS, "tool_calls"),
    ("required", '[{"name": "get_weather", "parameters": {"city": "Paris"}}]', "tool_calls"),
    ({"type": "function", "function": {"name": "get_weather"}}, '{"city": "Paris"}', "stop"),
]


@pytest.mark.parametrize(("choice", "text", "reason"), FORCED)
def test_g07_finish_reasons_are_openais(talker: Any, choice: Any, text: str, reason: str) -> None:
    answer = both(talker, say(text, tool_choice=choice, max_tokens=len(text) + 1))
    assert answer["finish_reason"] == reason
    assert calls_of(answer) == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("choice", ["auto", "required", FORCED[2][0]])
def test_g09_empty_arguments(talker: Any, choice: Any) -> None:
    named = {"type": "function", "function": {"name": "ping"}}
    text = {"auto": PING, "required": '[{"name": "ping", "parameters": {}}]'}.get(str(choice), "{}")
    tool_choice = choice if isinstance(choice, str) else named
    answer = both(talker, say(text, tool_choice=tool_choice, max_tokens=len(text) + 1))
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(("choice", "text", "reason"), FORCED)
def test_g11_the_first_fragment_alone_has_the_id(
    talker: Any, choice: Any, text: str, reason: str
) -> None:
    events = talker.events(PATH, say(text, tool_choice=choice))
    deltas = [event["choices"][0]["delta"] for event in events]
    fragments = [fragment for delta in deltas for fragment in delta.get("tool_calls", [])]
    first, *rest = fragments
    assert first["index"] == 0
    assert (first["type"], first["function"]["name"]) == ("function", "get_weather")
    assert first["id"].startswith("call_")
    assert all(fragment.keys() == {"index", "function"} for fragment in rest)
    assert all(fragment["function"].keys() == {"arguments"} for fragment in rest)
    assert all("tool_calls" not in delta for delta in deltas if "content" in delta)


def test_a_forced_call_is_sent_as_it_comes(talker: Any) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    events = talker.events(PATH, say('{"city": "slowly"}', tool_choice=choice))
    fragments = [
        fragment["function"]["arguments"]
        for event in events
        for fragment in event["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert "".join(fragments) == '{"city": "slowly"}'
    assert len(fragments) > 5


@pytest.mark.parametrize(("choice", "text", "reason"), FORCED)
@pytest.mark.parametrize("n", [1, 2])
def test_g13_one_finish_reason_for_each_choice(
    talker: Any, choice: Any, text: str, reason: str, n: int
) -> None:
    for max_tokens in (1, 5, 24, 200):
        body = say(text, tool_choice=choice, max_tokens=max_tokens, n=n)
        both(talker, body)
        events = talker.events(PATH, body | {"stream_options": {"include_usage": True}})
        assert events.pop()["choices"] == []
        for index in range(n):
            reasons = [
                choice["finish_reason"]
                for event in events
                for choice in event["choices"]
                if choice["index"] == index
            ]
            assert reasons[:-1] == [None] * (len(reasons) - 1)
            assert reasons[-1] in ("stop", "length", "tool_calls")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"function": {"name": "f", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"enum": [1] * 60_000}}}]},
            "tools[0].function.parameters",
        ),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_h07_what_is_wrong_is_named(
    talker: Any, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = talker.post(PATH, say("x", stream=stream, **fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_h01_a_tool_loop_reaches_the_template(talker: Any) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "w", "arguments": '{"l":"Paris"}'},
    }
    shown = "user=w?;assistant=w([('l', 'Paris')]);tool=8;a="
    for turn in ({"content": None}, {}, {"content": ""}, {"content": []}):
        messages = [
            {"role": "user", "content": "w?"},
            {"role": "assistant", "tool_calls": [call], **turn},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "8"}]},
        ]
        assert both(talker, {"messages": messages})["message"]["content"] == shown


def test_the_template_gets_the_tools(talker: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    prompt = both(talker, body)["message"]["content"]
    tools, rest = prompt.removeprefix("tools=").split(";", 1)
    assert rest == "user=hi;a="
    described, bare = json.loads(tools)
    assert described == WEATHER
    assert bare["function"]["parameters"] == {"type": "object", "properties": {}}
    hidden = both(talker, body | {"tool_choice": "none"})["message"]["content"]
    assert hidden == "user=hi;a="


def test_the_answer_goes_on_from_the_final_message(talker: Any) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
    body = {"messages": turns, "continue_final_message": True, "n": 2}
    assert both(talker, body)["message"]["content"] == "user=hi;a=It is"
    body["add_generation_prompt"] = False
    assert both(talker, body)["message"]["content"] == "user=hi;a=It is"
    for wrong in ({"messages": turns[:1]}, {"add_generation_prompt": True}):
        error = talker.post(PATH, body | wrong).json()["error"]
        assert error["param"] == "continue_final_message"


def test_allowed_tools(talker: Any) -> None:
    allowed = {"tools": [{"type": "function", "function": {"name": "ping"}}], "mode": "auto"}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice}
    prompt = both(talker, body)["message"]["content"]
    assert '"ping"' in prompt
    assert '"get_weather"' not in prompt


def test_reasoning(talker: Any) -> None:
    choice = both(talker, say("<think>\nHm, 2 < 3.\n</think>\n\nYes."))
    message = choice["message"]
    assert message["content"] == "Yes."
    assert message["reasoning_content"] == message["reasoning"] == "Hm, 2 < 3."
    assert choice["finish_reason"] == "stop"


def test_reasoning_that_the_prompt_has_begun(talker: Any) -> None:
    # The prompt, which this model repeats, ends in the tag.
    message = both(talker, say("Hm.</think>Yes. <think>"))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes. <think>")


def test_reasoning_and_a_call(talker: Any) -> None:
    choice = both(talker, say(f"<think>Hm.</think>\n{PARIS}"))
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_reasoning_that_is_cut_off(talker: Any) -> None:
    choice = both(talker, say("<think>Hm, 2 < 3.</think>Yes.", max_tokens=12))
    assert choice["message"]["reasoning_content"] == "Hm, 2"
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"


def test_reasoning_can_be_left_out(talker: Any) -> None:
    message = both(talker, say("<think>Hm.</think>Yes.", include_reasoning=False))["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}


def test_reasoning_tokens_are_counted(talker: Any) -> None:
    body = say("<think>Hm, hé.</think>Yes.", n=2)
    usage = talker.post(PATH, body).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len("Hm, hé.".encode())}
    events = talker.events(PATH, body | {"stream_options": {"include_usage": True}})
    assert events[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ""),
        ({"reasoning_effort": "none"}, "thinking=False;"),
        ({"reasoning_effort": "low"}, "thinking=True;"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "thinking=False;"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "thinking=False;",
        ),
    ],
)
def test_the_template_hears_of_the_effort(talker: Any, fields: dict[str, Any], shown: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert both(talker, body)["message"]["content"] == f"user=hi;{shown}a="


BOMB = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
BY_TEMPLATE: dict[str, dict[str, Any]] = {
    PATH: {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", BY_TEMPLATE)
@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "params", "self"])
def test_x03_template_options_must_not_override_what_is_ours(
    talker: Any, path: str, name: str
) -> None:
    response = talker.post(path, BY_TEMPLATE[path] | {"chat_template_kwargs": {name: BOMB}})
    assert response.status_code == 400
    assert "chat_template_kwargs" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BY_TEMPLATE)
def test_x03_a_request_brings_no_template(talker: Any, path: str) -> None:
    response = talker.post(path, BY_TEMPLATE[path] | {"chat_template": BOMB})
    assert response.status_code == 400
    assert "chat_template is not supported" in response.json()["error"]["message"]


def test_earlier_reasoning_reaches_the_template(talker: Any) -> None:
    turns = [
        {"role": "assistant", "content": "b", "reasoning_content": "A"},
        {"role": "assistant", "content": "d", "reasoning": "C"},
        {"role": "user", "content": "e"},
    ]
    content = both(talker, {"messages": turns})["message"]["content"]
    assert content == "assistant=Ab;assistant=Cd;user=e;a="


def test_a_template_without_tools_gets_a_system_message(front: Any) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    body = {"messages": messages, "tools": [TOOLS[1]]}
    content = front.post(PATH, body).json()["choices"][0]["message"]["content"]
    assert content.startswith("system=S\n\nYou can call functions.")
    assert '"name": "ping"' in content


@pytest.fixture
def sdk(talker: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0)


def test_the_sdk_reads_calls_in_a_stream(sdk: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"say:{PARIS}{PING}"}]
    with sdk.chat.completions.stream(model="bytes", messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls] == ["get_weather", "ping"]
    assert [call.function.arguments for call in calls] == ['{"city": "Paris"}', "{}"]
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_stream_that_waits_for_a_whole_call_is_kept_alive(start_front: Any) -> None:
    model = {"chat_template": SAY_TEMPLATE, "max_position_embeddings": 8192}
    front = start_front(model=model, sse_keep_alive_interval=0.1).wait_ready()
    call = '<tool_call>{"name": "ping", "arguments": {"x": "slowly said"}}</tool_call>'
    text = front.post(PATH, say(f"I call. {call}", stream=True)).text
    *events, done, _ = [event for event in text.split("\n\n") if event != ": keep-alive"]
    assert text.count(": keep-alive\n\n") >= 2
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert calls_of(joined_chunks(chunks)[0]) == [("ping", {"x": "slowly said"})]


def test_parsers_can_be_named_and_switched_off(start_front: Any) -> None:
    front = start_front(tool_call_parser="none", reasoning_parser="none").wait_ready()
    body = {"messages": [{"role": "user", "content": f"<think>x</think>{PARIS}"}]}
    message = front.post(PATH, body).json()["choices"][0]["message"]
    assert message["content"] == f"user=<think>x</think>{PARIS};a="


def test_an_unknown_parser_ends_the_start(start_front: Any) -> None:
    front = start_front(tool_call_parser="hermse")
    assert front.process.wait(timeout=30) != 0
    assert "--tool-call-parser must be one of auto, none, hermes" in front.stderr
