"""Sampling fields over HTTP, and what of them is refused. The scripted model ignores them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PATHS = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", PATHS)
def test_every_sampling_field_is_taken(front: Any, path: str) -> None:
    fields = {
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -100, "6": 0.5},
        "allowed_token_ids": [1, 2, 256],
        "bad_words": ["q"],
        "min_tokens": 1,
        "max_tokens": 2,
    }
    response = front.post(path, PATHS[path] | fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"191222": -100}),
        ("logit_bias", {"99999999": 5}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"5": 1, "05": 2}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [257]),
        ("allowed_token_ids", [-1]),
        ("logprob_token_ids", []),
        ("logprob_token_ids", [257]),
        ("logprob_token_ids", [1] * 129),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 129),
        ("bad_words", "x"),
        ("presence_penalty", 2.1),
        ("presence_penalty", False),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.5),
        ("repetition_penalty", True),
    ],
)
def test_what_is_outside_the_limits_is_a_400_that_names_the_field(
    front: Any, path: str, field: str, value: Any
) -> None:
    """Case S05: a logit_bias beyond the vocabulary took down the engine for everybody."""
    response = front.post(path, PATHS[path] | {field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(field)
    assert field in error["message"]
    assert front.post(path, PATHS[path]).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", '"NaN"', "1e999"])
def test_numbers_that_are_none(front: Any, number: str) -> None:
    """Case S11: NaN passed one-sided checks, and the error could not be written as JSON."""
    fields = [
        *("temperature", "top_p", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ]
    bodies = [f'{{"prompt":"x","{field}":{number}}}' for field in fields]
    bodies.append(f'{{"prompt":"x","logit_bias":{{"5":{number}}}}}')
    for body in bodies:
        response = httpx.post(
            f"{front.url}/v1/completions",
            content=body,
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 400, body
        json.loads(response.text, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    ("stop", "status"),
    [("", 400), ([""], 400), (["", "\n"], 400), ([], 200), (None, 200), (list("vwxyz"), 200)],
)
def test_stop_strings_that_are_empty(front: Any, stop: Any, status: int) -> None:
    """Case S21: an empty stop string ended every answer at once. Up to 16 are taken."""
    response = front.post("/v1/completions", {"prompt": "abc", "stop": stop})
    assert response.status_code == status
    if status == 200:
        assert response.json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize(
    "prompt", [[-1], [[-1]], [1_000_000_000], [9223372036854775808], [1.5], [True]]
)
def test_token_ids_that_are_none(front: Any, prompt: Any) -> None:
    """Case S07: ids below zero or beyond the vocabulary passed, and an index failed."""
    response = front.post("/v1/completions", {"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "status"),
    [(60, 1000, 200), (511, 16, 200), (512, 1, 400), (600, None, 400)],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_cap_beyond_the_context_is_cut_and_a_prompt_beyond_it_is_refused(
    front: Any, path: str, num_prompt_tokens: int, max_tokens: int | None, status: int
) -> None:
    """Case S15: clients send max_tokens as a cap; and no message told of a negative number."""
    if path == "/v1/completions":
        body: dict[str, Any] = {"prompt": "x" * num_prompt_tokens}
    else:
        # "user=", the text, ";" and "a=", byte by byte.
        text = "x" * (num_prompt_tokens - 8)
        body = {"messages": [{"role": "user", "content": text}]}
    response = front.post(path, body | {"max_tokens": max_tokens, "ignore_eos": True})
    assert response.status_code == status, response.text
    if status == 200:
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == num_prompt_tokens
        assert usage["completion_tokens"] == 512 - num_prompt_tokens
        assert response.json()["choices"][0]["finish_reason"] == "length"
    else:
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert str(num_prompt_tokens) in error["message"]
        assert "-" not in error["message"].replace("--max-model-len", "")


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/completions", {"prompt_logprobs": -1}, 400),
        ("/v1/completions", {"prompt_logprobs": 1_000_000}, 400),
        ("/v1/chat/completions", {"prompt_logprobs": 21}, 400),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, 400),
        ("/v1/completions", {"logprobs": -1}, 400),
        ("/v1/completions", {"stream": True, "prompt_logprobs": 1}, 200),
    ],
)
def test_no_more_than_a_few_alternatives(
    front: Any, path: str, fields: dict[str, Any], status: int
) -> None:
    """Case X09: -1 asked for the whole vocabulary at each position of the prompt."""
    assert front.post(path, PATHS[path] | fields).status_code == status
