"""A stream, put together, is the answer that comes in one piece: on every route, in every field.

Nothing here knows what a feature does. A stream's chunks are joined by one rule (text and
lists are appended, objects are joined field by field, of other values the last one that is
not null counts), and what comes out has to be the whole answer.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

ROUTES = {
    "/v1/completions": {"prompt": "größe 🥹 one two three"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "größe 🥹 one two three"}]},
}
# Fields of both routes, and of one of them.
SHARED = {
    "n": {"n": 3},
    "stop": {"stop": ["two", "e 🥹 o"]},
    "stop that is kept": {"stop": ["ne t"], "include_stop_str_in_output": True},
    "short": {"max_tokens": 7},
    "ids": {"return_token_ids": True},
    "prompt logprobs": {"prompt_logprobs": 2},
    "tokens as ids": {"return_tokens_as_token_ids": True},
    "truncated": {"truncate_prompt_tokens": 9},
    "seed": {"seed": 3, "temperature": 0.5, "frequency_penalty": 1.0, "bad_words": ["x"]},
    "slow": {"cache_salt": "slow"},
}
OWN = {
    "/v1/completions": {
        "logprobs": {"logprobs": 3},
        "echo": {"echo": True},
        "prompts": {"prompt": ["one", "two three", "é"]},
    },
    "/v1/chat/completions": {"logprobs": {"logprobs": True, "top_logprobs": 2}},
}
CASES = [
    (path, names)
    for path in ROUTES
    for size in (0, 1, 2)
    for names in combinations([*SHARED, *OWN[path]], size)
]
# What is written anew for each answer, or says only that it is a part.
_UNLIKE = {"id", "created", "object"}


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
    return answer | {"choices": [choices[index] for index in sorted(choices)]}


def without_nulls(value: Any) -> Any:
    """Leave out fields that are null: a stream need not send them."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def check(front: Any, path: str, body: dict[str, Any]) -> None:
    whole = front.post(path, body)
    assert whole.status_code == 200, whole.text
    usage = {"stream_options": {"include_usage": True}}
    streamed = put_together(front.events(path, body | usage))
    expected = {name: value for name, value in whole.json().items() if name not in _UNLIKE}
    found = {name: value for name, value in streamed.items() if name not in _UNLIKE}
    # The second one may find the first one's prompt in the cache.
    for answer in (expected, found):
        answer["usage"].pop("prompt_tokens_details")
    assert without_nulls(found) == without_nulls(expected)


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_put_together_is_the_whole_answer(front: Any, path: str) -> None:
    """Cases T01, T05 and T07 (characters and stop strings over several tokens) among them."""
    features = SHARED | OWN[path]
    for case_path, names in CASES:
        if case_path == path:
            body = dict(ROUTES[path])
            for name in names:
                body |= features[name]
            check(front, path, body)


def test_a_scored_prompt(front: Any) -> None:
    check(
        front,
        "/v1/completions",
        {"prompt": ["a é", "b"], "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2},
    )


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
