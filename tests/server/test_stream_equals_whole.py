"""A stream, put together, is the answer that comes in one piece: on every route, in every field.

Nothing here knows what a feature does. A stream's chunks are joined by one rule (text and
lists are appended, calls by their index, objects are joined field by field, of other values the
last one that is not null counts), and what comes out has to be the whole answer. The events of
the APIs that name them are put together, and their order is checked, in `support.streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest

from support.streams import joined_message, joined_response, named_events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT = "größe 🥹 one two three"
ROUTES = {
    COMPLETIONS: {"prompt": TEXT},
    CHAT: {"messages": [{"role": "user", "content": TEXT}]},
}
# Fields of all routes, of the first two, and of one of them.
SAMPLING = {
    "stop that is kept": {"stop": ["ne t"], "include_stop_str_in_output": True},
    "stop id": {"stop_token_ids": [87]},
    "rules": {"seed": 3, "temperature": 0.5, "frequency_penalty": 1.0, "bad_words": ["x"]},
    "slow": {"cache_salt": "slow"},
    "timing": {"include_timing": True},
    "constraint": {"structured_outputs": {"regex": ".*"}},
}
SHARED = SAMPLING | {
    "n": {"n": 3},
    "stop": {"stop": ["two", "e 🥹 o"]},
    "short": {"max_tokens": 7},
    "ids": {"return_token_ids": True},
    "prompt logprobs": {"prompt_logprobs": 2},
    "tokens as ids": {"return_tokens_as_token_ids": True},
    "truncated": {"truncate_prompt_tokens": 9},
    "named": {"request_id": "mine"},
}
OWN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "logprobs": {"logprobs": 3},
        "echo": {"echo": True},
        "prompts": {"prompt": ["one", "two three", "é"]},
    },
    CHAT: {"logprobs": {"logprobs": True, "top_logprobs": 2}},
}

# What the model says to a conversation.
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "größe"}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
SAID = {
    "text": TEXT,
    "thought": "<think>one é two</think>\n\nthree one two",
    "thought alone": "<think>one two three",
    "calls": f"one two\n{CALL}\n{PING}",
    "all": f"<think>one é two</think>three\n{CALL}\n{PING}",
    "no call": '<tool_call>\n{"name": "weather"',
    "required": '[{"name": "ping", "parameters": {}}, {"name": "ping", "parameters": {}}]',
    "by name": '{"city": "é one two"}',
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS: list[dict[str, Any]] = [{"name": "weather", "parameters": SCHEMA}, {"name": "ping"}]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    CHAT: SHARED
    | OWN[CHAT]
    | {
        "one call": {"parallel_tool_calls": False},
        "hidden thought": {"include_reasoning": False},
    },
    MESSAGES: SAMPLING
    | {
        "stop": {"stop_sequences": ["two", "e 🥹 o"]},
        "short": {"max_tokens": 9},
        "hidden thought": {"thinking": {"type": "adaptive", "display": "omitted"}},
        "stop that is kept": {"stop_sequences": ["ne t"], "include_stop_str_in_output": True},
    },
    RESPONSES: SAMPLING
    | {
        "stop": {"stop": ["two", "e 🥹 o"]},
        "short": {"max_output_tokens": 9},
        "one call": {"parallel_tool_calls": False},
        "logprobs": {"top_logprobs": 2},
        "in the background": {"background": True},
        "not kept": {"store": False},
    },
}
# What is written anew for each answer, or says only that it is a part.
_UNLIKE = {"id", "call_id", "created", "created_at", "completed_at", "object"}


def join(old: Any, new: Any) -> Any:
    if old is None or new is None:
        return new if old is None else old
    if isinstance(old, dict):
        return {
            name: join(old.get(name), new.get(name))
            if name not in ("index", "finish_reason", "stop_reason", "role")
            else (new.get(name) if new.get(name) is not None else old.get(name))
            for name in {**old, **new}
        }
    if isinstance(old, list):
        return old + new
    return old + new if isinstance(old, str) else new


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a stream into one answer."""
    answer: dict[str, Any] = {}
    choices: dict[int, Any] = {}
    for event in events:
        assert "error" not in event
        for choice in event.pop("choices"):
            if "delta" in choice:
                choice["message"] = choice.pop("delta")
            index = choice["index"]
            choices[index] = join(choices.get(index), choice)
        for name, value in event.items():
            if value is not None:
                answer[name] = value
    for choice in choices.values():
        fragments = choice.get("message", {}).get("tool_calls")
        if fragments:
            choice["message"]["tool_calls"] = joined_calls(fragments)
    return answer | {"choices": [choices[index] for index in sorted(choices)]}


def joined_calls(fragments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: dict[int, Any] = {}
    for fragment in fragments:
        index = fragment.pop("index")
        calls[index] = join(calls.get(index), fragment)
    return [calls[index] for index in sorted(calls)]


def comparable(value: Any, *, keeps_ids: bool) -> Any:
    """Leave out what differs from answer to answer, and nulls: a stream need not send them."""
    if isinstance(value, list):
        return [comparable(item, keeps_ids=keeps_ids) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, item in value.items():
        if name in _UNLIKE and not (keeps_ids and name == "id"):
            continue
        # A chat's stream begins with an empty text before it is known whether there is any.
        if item is None or (name == "content" and item == ""):
            continue
        found[name] = comparable(item, keeps_ids=keeps_ids)
    if "timing" in found:
        found["timing"] = sorted(found["timing"])
    return found


def normalized(answer: dict[str, Any], *, keeps_ids: bool) -> dict[str, Any]:
    found: dict[str, Any] = comparable(answer, keeps_ids=keeps_ids)
    usage = found["usage"]
    # The second one may find the first one's prompt in the cache, which Anthropic counts apart.
    usage["prompt"] = usage.pop("input_tokens", 0) + usage.pop("cache_read_input_tokens", 0)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        usage.pop(name, None)
    return found


def streamed_answer(front: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path in ROUTES:
        usage = {"stream_options": {"include_usage": True}}
        return put_together(front.events(path, body | usage))
    response = front.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    events = named_events(response.text)
    if path == MESSAGES:
        return joined_message(events)
    if body.get("background"):
        assert events.pop(1)["type"] == "response.queued"
        events[0]["response"]["status"] = "in_progress"
    return joined_response(events)


def whole_answer(front: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = front.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    if body.get("background"):
        # The events are followed to their end, and then the response is asked for.
        url = f"{front.url}{path}/{answer['id']}"
        front.get(f"{url}?stream=true")
        answer = front.get(url).json()
    return answer


def check(front: Any, path: str, body: dict[str, Any]) -> None:
    is_named = "request_id" in body
    expected = normalized(whole_answer(front, path, body), keeps_ids=is_named)
    found = normalized(streamed_answer(front, path, body), keeps_ids=is_named)
    for message in (choice.get("message", {}) for choice in [*expected.get("choices", ())]):
        assert message.get("role", "assistant") == "assistant"
    if is_named:
        drop_call_ids(expected)
        drop_call_ids(found)
    assert found == expected


def drop_call_ids(answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]


def sets_of(features: dict[str, Any], most: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of no feature, of each one, and of each few up to `most`."""
    for size in range(most + 1):
        for names in combinations(features, size):
            fields: dict[str, Any] = {}
            for name in names:
                fields |= features[name]
            yield fields


def chat(text: str, tools: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"say:{text}"}]}
    if tools is not None:
        body["tools"] = [{"type": "function", "function": function} for function in FUNCTIONS]
        named = {"type": "function", "function": {"name": "weather"}}
        body["tool_choice"] = {"auto": "auto", "required": "required"}.get(tools, named)
    return body


def message(text: str, tools: str | None) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"say:{text}"}], "max_tokens": 400}
    if tools is not None:
        body["tools"] = [
            {"name": function["name"], "input_schema": function.get("parameters", {})}
            for function in FUNCTIONS
        ]
        named = {"type": "tool", "name": "weather"}
        body["tool_choice"] = {"auto": {"type": "auto"}, "required": {"type": "any"}}.get(
            tools, named
        )
    return body


def response(text: str, tools: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"input": f"say:{text}"}
    if tools is not None:
        body["tools"] = [{"type": "function", **function} for function in FUNCTIONS]
        named = {"type": "function", "name": "weather"}
        body["tool_choice"] = {"auto": "auto", "required": "required"}.get(tools, named)
    return body


BODIES: dict[str, Callable[[str, str | None], dict[str, Any]]] = {
    CHAT: chat,
    MESSAGES: message,
    RESPONSES: response,
}


def tools_of(said: str) -> str | None:
    if said in ("text", "thought"):
        return None
    return said if said in ("required", "by name") else "auto"


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_put_together_is_the_whole_answer(front: Any, path: str) -> None:
    """Cases T01, T05 and T07 (characters and stop strings over several tokens) among them."""
    for fields in sets_of(SHARED | OWN[path], 2):
        check(front, path, ROUTES[path] | fields)


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("path", CONVERSATIONS)
def test_so_it_is_in_conversations(talker: Any, path: str, said: str) -> None:
    """Reasoning, calls and what only looks like one, in all three APIs.

    Cases G07, G11, G13 and H17, with each of the other features.
    """
    body = BODIES[path](SAID[said], tools_of(said))
    for fields in sets_of(CONVERSATIONS[path], 2 if said == "all" else 1):
        if not (fields.get("background") and fields.get("store") is False):  # a contradiction
            check(talker, path, body | fields)


def test_a_scored_prompt(front: Any) -> None:
    check(
        front,
        COMPLETIONS,
        {"prompt": ["a é", "b"], "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2},
    )


def test_an_echoed_beginning(talker: Any) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "say:two é "}]
    for fields in sets_of(CONVERSATIONS[CHAT], 1):
        body = {"messages": messages, "echo": True, "continue_final_message": True, **fields}
        check(talker, CHAT, body | {"max_tokens": 7})


def test_a_difference_would_be_found() -> None:
    chunk = {"choices": [{"index": 0, "text": "a", "finish_reason": None, "logprobs": {"x": [1]}}]}
    last = {"choices": [{"index": 0, "text": "b", "finish_reason": "stop", "logprobs": {"x": [2]}}]}
    (choice,) = put_together([chunk, last])["choices"]
    assert choice == {
        "index": 0,
        "text": "ab",
        "finish_reason": "stop",
        "logprobs": {"x": [1, 2]},
    }
    fragments = [
        {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": "{"}},
        {"index": 1, "id": "d", "function": {"name": "g", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": "}"}},
    ]
    assert joined_calls(fragments) == [
        {"id": "c", "function": {"name": "f", "arguments": "{}"}},
        {"id": "d", "function": {"name": "g", "arguments": "{}"}},
    ]
