"""The blocking and the asyncio client against a real server: the same stories for both."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import octavo_client
from octavo_client import (
    APIConnectionError,
    APITimeoutError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    Client,
    ClosedError,
    Health,
    InvalidArgumentError,
    InvalidResponseError,
    RateLimitError,
    ServerError,
    StreamError,
)

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {
    "id": "chatcmpl-1",
    "model": "m",
    "created": 5,
    "novelty": {"later": True},
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "refusal": None},
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    {
                        "token": "Hi",
                        "logprob": -0.5,
                        "bytes": [72, 105],
                        "top_logprobs": [{"token": "Hi", "logprob": -0.5, "bytes": None}],
                    }
                ]
            },
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
}
TEXT = {
    "id": "cmpl-1",
    "choices": [
        {
            "index": 0,
            "text": " world",
            "finish_reason": "length",
            "logprobs": {
                "tokens": [" world"],
                "token_logprobs": [-0.1],
                "top_logprobs": [{" world": -0.1}],
                "text_offset": [0],
            },
        }
    ],
}
CHUNKS = [
    b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"H\xc3',
    b'\xa9"}}]}\r\n\r\n: ping\n\n',
    b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"id":"c","choices":[],"usage":{"total_tokens":7}}\n\n',
    b"data: [DONE]\n\n",
]


class Blocking:
    """Runs one method, or reads one stream, with `Client`."""

    def call(self, url: str, method: str, *args: Any, **kwargs: Any) -> Any:
        settings = kwargs.pop("client", {})
        with Client(url, **settings) as client:
            return getattr(client, method)(*args, **kwargs)

    def read(self, url: str, method: str, *args: Any, limit: int | None = None, **kw: Any) -> Any:
        chunks = []
        with Client(url) as client, getattr(client, method)(*args, **kw) as stream:
            for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == limit:
                    break
        return chunks


class Asyncio:
    """The same with `AsyncClient`."""

    def call(self, url: str, method: str, *args: Any, **kwargs: Any) -> Any:
        settings = kwargs.pop("client", {})

        async def main() -> Any:
            async with AsyncClient(url, **settings) as client:
                return await getattr(client, method)(*args, **kwargs)

        return asyncio.run(main())

    def read(self, url: str, method: str, *args: Any, limit: int | None = None, **kw: Any) -> Any:
        async def main() -> Any:
            chunks = []
            async with AsyncClient(url) as client, getattr(client, method)(*args, **kw) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == limit:
                        break
            return chunks

        return asyncio.run(main())


@pytest.fixture(params=[Blocking, Asyncio])
def io(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_chat(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.json(CHAT))
    answer = io.call(
        server.url,
        "chat",
        MESSAGES,
        model="m",
        temperature=0.0,
        max_tokens=4,
        extra_body={"novel": 1},
        client={"api_key": "secret"},
    )
    assert answer.text == "Hi"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "Hi"
    got = server.received[0]
    assert (got.method, got.path) == ("POST", "/v1/chat/completions")
    assert got.headers["authorization"] == "Bearer secret"
    assert got.headers["content-type"] == "application/json"
    assert got.body == {
        "messages": MESSAGES,
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 4,
        "novel": 1,
    }


def test_complete(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.json(TEXT))
    answer = io.call(server.url + "/v1/", "complete", [1, 2, 3], logprobs=1)
    assert answer.text == " world"
    assert answer.choices[0].logprobs.top_logprobs == [{" world": -0.1}]
    assert server.received[0].path == "/v1/completions"
    assert server.received[0].body == {"prompt": [1, 2, 3], "logprobs": 1}
    assert "authorization" not in server.received[0].headers


def test_models(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.json({"data": [{"id": "m", "max_model_len": 9, "x": 1}]}))
    (model,) = io.call(server.url, "models")
    assert (model.id, model.max_model_len) == ("m", 9)


def test_stream_chat(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.stream(*CHUNKS))
    chunks = io.read(server.url, "stream_chat", MESSAGES)
    assert [chunk.text for chunk in chunks] == ["", "Hé", "", ""]
    assert chunks[2].choices[0].finish_reason == "stop"
    assert chunks[3].usage.total_tokens == 7
    assert server.received[0].body["stream"] is True
    assert server.received[0].body["stream_options"] == {"include_usage": True}


def test_stream_complete(server: Any, io: Any, reply: Any) -> None:
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    server.replies.append(reply.stream(event, event, b"data: [DONE]\n\n"))
    chunks = io.read(server.url, "stream_complete", "x")
    assert "".join(chunk.text for chunk in chunks) == "aa"


def test_leaving_a_stream_closes_its_connection(server: Any, io: Any, reply: Any) -> None:
    more = [part for _ in range(200) for part in (0.02, CHUNKS[0])]
    server.replies.append(reply.stream(CHUNKS[0], *more))
    io.read(server.url, "stream_chat", MESSAGES, limit=1)
    assert server.client_left.wait(3)


def test_leaving_a_bare_loop_closes_the_connection_too(server: Any, reply: Any) -> None:
    more = [part for _ in range(200) for part in (0.02, CHUNKS[0])]
    server.replies.append(reply.stream(CHUNKS[0], *more))
    with Client(server.url) as client:
        for _ in client.stream_chat(MESSAGES):
            break
        assert server.client_left.wait(3)


def test_chunks_come_as_they_are_sent(server: Any, reply: Any) -> None:
    server.replies.append(reply.stream(CHUNKS[0], 0.5, *CHUNKS[1:]))
    start = time.monotonic()
    with Client(server.url) as client, client.stream_chat(MESSAGES) as stream:
        next(iter(stream))
        assert time.monotonic() - start < 0.4


def test_done_ends_a_stream_that_stays_open(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.stream(CHUNKS[0], b"data: [DONE]\n\n", 5.0, CHUNKS[0]))
    start = time.monotonic()
    assert len(io.read(server.url, "stream_chat", MESSAGES)) == 1
    assert time.monotonic() - start < 3


def test_error_inside_a_stream(server: Any, io: Any, reply: Any) -> None:
    event = b'data: {"error":{"message":"engine died","code":"dead"}}\n\ndata: [DONE]\n\n'
    server.replies.append(reply.stream(CHUNKS[0], event))
    with pytest.raises(StreamError, match="engine died") as caught:
        io.read(server.url, "stream_chat", MESSAGES)
    assert caught.value.code == "dead"
    assert len(server.received) == 1


def test_stream_without_its_end(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.stream(CHUNKS[0]))
    with pytest.raises(StreamError, match="before the answer was whole"):
        io.read(server.url, "stream_chat", MESSAGES)


def test_stream_that_breaks_is_not_repeated(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.stream(CHUNKS[0], cut=True))
    with pytest.raises(APIConnectionError, match="the connection broke"):
        io.read(server.url, "stream_chat", MESSAGES)
    assert len(server.received) == 1


def test_nonsense_in_a_stream(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.stream(b"data: nonsense\n\n"))
    with pytest.raises(InvalidResponseError):
        io.read(server.url, "stream_chat", MESSAGES)


def test_error_before_a_stream(server: Any, io: Any, reply: Any) -> None:
    error = {"error": {"message": "top_p is 2", "param": "top_p", "code": "invalid"}}
    server.replies.append(reply.json(error, 400, X_Request_Id="r9"))
    with pytest.raises(BadRequestError, match="top_p is 2") as caught:
        io.read(server.url, "stream_chat", MESSAGES, top_p=2.0)
    assert caught.value.param == "top_p"
    assert caught.value.request_id == "r9"


def test_refusal_is_not_repeated(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.json({"error": "Unauthorized"}, 401))
    with pytest.raises(AuthenticationError, match="Unauthorized"):
        io.call(server.url, "chat", MESSAGES)
    assert len(server.received) == 1


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("method", ["chat", "stream_chat"])
def test_busy_server_is_tried_again(
    server: Any, io: Any, reply: Any, status: int, method: str
) -> None:
    server.replies.append(reply.json({}, status, Retry_After="0.2"))
    start = time.monotonic()
    if method == "chat":
        server.replies.append(reply.json(CHAT))
        assert io.call(server.url, method, MESSAGES).text == "Hi"
    else:
        server.replies.append(reply.stream(*CHUNKS))
        assert len(io.read(server.url, method, MESSAGES)) == 4
    assert time.monotonic() - start >= 0.2
    assert len(server.received) == 2
    assert server.received[0].body == server.received[1].body


def test_retries_end(server: Any, io: Any, reply: Any) -> None:
    server.replies.extend(reply.json({"error": "full"}, 429, Retry_After="0") for _ in range(3))
    with pytest.raises(RateLimitError, match="full") as caught:
        io.call(server.url, "chat", MESSAGES)
    assert caught.value.retry_after == 0
    assert len(server.received) == 3


def test_no_retries_if_none_are_wanted(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.json({}, 503, Retry_After="0"))
    with pytest.raises(ServerError):
        io.call(server.url, "chat", MESSAGES, client={"max_retries": 0})
    assert len(server.received) == 1


def test_nobody_listens(io: Any, closed_port: int) -> None:
    start = time.monotonic()
    with pytest.raises(APIConnectionError, match="can't be reached") as caught:
        io.call(f"http://127.0.0.1:{closed_port}", "chat", MESSAGES, client={"max_retries": 1})
    assert not isinstance(caught.value, APITimeoutError)
    assert time.monotonic() - start >= 0.25  # it did try twice


def test_silent_server(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply(200, [1.0, b"{}"]))
    with pytest.raises(APITimeoutError):
        io.call(server.url, "chat", MESSAGES, timeout=0.2)
    assert len(server.received) == 1


def test_answer_that_is_none(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.json({"id": "x"}))
    with pytest.raises(InvalidResponseError, match="choices"):
        io.call(server.url, "chat", MESSAGES)


def test_health(server: Any, io: Any, reply: Any) -> None:
    loading = {"status": "loading", "stage": "loading weights", "progress": 0.5}
    server.replies.append(reply.json(loading, 503))
    health = io.call(server.url, "health")
    assert (health.ready, health.stage, health.progress) == (False, "loading weights", 0.5)
    server.replies.append(reply(200))
    assert io.call(server.url, "health").ready
    server.replies.append(reply(500))
    with pytest.raises(ServerError):
        io.call(server.url, "health")


def test_wait_until_ready(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.json({"stage": "importing torch"}, 503))
    server.replies.append(reply(503, [b"busy"]))
    server.replies.append(reply(200))
    seen: list[Health] = []
    io.call(server.url, "wait_until_ready", 5.0, interval=0.01, on_progress=seen.append)
    assert [health.stage for health in seen] == ["importing torch", None, None]
    assert [health.ready for health in seen] == [False, False, True]


def test_wait_until_ready_waits_for_a_server_that_is_not_there(io: Any, closed_port: int) -> None:
    with pytest.raises(APITimeoutError, match=r"not ready within 0\.2 s"):
        io.call(f"http://127.0.0.1:{closed_port}", "wait_until_ready", 0.2, interval=0.05)


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://"])
def test_bad_base_url(make: Callable[..., Any], url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        make(url)


def test_bad_max_retries() -> None:
    with pytest.raises(InvalidArgumentError, match="max_retries is -1"):
        Client(max_retries=-1)


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize("key", ["", "é", "secret\nX: y", "secret ", "a\ud83d"])
def test_api_key_that_is_no_header(make: Callable[..., Any], key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="api_key") as caught:
        make(api_key=key)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("temperature", lambda x: {"temperature": x}),
        ("extra_body.a[1].b", lambda x: {"extra_body": {"a": [1, {"b": (x,)}]}}),
    ],
)
def test_number_that_json_has_no_word_for(
    server: Any, io: Any, number: float, name: str, make: Callable[[float], Any]
) -> None:
    with pytest.raises(InvalidArgumentError, match=f" is {number}$") as caught:
        io.call(server.url, "complete", "x", **make(number))
    assert name.removeprefix("extra_body.") in str(caught.value)
    with pytest.raises(InvalidArgumentError):
        io.read(server.url, "stream_chat", MESSAGES, **make(number))
    assert server.received == []


@pytest.mark.parametrize("value", ["a\ud83d", object(), {"a": {1, object()}}])
def test_value_that_json_can_not_carry(server: Any, io: Any, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="can't be written as JSON"):
        io.call(server.url, "complete", "x", extra_body={"field": value})
    assert server.received == []


def test_value_that_holds_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidArgumentError, match="can't be written as JSON"):
        Client().complete("x", extra_body={"field": endless})


def test_closed_client() -> None:
    client = Client()
    client.close()
    with pytest.raises(ClosedError, match="client was closed"):
        client.complete("x")
    with pytest.raises(ClosedError), client.stream_chat(MESSAGES):
        pass


async def test_closed_async_client() -> None:
    client = AsyncClient()
    await client.close()
    with pytest.raises(ClosedError, match="client was closed"):
        await client.complete("x")
    with pytest.raises(ClosedError):
        async with client.stream_chat(MESSAGES):
            pass


@pytest.mark.parametrize("limit", [1, 100])
def test_stream_is_read_once(server: Any, reply: Any, limit: int) -> None:
    server.replies.append(reply.stream(*CHUNKS))
    with Client(server.url) as client, client.stream_chat(MESSAGES) as stream:
        assert len(list(itertools.islice(stream, limit))) == min(limit, 4)
        with pytest.raises(ClosedError, match="read or closed already"):
            list(stream)
    assert len(server.received) == 1


@pytest.mark.parametrize("whole", [True, False])
async def test_async_stream_is_read_once(server: Any, reply: Any, whole: bool) -> None:
    server.replies.append(reply.stream(*CHUNKS))
    async with AsyncClient(server.url) as client, client.stream_chat(MESSAGES) as stream:
        async for _ in stream:
            if not whole:
                break
        with pytest.raises(ClosedError, match="read or closed already"):
            async for _ in stream:
                pass
    assert len(server.received) == 1


def test_proxy_of_the_environment_is_not_asked_for_loopback(
    server: Any, reply: Any, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{closed_port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    server.replies.append(reply(200))
    with Client(server.url) as client:
        assert client.health().ready


def test_both_clients_offer_the_same() -> None:
    def public(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in vars(cls).items()
            if not name.startswith("_")
        }

    assert public(Client) == public(AsyncClient)


def test_public_names() -> None:
    assert sorted(octavo_client.__all__) == octavo_client.__all__
    for name in octavo_client.__all__:
        assert hasattr(octavo_client, name)


def test_import_brings_no_other_octavo_package() -> None:
    code = (
        "import sys, octavo_client; "
        "print([m for m in sys.modules if m.startswith('octavo_') "
        "and not m.startswith('octavo_client')], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_any_body_to_any_route(server: Any, io: Any, reply: Any) -> None:
    server.replies.append(reply.json({"count": 2, "tokens": [1, 2]}))
    answer = io.call(server.url, "post", "/tokenize", {"prompt": "x"})
    assert answer == {"count": 2, "tokens": [1, 2]}
    (received,) = server.received
    assert (received.method, received.path, received.body) == ("POST", "/tokenize", {"prompt": "x"})
    for path in ("tokenize", "//elsewhere/x", "http://elsewhere/x"):
        with pytest.raises(InvalidArgumentError, match="one slash"):
            io.call(server.url, "post", path, {})
