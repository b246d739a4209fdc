"""Pages of other origins: preflights, answers and errors."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_core.config import resolve_config
from octavo_core.errors import ConfigError
from octavo_server.front import check_settings
from support.asgi import call, guarded_app

ORIGIN = "https://app.example"
PREFLIGHT = [
    ("Origin", ORIGIN),
    ("Access-Control-Request-Method", "POST"),
    ("Access-Control-Request-Headers", "authorization, content-type"),
]


def test_nothing_is_allowed_by_default() -> None:
    app = guarded_app(resolve_config())
    assert call(app, "OPTIONS", "/v1/chat/completions", PREFLIGHT).status in (405, 503)
    answer = call(app, "GET", "/version", [("Origin", ORIGIN)])
    assert "access-control-allow-origin" not in answer.headers


def test_a_preflight_needs_no_key_and_errors_carry_the_headers() -> None:
    app = guarded_app(resolve_config({"allowed_origins": [ORIGIN], "api_key": ["k"]}))
    answer = call(app, "OPTIONS", "/v1/chat/completions", PREFLIGHT)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    key = ("X-Api-Key", "k")
    for headers, status in (([], 401), ([key], 503)):
        answer = call(app, "POST", "/v1/chat/completions", [("Origin", ORIGIN), *headers])
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert call(app, "GET", "/nope", [("Origin", ORIGIN)]).status == 401
    # An OPTIONS that is no preflight is a request like others.
    assert call(app, "OPTIONS", "/v1/models").status == 401
    assert call(app, "OPTIONS", "/v1/models", [("Origin", ORIGIN)]).status == 401


def test_another_origin_or_method_is_not_allowed() -> None:
    app = guarded_app(resolve_config({"allowed_origins": [ORIGIN], "allowed_methods": ["GET"]}))
    refused = call(app, "OPTIONS", "/v1/models", PREFLIGHT)
    assert refused.status == 400
    assert refused.headers["content-type"] == "application/json"
    assert "method is not allowed" in refused.json()["error"]["message"]
    assert "--allowed-methods" in refused.json()["error"]["message"]
    other = [("Origin", "https://evil.example"), *PREFLIGHT[1:]]
    assert "access-control-allow-origin" not in call(app, "OPTIONS", "/", other).headers
    answer = call(app, "GET", "/version", [("Origin", "https://evil.example")])
    assert "access-control-allow-origin" not in answer.headers


def test_every_origin() -> None:
    app = guarded_app(resolve_config({"allowed_origins": ["*"]}))
    answer = call(app, "GET", "/version", [("Origin", ORIGIN)])
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "retry-after" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("value", ["a,b", '["a", "b"]'])
def test_lists_in_the_environment(value: str) -> None:
    config = resolve_config(None, {"OCTAVO_ALLOWED_ORIGINS": value})
    assert config.access.allowed_origins == ("a", "b")


def test_an_unexpected_error_carries_the_headers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_server.api import health

    def broken(context: Any) -> str:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(health, "_status", broken)
    app = guarded_app(resolve_config({"allowed_origins": [ORIGIN]}))
    answers = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        async def keep(message: Any) -> None:
            answers.append(message)

        with pytest.raises(RuntimeError):  # the server logs it
            await app(scope, receive, keep)

    call(note, "GET", "/health", [("Origin", ORIGIN)])
    start = answers[0]
    assert start["status"] == 500
    assert (b"access-control-allow-origin", ORIGIN.encode()) in start["headers"]


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://", "null"])
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_origins has .* such as https://app\.example"):
        check_settings(resolve_config({"allowed_origins": [origin]}))
    check_settings(resolve_config({"allowed_origins": ["*", ORIGIN, "http://localhost:3000"]}))
