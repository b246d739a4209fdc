"""API keys: nothing but the two probes answers without one, however the request is spelt."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_core.config import resolve_config
from octavo_core.errors import ConfigError
from octavo_server.api.app import create_app
from octavo_server.front import bind_socket, warn_of_open_door
from octavo_server.keys import KeyRing
from support.asgi import call, guarded_app, loading_context, routes_of

KEY = "sk-right"
OPEN = {"/health", "/ready"}
CONFIG = resolve_config({"api_key": [KEY, "sk-other"], "enable_operator_routes": True})
ROUTES = sorted({route.path for route in routes_of(create_app(loading_context(CONFIG)))})

NO_KEYS: list[list[tuple[str, str]]] = [
    [],
    [("Authorization", "")],
    [("Authorization", "Bearer")],
    [("Authorization", "Bearer ")],
    [("Authorization", "Bearer wrong")],
    [("Authorization", KEY)],
    [("Authorization", f"Basic {KEY}")],
    [("Authorization", f"Bearer {KEY} {KEY}")],
    [("Authorization", f"Bearer {KEY.upper()}")],
    [("Authorization", f"Bearer {KEY[:-1]}")],
    [("Authorization", f"Bearer {KEY}\u00e9")],
    [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer wrong")],
    [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")],
    [("X-Api-Key", f"Bearer {KEY}")],
    [("X-Api-Key", "wrong")],
    [("X-Api-Key", KEY), ("X-Api-Key", "wrong")],
    [("Cookie", f"api_key={KEY}")],
]
RIGHT_KEYS: list[list[tuple[str, str]]] = [
    [("Authorization", f"Bearer {KEY}")],
    [("authorization", f"bearer {KEY}")],
    [("Authorization", f"Bearer  {KEY} ")],
    [("Authorization", "Bearer sk-other")],
    [("X-Api-Key", KEY)],
    [("Authorization", "Bearer wrong"), ("X-Api-Key", KEY)],
]
HOSTS = ["localhost", "127.0.0.1", "health", "evil.example", "", "[::1]", "a/health"]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"]


def spellings(path: str) -> list[str]:
    """Ways to write a path that a router or a proxy may take for the same, or for an open one."""
    name = path.lstrip("/")
    return [
        *(path, f"/{path}", f"{path}/", f"{path}.", f"{path}?key={KEY}", f"{path};x=/health"),
        *(path.upper(), path.title(), f"/%2f{name}", f"/.{path}", f"/x/..{path}", f"/x/..;{path}"),
        *(f"/health/..{path}", f"/health/..;{path}", f"/health/%2e%2e{path}", f"/health{path}"),
        *(f"/health%00{path}", f"/health?{path}", f"/health;{path}"[:40], f"/ready%2f..{path}"),
        *(f"{path}%20", f"{path}%00", "".join(f"%{byte:02x}" for byte in path.encode())),
        *(f"http://127.0.0.1{path}", f"/api{path}", f"{path}/health", f"{path}#/health"),
    ]


PATHS = ["/", "", "*", "/nope", "/docs", "/.env", "/v1", "/v2/x", "/inference", *ROUTES]


def test_x01_every_route_is_closed_without_a_key() -> None:
    """X01: the app's own table of routes, so that a new one can't be forgotten."""
    assert {"/v1/models", "/metrics", "/version", "/ping", "/load"} <= set(ROUTES)
    app = guarded_app(CONFIG)
    for path, headers in itertools.product(set(PATHS) - OPEN, NO_KEYS):
        answer = call(app, "GET", path, headers)
        assert answer.status == 401, (path, headers)
        is_anthropic = path.startswith("/v1/messages")
        fields = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
        assert set(answer.json()["error"]) == fields
        assert answer.headers["www-authenticate"] == "Bearer"


def test_x01_no_spelling_method_or_host_gets_around_the_check() -> None:
    app = guarded_app(CONFIG)
    tried = 0
    for path in PATHS:
        for target in spellings(path):
            if target.partition("?")[0] in OPEN:
                continue
            tried += 1
            assert call(app, "GET", target).status == 401, target
    for path, method in itertools.product(PATHS, METHODS):
        if path in OPEN and method in ("GET", "HEAD"):
            continue
        assert call(app, method, path).status == 401, (path, method)
    for host, other in itertools.product(HOSTS, ["X-Forwarded-For", "X-Original-URL"]):
        headers = [("Host", host), (other, "/health")]
        assert call(app, "GET", "/v1/models", headers).status == 401, headers
    assert call(app, kind="websocket", target="/health").status == 1008
    assert tried > 300


@pytest.mark.parametrize("path", sorted(OPEN))
def test_the_probes_need_no_key(path: str) -> None:
    app = guarded_app(CONFIG)
    for method, query in itertools.product(("GET", "HEAD"), ("", "?x=1")):
        assert call(app, method, path + query).status == 503  # it is loading


@pytest.mark.parametrize("headers", RIGHT_KEYS)
def test_a_right_key_opens(headers: list[tuple[str, str]]) -> None:
    app = guarded_app(CONFIG)
    assert call(app, "GET", "/version", headers).status == 200
    assert call(app, "GET", "/nope", headers).status in (404, 503)


def test_without_keys_everything_is_open() -> None:
    assert call(guarded_app(resolve_config()), "GET", "/version").status == 200


def test_a_served_model_needs_the_key(start_front: Any) -> None:
    front = start_front(api_key=KEY).wait_ready()
    body = {"prompt": "x", "max_tokens": 1}
    assert front.post("/v1/completions", body).status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    assert front.post("/v1/completions", body, headers=headers).status_code == 200
    assert httpx.get(front.url + "/ready").status_code == 200
    assert "X-Api-Key: KEY" in front.announcement
    host, port = front.url.removeprefix("http://").split(":")
    for line in ("GET http://x/health HTTP/1.1", "GET //health HTTP/1.1", "OPTIONS * HTTP/1.1"):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(f"{line}\r\nHost: /health\r\nConnection: close\r\n\r\n".encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 401"), line
    # The engine has no use for keys, and the log shows none.
    assert KEY not in front.stderr


def write(path: Path, text: str) -> Path:
    # As a whole, like a secret that is mounted.
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)
    return path


def test_a_file_of_keys_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    path = write(tmp_path / "keys", "# of the first team\nfirst\n\n  second  \n")
    ring = KeyRing(["fixed"], path)
    assert all(ring.opens(key) for key in (b"fixed", b"first", b"second"))
    assert not ring.opens(b"# of the first team")
    assert not ring.opens(b"")

    write(path, "third\n")
    clock[0] += 5
    assert [ring.opens(key) for key in (b"fixed", b"first", b"third")] == [True, False, True]

    for wrong in ("", "# nothing\n", "a b\n", "ключ\n"):
        write(path, wrong)
        clock[0] += 5
        assert ring.opens(b"third"), wrong  # it may be in the middle of being written
    path.unlink()
    clock[0] += 5
    assert ring.opens(b"third")
    write(path, "fourth\n")
    clock[0] += 5
    assert not ring.opens(b"third")
    assert ring.opens(b"fourth")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("", "holds no key"),
        ("# x\n", "holds no key"),
        ("good\nnot good\n", "line 2"),
    ],
)
def test_a_file_of_keys_that_can_not_be_used(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words) as raised:
        KeyRing([], path)
    assert "not good" not in raised.value.message


def test_a_wrong_file_of_keys_ends_the_start(start_front: Any, tmp_path: Path) -> None:
    front = start_front(api_key_file=tmp_path / "none")
    assert front.process.wait(timeout=20) == 1
    assert "--api-key-file" in front.stderr


def test_a_key_is_never_shown_in_an_error() -> None:
    for value in ("", "two words", "tab\t"):
        with pytest.raises(ConfigError) as raised:
            resolve_config(None, {"OCTAVO_API_KEY": value})
        assert "environment OCTAVO_API_KEY" in raised.value.message
        assert "words" not in raised.value.message
    assert resolve_config({"api_key": [KEY]}).without_secrets().access.api_key == ()
    # Neither half of a key with a comma is a key.
    assert resolve_config(None, {"OCTAVO_API_KEY": "a,b"}).access.api_key == ("a,b",)


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": KEY}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
def test_a_warning_when_anybody_can_come_in(
    settings: dict[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = resolve_config(settings)
    with contextlib.closing(bind_socket(config.server.host, 0)) as listener:
        warn_of_open_door(config, listener)
    assert ("Anybody who can reach" in caplog.text) is warns
