"""Every way to get an error, and that it has OpenAI's shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo_server.api.body import _beginning

JSON = {"Content-Type": "application/json"}
ROUTES = ["/v1/completions", "/v1/chat/completions"]


def post_raw(front: Any, path: str, body: bytes) -> httpx.Response:
    return httpx.post(front.url + path, content=body, headers=JSON, timeout=30)


def assert_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_unknown_routes_and_methods(front: Any) -> None:
    assert_error(httpx.get(front.url + "/nope"), 404)
    assert_error(httpx.post(front.url + "/v1/nope", json={}), 404)
    response = httpx.get(front.url + "/v1/completions")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"
    assert_error(httpx.get(front.url + "/v1/models/"), 404)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
        b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"temperature":-Infinity}',
        b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"temperature":"NaN"}',
        b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"top_p":1e999}',
        b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"logit_bias":{"1":NaN}}',
        b'{"prompt":"\xff","messages":[{"role":"user","content":"\xff"}]}',
        b'{"prompt":"\\ud83d","messages":[{"role":"user","content":"emoji \\ud83d"}]}',
        b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"stop":"\\udc00"}',
        b'{"prompt":"x","messages":[{"role":"user","content":"x"}],"metadata":{"a":"\\ud83d"}}',
    ],
)
def test_bodies_that_are_no_request(front: Any, path: str, body: bytes) -> None:
    assert assert_error(post_raw(front, path, body), 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("half", ["\\ud83d", "\\udc00", "x\\ud83dx"])
def test_a_lone_surrogate_is_named(front: Any, half: str) -> None:
    body = b'{"prompt":"' + half.encode() + b'"}'
    message = assert_error(post_raw(front, "/v1/completions", body), 400)["message"]
    assert "lone surrogate \\ud" in message


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ["a"] * 1025}, "prompt", "1024"),
        ({"prompt": "x", "stop": ["s"] * 17}, "stop", "16"),
        ({"prompt": "x", "stop": 5}, "stop", "a string or a list of strings"),
        ({"prompt": [[1], "a"]}, "prompt[1]", "valid list"),
        ({"prompt": [[1], []]}, "prompt[1]", "at least 1 item"),
        ({"prompt": [1, "a"]}, "prompt[1]", "valid integer"),
        ({"prompt": ["a", 1]}, "prompt[1]", "valid string"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": 5}, "prompt", "a string, a list of token ids"),
        ({"prompt": None}, "prompt", "a string, a list of token ids"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "boolean",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].type",
            "missing",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "list of parts"),
    ],
)
def test_what_is_wrong_in_a_union_is_named(
    front: Any, body: dict[str, Any], param: str, words: str
) -> None:
    path = ROUTES["messages" in body]
    error = assert_error(front.post(path, body), 400)
    assert error["param"] == param
    assert param in error["message"]
    assert words in error["message"]


def test_a_surrogate_pair_is_a_character(front: Any) -> None:
    response = post_raw(front, "/v1/completions", b'{"prompt":"\\ud83d\\ude00"}')
    assert response.json()["choices"][0]["text"] == "😀"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"prompt":"x","metadata":' + b'{"a":' * 1000 + b"1" + b"}" * 1001,
        b'{"prompt":"x","metadata":' + b"[" * 100 + b"]" * 100 + b"}",
    ],
)
def test_deep_nesting_is_refused(front: Any, body: bytes) -> None:
    assert "100" in assert_error(post_raw(front, "/v1/completions", body), 400)["message"]


def test_brackets_in_strings_are_not_nesting(front: Any) -> None:
    body = {"prompt": '"[{' * 50, "max_tokens": 1, "metadata": [[{"a": "\\"}]]}
    assert front.post("/v1/completions", body).status_code == 200


def test_a_large_body_is_refused(front: Any) -> None:
    body = b'{"prompt":"' + b"x" * (16 * 1024 * 1024) + b'"}'
    assert "16" in assert_error(post_raw(front, "/v1/completions", body), 413)["message"]


def test_a_compressed_body_is_refused(front: Any) -> None:
    headers = {**JSON, "Content-Encoding": "gzip"}
    response = httpx.post(front.url + "/v1/completions", content=b"x", headers=headers)
    assert "gzip" in assert_error(response, 415)["message"]


def test_the_content_type_must_be_json(front: Any) -> None:
    response = httpx.post(front.url + "/v1/completions", content=b'{"prompt":"x"}')
    assert "application/json" in assert_error(response, 400)["message"]


@pytest.mark.parametrize(
    ("name", "status"), [("nope", 404), ("", 404), (5, 400), (None, 200), ("bytes", 200)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_model_names(front: Any, name: Any, status: int, stream: bool) -> None:
    response = front.post("/v1/completions", {"prompt": "x", "model": name, "stream": stream})
    if status == 200:
        assert response.status_code == 200
        return
    error = assert_error(response, status)
    assert error["param"] == "model"
    if status == 404:
        assert error["code"] == "model_not_found"
        assert "bytes" in error["message"]


def test_model_routes(front: Any) -> None:
    (card,) = front_get(front, "/v1/models")["data"]
    assert card["id"] == "bytes"
    assert card["max_model_len"] == 512
    assert front_get(front, "/v1/models/bytes") == card
    assert assert_error(httpx.get(front.url + "/v1/models/a/b"), 404)["code"] == "model_not_found"


def test_health_routes(front: Any) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert front_get(front, path)["status"] == "ok"
        assert httpx.head(front.url + path).status_code == 200
    assert httpx.post(front.url + "/ping").status_code == 200
    assert front_get(front, "/version") == {"version": "0.1.0"}


@pytest.mark.parametrize("path", ROUTES)
def test_a_step_that_breaks_in_a_stream_is_an_error_in_the_stream(front: Any, path: str) -> None:
    body = {"prompt": "crack it", "messages": [{"role": "user", "content": "crack it"}]}
    *events, last = front.events(path, body)
    assert last["error"]["type"] == "server_error"
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons
    assert not any(reasons)


def front_get(front: Any, path: str) -> Any:
    response = httpx.get(front.url + path)
    assert response.status_code == 200
    return response.json()


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.5,
        "short",
        "long " * 100,
        [],
        [1] * 1000,
        ["a b" * 3] * 50,
        [[[1, 2]] * 30] * 30,
        {"a": {"b": [1] * 100}, "c": 2},
        {f"key {number}": {} for number in range(100)},
    ],
)
def test_what_is_shown_of_a_value_is_its_beginning(value: Any) -> None:
    assert repr(_beginning(value))[:80] == repr(value)[:80]


def test_a_huge_value_is_not_written_out() -> None:
    """That took seconds in which no stream went on."""
    sizes = [len(repr(_beginning(value))) for value in ([[0] * 100] * 100_000, {"a": [""] * 10**6})]
    assert max(sizes) < 1000
