"""Sampling fields over HTTP, and what of them is refused. The scripted model ignores them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from octavo_server.api.protocol import SamplingBody

PATHS = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
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
        "ignore_eos": True,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 1,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 4,
        "cache_salt": "s",
        "priority": 0,
        "request_id": "mine",
        "timeout": 60,
        "structured_outputs": {"regex": ".*"},
    }
    assert SamplingBody.model_fields.keys() - fields.keys() <= {
        *("temperature", "top_p", "stop_token_ids", "include_timing"),
        *(name for name in SamplingBody.model_fields if name.startswith("guided_")),
    }
    response = front.post(path, PATHS[path] | fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", PATHS)
def test_what_can_be_seen_of_them_is_the_same_on_every_route(talker: Any, path: str) -> None:
    def ask(**fields: Any) -> tuple[int, str]:
        response = talker.post(path, _saying(path, "one two three") | fields)
        assert response.status_code == 200, response.text
        return _num_prompt_tokens(response.json()), response.text

    num_tokens, text = ask()
    assert "one two three" in text
    assert ask(truncate_prompt_tokens=5)[0] == 5 < num_tokens
    assert "one two" in (ended := ask(stop_token_ids=[71])[1])  # an h
    assert "three" not in ended
    assert '"timing":{"queue_seconds"' in ask(include_timing=True)[1]
    # A token that is a control token is a part of the text only where that is asked for.
    assert "<eos>" not in ask(ignore_eos=True, min_tokens=20)[1]
    late = talker.post(path, _saying(path, "slow" * 80) | {"timeout": 0.1})
    assert late.status_code == 504, late.text


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
    ],
)
def test_two_constraints_contradict_each_other_on_every_route(
    talker: Any, path: str, own: dict[str, Any]
) -> None:
    body = _saying(path, "{}")
    for fields in ({"structured_outputs": {"regex": "a"}}, {"guided_regex": "a"}):
        assert talker.post(path, body | fields).status_code == 200
        response = talker.post(path, body | own | fields)
        assert response.status_code == 400, response.text
        assert "both say what the answer has to look like" in response.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncation_side", "right"),
        ("return_prompt_text", True),
        ("use_beam_search", True),
        ("thinking_token_budget", 5),
        ("vllm_xargs", {"a": 1}),
        ("request_id", "two words"),
        ("request_id", "x" * 129),
        ("request_id", ""),
        ("request_id", 5),
    ],
)
def test_what_would_do_nothing_is_refused_by_name(
    front: Any, path: str, field: str, value: Any
) -> None:
    response = front.post(path, PATHS[path] | {field: value})
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("prompt_logprobs", 1),
        ("return_token_ids", True),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_fields_of_other_routes_are_refused_by_name(
    front: Any, path: str, field: str, value: Any
) -> None:
    response = front.post(path, PATHS[path] | {field: value})
    assert response.status_code == 400, response.text
    assert f"{field} is not supported" in response.json()["error"]["message"]


def _saying(path: str, text: str) -> dict[str, Any]:
    """A body that makes the scripted model say `text`."""
    if path == "/v1/completions":
        return {"prompt": text, "max_tokens": 400}
    content = f"say:{text}"
    if path == "/v1/responses":
        return {"input": content}
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 400}


def _num_prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    return sum(usage.get(name, 0) for name in names)


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
    assert error.get("param", field).startswith(field)  # Anthropic's errors have none
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
    # In a chat "user=", the text, ";" and "a=", byte by byte.
    text = "x" * (num_prompt_tokens - (0 if path == "/v1/completions" else 8))
    body: dict[str, Any] = {"ignore_eos": True}
    if path == "/v1/completions":
        body |= {"prompt": text, "max_tokens": max_tokens}
    elif path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": max_tokens}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens or 16}
    response = front.post(path, body)
    assert response.status_code == status, response.text
    answer = response.json()
    if status == 200:
        usage = answer["usage"]
        assert _num_prompt_tokens(answer) == num_prompt_tokens
        num_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
        assert num_tokens == 512 - num_prompt_tokens
        reason = {
            "/v1/responses": lambda: answer["incomplete_details"]["reason"],
            "/v1/messages": lambda: answer["stop_reason"],
        }.get(path, lambda: answer["choices"][0]["finish_reason"])()
        assert reason in ("length", "max_output_tokens", "model_context_window_exceeded")
    else:
        error = answer["error"]
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
        assert "512" in error["message"]
        assert str(num_prompt_tokens) in error["message"]
        assert "-" not in error["message"].replace("--max-model-len", "")
