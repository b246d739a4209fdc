"""``/v1/completions`` over HTTP. The scripted model repeats the prompt and then ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

PATH = "/v1/completions"


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def test_a_completion(front: Any) -> None:
    response = front.post(PATH, {"prompt": "hello world", "max_tokens": 5})
    body = response.json()
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["object"] == "text_completion"
    assert body["model"] == "bytes"
    assert body["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 5,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert response.headers["x-request-id"] == body["id"]


def test_max_tokens_is_16_by_default(front: Any) -> None:
    body = front.post(PATH, {"prompt": "x" * 40, "max_tokens": None}).json()
    assert body["choices"][0]["text"] == "x" * 16


def test_the_end_token_is_counted_but_not_shown(front: Any) -> None:
    body = front.post(PATH, {"prompt": "abc"}).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 4


def test_prompts_and_choices_are_numbered_prompt_by_prompt(front: Any) -> None:
    body = front.post(PATH, {"prompt": ["one", "three"], "n": 2}).json()
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [(0, "one"), (1, "one"), (2, "three"), (3, "three")]
    assert body["usage"]["prompt_tokens"] == len("one") + len("three")
    assert body["usage"]["completion_tokens"] == 2 * (4 + 6)


def test_token_ids_are_a_prompt(front: Any) -> None:
    shown = front.post(PATH, {"prompt": "ab", "return_token_ids": True}).json()["choices"][0]
    ids = shown["prompt_token_ids"]
    assert shown["token_ids"] == [*ids, 256]
    assert front.post(PATH, {"prompt": ids}).json()["choices"][0]["text"] == "ab"
    both = front.post(PATH, {"prompt": [ids, ids[:1]]}).json()["choices"]
    assert [choice["text"] for choice in both] == ["ab", "a"]


def test_a_stream_gives_the_same_text(front: Any) -> None:
    body = {"prompt": ["größe 😀", "two"], "n": 2, "max_tokens": 30}
    whole = front.post(PATH, body).json()
    events = front.events(PATH, body)
    for choice in whole["choices"]:
        assert text_of(events, choice["index"]) == choice["text"]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"] * 4
    assert all("usage" not in event for event in events)


def test_include_usage(front: Any) -> None:
    body = {"prompt": "a usage", "stream_options": {"include_usage": True}}
    *events, last = front.events(PATH, body)
    assert last["choices"] == []
    assert last["usage"] == front.post(PATH, {"prompt": "b usage"}).json()["usage"]
    assert all(event["usage"] is None for event in events)


def test_cached_tokens_are_reported(front: Any) -> None:
    body = {"prompt": "a prompt that is longer than two blocks of tokens", "max_tokens": 1}
    front.post(PATH, body)
    usage = front.post(PATH, body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48


def test_a_stop_string_never_shows(front: Any) -> None:
    body = {"prompt": "one two three", "stop": ["two"], "max_tokens": 20}
    choice = front.post(PATH, body).json()["choices"][0]
    assert choice["text"] == "one "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert text_of(front.events(PATH, body)) == "one "
    kept = front.post(PATH, body | {"include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == "one two"


def test_logprobs(front: Any) -> None:
    body = {"prompt": "hi you", "logprobs": 2, "max_tokens": 4}
    logprobs = front.post(PATH, body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", " ", "y"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5}
    chunks = [event["choices"][0] for event in front.events(PATH, body)]
    offsets = [o for chunk in chunks if chunk["logprobs"] for o in chunk["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3]
    zero = front.post(PATH, body | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    assert zero["top_logprobs"][0] == {"h": -0.5}


def test_logprobs_of_characters_of_several_tokens(front: Any) -> None:
    body = {"prompt": "a🥹é!", "logprobs": 2, "max_tokens": 20}
    logprobs = front.post(PATH, body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 2, 3, 4]
    assert all(len(tops) == 2 for tops in logprobs["top_logprobs"])
    chunks = [event["choices"][0]["logprobs"] for event in front.events(PATH, body)]
    for name, values in logprobs.items():
        assert [value for chunk in chunks if chunk for value in chunk[name]] == values


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo(front: Any, max_tokens: int) -> None:
    body = {"prompt": ["abcd", "xy"], "echo": True, "max_tokens": max_tokens}
    whole = front.post(PATH, body).json()
    expected = ["abcd" + "abcd"[:max_tokens], "xy" + "xy"[:max_tokens]]
    assert [choice["text"] for choice in whole["choices"]] == expected
    events = front.events(PATH, body | {"stream_options": {"include_usage": True}})
    assert [text_of(events, index) for index in range(2)] == expected
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    if max_tokens == 0:
        assert whole["usage"]["completion_tokens"] == 0
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2


def test_echo_of_token_ids_is_text(front: Any) -> None:
    ids = front.post(PATH, {"prompt": "é!", "return_token_ids": True}).json()["choices"][0]
    body = {"prompt": ids["prompt_token_ids"], "echo": True, "max_tokens": 0}
    assert front.post(PATH, body).json()["choices"][0]["text"] == "é!"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, None),
        ({"prompt": [1, "a"]}, None),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": [True]}, None),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": None}, None),
        ({}, "prompt"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1_000_000}, "prompt_logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "n": 100}, "n"),
        ({"prompt": "x", "min_tokens": 20}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_before_the_stream(
    front: Any, fields: dict[str, Any], param: str | None, stream: bool
) -> None:
    response = front.post(PATH, fields | {"stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]


def test_a_prompt_that_is_too_long_has_a_code(front: Any) -> None:
    error = front.post(PATH, {"prompt": "x" * 600}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert "600" in error["message"]


def test_neutral_values_of_unsupported_fields_are_accepted(front: Any) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "priority": 0,
        "detokenize": True,
        "length_penalty": 1.0,
        "early_stopping": False,
        "reasoning_effort": "none",
        "guided_json": None,
        "logit_bias": {},
        "best_of": 1,
        "suffix": None,
        "user": "somebody",
        "a_field_nobody_knows": {"x": 1},
    }
    assert front.post(PATH, {"prompt": "x", **neutral}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 1),
        ("typical_p", 0.9),
        ("length_penalty", 2),
        ("detokenize", False),
        ("reasoning_effort", "low"),
        ("enable_thinking", False),
    ],
)
def test_what_would_do_nothing_is_refused_by_name(front: Any, name: str, value: Any) -> None:
    response = front.post(PATH, {"prompt": "x", name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


def test_a_failing_step_is_a_500_for_its_request_alone(front: Any) -> None:
    response = front.post(PATH, {"prompt": "break it"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert front.post(PATH, {"prompt": "fine"}).json()["choices"][0]["text"] == "fine"


def test_raw_bytes_of_a_stream(front: Any) -> None:
    """Each event is one line of JSON and an empty line, as every SSE reader wants."""
    text = front.post(PATH, {"prompt": "a\nb", "stream": True}).text
    for event in text.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: ")
        assert "\n" not in event
        if event != "data: [DONE]":
            json.loads(event.removeprefix("data: "))
