"""Log-probabilities of prompts over HTTP, as vLLM and as OpenAI's old echo tell them.

The scripted model gives every token -0.5, itself as the likeliest, and the next ids after it.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def ids_of(front: Any, prompt: str) -> list[int]:
    body = {"prompt": prompt, "return_token_ids": True, "max_tokens": 1}
    ids: list[int] = front.post(COMPLETIONS, body).json()["choices"][0]["prompt_token_ids"]
    return ids


def test_prompt_logprobs_of_a_completion(front: Any) -> None:
    body = {"prompt": "hé!", "prompt_logprobs": 2, "max_tokens": 1}
    choice = front.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["text"] == "h"
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    ids = ids_of(front, "hé!")
    for token_id, position in zip(ids[1:], rest, strict=True):
        assert position[str(token_id)]["logprob"] == -0.5
        assert position[str(token_id)]["rank"] == 1
        assert position[str((token_id + 1) % 257)]["rank"] == 2
    assert rest[-1][str(ids[-1])]["decoded_token"] == "!"
    alone = front.post(COMPLETIONS, body | {"prompt_logprobs": 0, "max_tokens": 1}).json()
    assert [list(p or {}) for p in alone["choices"][0]["prompt_logprobs"]] == [
        [],
        *([str(token_id)] for token_id in ids[1:]),
    ]


def test_prompt_logprobs_of_a_chat(front: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "prompt_logprobs": 1,
        "return_token_ids": True,
    }
    whole = front.post(CHAT, body).json()
    assert len(whole["prompt_logprobs"]) == len(whole["prompt_token_ids"])
    events = front.events(CHAT, body)
    told = [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event]
    assert told == [whole["prompt_logprobs"]]
    plain = front.post(CHAT, {"messages": body["messages"]}).json()
    assert "prompt_logprobs" not in plain


def test_a_prompt_of_one_token_has_nothing_but_its_first(front: Any) -> None:
    body = {"prompt": "x", "prompt_logprobs": 1}
    assert front.post(COMPLETIONS, body).json()["choices"][0]["prompt_logprobs"] == [None]


def _generation_tokens(front: Any) -> str:
    text = httpx.get(front.url + "/metrics").text
    (line,) = [
        line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")
    ]
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt(front: Any, stream: bool) -> None:
    """Case T13: max_tokens 0 killed an engine, and later leaked a token into text and usage."""
    body = {
        "prompt": "Your answer: Yes",
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
        "temperature": 0,
        "stream_options": {"include_usage": True} if stream else None,
    }
    counted = _generation_tokens(front)
    if stream:
        *events, last = front.events(COMPLETIONS, body)
        (choice,) = [choice for event in events for choice in event["choices"]]
        usage = last["usage"]
    else:
        whole = front.post(COMPLETIONS, body).json()
        (choice,), usage = whole["choices"], whole["usage"]
    assert choice["text"] == body["prompt"]
    assert choice["finish_reason"] == "length"
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, 16)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("Your answer: Yes")
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 15
    assert logprobs["top_logprobs"][:2] == [None, {"o": -0.5}]
    assert logprobs["text_offset"] == list(range(16))
    assert _generation_tokens(front) == counted
    assert front.post(COMPLETIONS, {"prompt": "alive"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_goes_on_into_the_answer(front: Any, stream: bool, n: int) -> None:
    """Case T15: tokens of an echo carried pieces of earlier ones."""
    body = {
        "prompt": ["\n1. Carol has 20 é", "x"],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 5,
        "n": n,
    }
    if stream:
        found: dict[int, dict[str, Any]] = {}
        for event in front.events(COMPLETIONS, body):
            for choice in event["choices"]:
                old = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
                old["text"] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    old["logprobs"][name] = old["logprobs"].get(name, []) + values
        choices = [found[index] for index in range(2 * n)]
    else:
        choices = front.post(COMPLETIONS, body).json()["choices"]
    for index, choice in enumerate(choices):
        prompt = body["prompt"][index // n]
        expected = (prompt + prompt)[: len(prompt) + 5]
        assert choice["text"] == expected
        logprobs = choice["logprobs"]
        assert len({len(values) for values in logprobs.values()}) == 1
        letters = expected.replace("é", "éé") + ("" if index < n else "?")
        assert len(logprobs["tokens"]) == len(letters)
        assert logprobs["token_logprobs"][0] is None
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith(("bytes:", "<")):
                assert expected[offset : offset + len(token)] == token


def test_tokens_as_ids(front: Any) -> None:
    """Case S19: two tokens of one spelling were one key; ids tell them apart."""
    ids = ids_of(front, "ab")
    body = {"prompt": "ab", "return_tokens_as_token_ids": True, "max_tokens": 1}
    logprobs = front.post(COMPLETIONS, body | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{ids[0]}"]
    assert list(logprobs["top_logprobs"][0]) == [f"token_id:{ids[0] + i}" for i in range(2)]
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "return_tokens_as_token_ids": True,
        "logprobs": True,
        "top_logprobs": 3,
        "max_tokens": 1,
    }
    (token,) = front.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    names = [top["token"] for top in token["top_logprobs"]]
    assert names[0] == token["token"]
    assert len({*names}) == 3
    assert all(name.startswith("token_id:") for name in names)


@pytest.mark.parametrize(
    ("limit", "left"), [(3, "cde"), (5, "abcde"), (100, "abcde"), (-1, "abcde")]
)
def test_a_prompt_is_cut_at_its_start(front: Any, limit: int, left: str) -> None:
    body = {"prompt": "abcde", "truncate_prompt_tokens": limit, "echo": True, "max_tokens": 1}
    answer = front.post(COMPLETIONS, body).json()
    assert answer["choices"][0]["text"] == left + left[0]
    assert answer["usage"]["prompt_tokens"] == len(left)


def test_a_prompt_that_is_too_long_is_cut_to_what_the_context_leaves(front: Any) -> None:
    long = "x" * 600
    body = {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 12}
    answer = front.post(COMPLETIONS, body).json()
    assert answer["usage"]["prompt_tokens"] == 500
    assert answer["usage"]["completion_tokens"] == 12
    chat = {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 20}
    assert front.post(CHAT, chat).json()["usage"]["prompt_tokens"] == 20
