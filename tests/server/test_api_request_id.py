from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo_core.config import resolve_config
from support.asgi import call, guarded_app

PATH = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_comes_back(front: Any, stream: bool) -> None:
    headers = {"x-request-id": "trace-1/a:b"}
    response = front.post(PATH, {"prompt": "x", "stream": stream}, headers=headers)
    assert response.headers.get_list("x-request-id") == ["trace-1/a:b"]
    if not stream:
        assert response.json()["id"].startswith("cmpl-")


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_in_the_body_names_the_answer(front: Any, stream: bool) -> None:
    """Two requests may have the same one: it is theirs to keep apart."""
    body = {"prompt": "x", "stream": stream, "request_id": "mine"}
    for _ in range(2):
        response = front.post(PATH, body)
        assert response.headers["x-request-id"] == "mine"
        assert '"id":"cmpl-mine"' in response.text
    chat = {"messages": [{"role": "user", "content": "x"}], "request_id": "mine"}
    assert front.post("/v1/chat/completions", chat).json()["id"] == "chatcmpl-mine"
    both = front.post(PATH, body, headers={"x-request-id": "hers"})
    assert both.headers["x-request-id"] == "hers"


@pytest.mark.parametrize(("path", "status"), [(PATH, 400), ("/nothing", 404), ("/health", 200)])
def test_an_id_comes_back_with_errors_and_from_every_route(
    front: Any, path: str, status: int
) -> None:
    headers = {"x-request-id": "me", "content-type": "application/json"}
    method = "GET" if path == "/health" else "POST"
    response = httpx.request(method, front.url + path, content="{}", headers=headers)
    assert response.status_code == status
    assert response.headers["x-request-id"] == "me"


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "two words", "tab\tbed", "é"])
def test_what_can_not_be_an_id_is_not_echoed(front: Any, sent: str | None) -> None:
    headers = {} if sent is None else {"x-request-id": sent.encode()}
    response = front.post(PATH, {"prompt": "x"}, headers=headers)
    assert response.headers["x-request-id"] == response.json()["id"]


def test_an_id_comes_back_from_what_stands_before_the_routes() -> None:
    app = guarded_app(resolve_config({"api_key": ["sk-right"], "max_request_headers": 16}))
    asked = [("X-Request-Id", "me")]
    no_key = call(app, "GET", "/v1/models", asked)
    assert (no_key.status, no_key.headers.get("x-request-id")) == (401, "me")
    too_many = call(app, "GET", "/health", [*asked, *(("X-Other", "1") for _ in range(32))])
    assert (too_many.status, too_many.headers.get("x-request-id")) == (431, "me")
