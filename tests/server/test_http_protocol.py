"""Clients that send too much, too slowly, or nothing at all, over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_server.http_protocol import raise_file_limit
from support.faults import Target


@pytest.fixture(scope="module")
def strict(start_shared_front: Any) -> Any:
    return start_shared_front(
        request_header_timeout=0.5,
        request_body_timeout=0.5,
        keep_alive_timeout=2,
        max_request_body_size="64KiB",
        max_connections=40,
    ).wait_ready()


@contextlib.contextmanager
def connected(front: Any) -> Any:
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(65536):
            received += chunk
    return received


def answer_of(received: bytes) -> tuple[int, Any]:
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def memory_of(front: Any) -> int:
    status = Path(f"/proc/{front.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("first", "what"),
    [
        (b"G", "header"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", "header"),
        (POST + b"Content-Length: 100\r\n\r\n", "body"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", "body"),
    ],
)
def test_a_request_that_never_ends_is_given_up(strict: Any, first: bytes, what: str) -> None:
    started = time.monotonic()
    with connected(strict) as sock:
        sock.sendall(first)
        status, body = answer_of(read_all(sock))
    assert status == 408
    assert f"--request-{what}-timeout" in body["error"]["message"]
    assert time.monotonic() - started > 0.4


def test_a_byte_now_and_then_does_not_help(strict: Any) -> None:
    """Slowloris: each byte comes in time, the header never does."""
    received: list[bytes] = []
    with connected(strict) as sock:
        reader = threading.Thread(target=lambda: received.append(read_all(sock)))
        reader.start()
        with contextlib.suppress(OSError):
            for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: b\r\n" * 100:
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
                if not reader.is_alive():
                    break
        reader.join(10)
    assert answer_of(received[0])[0] == 408


def test_x11_a_huge_header_is_refused_unread(strict: Any) -> None:
    """X11: neither one long line nor many short ones fill the memory."""
    before = memory_of(strict)
    for line in (b"X-Long: " + b"a" * 5_000_000, b"X-A: b\r\n" * 600_000):
        with connected(strict) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + line)
            received = read_all(sock)
        # An answer may be lost on a client that is still sending, but never the end.
        assert received == b"" or answer_of(received)[0] == 431
    with connected(strict) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a" * 66_000)
        status, body = answer_of(read_all(sock))
    assert status == 431
    assert "--max-request-header-size" in body["error"]["message"]
    assert memory_of(strict) - before < 20 << 20


def test_x11_many_header_lines_are_refused(strict: Any) -> None:
    headers = {f"x-{number}": "a" for number in range(300)}
    response = httpx.get(strict.url + "/health", headers=headers)
    assert response.status_code == 431
    assert "--max-request-headers" in response.json()["error"]["message"]
    assert httpx.get(strict.url + "/health", headers={"x-1": "a"}).status_code == 200


@pytest.mark.parametrize(
    "request_head", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]
)
def test_what_is_no_http_is_a_400(strict: Any, request_head: bytes) -> None:
    with connected(strict) as sock:
        sock.sendall(request_head)
        sock.shutdown(socket.SHUT_WR)
        received = read_all(sock)
    status, body = answer_of(received)
    assert status in (400, 408)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Invalid HTTP" not in strict.stderr  # anybody could fill the disk with it


def test_a_large_body_is_a_413_that_names_the_flag(strict: Any) -> None:
    response = strict.post("/v1/completions", {"prompt": "x" * 100_000})
    assert response.status_code == 413
    assert "65536 bytes (--max-request-body-size)" in response.json()["error"]["message"]


def send_chunks(sock: socket.socket) -> None:
    for _ in range(2000):
        sock.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        time.sleep(0.005)


def test_an_endless_body_ends(strict: Any) -> None:
    with connected(strict) as sock:
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            send_chunks(sock)


def test_a_slow_answer_is_not_cut(strict: Any) -> None:
    started = time.monotonic()
    body = {"prompt": "slow" * 30, "max_tokens": 120}
    assert strict.post("/v1/completions", body).status_code == 200
    assert time.monotonic() - started > 1.0


def test_an_idle_connection_lives_until_its_time_and_serves(strict: Any) -> None:
    with httpx.Client() as client:
        for _ in range(2):
            assert client.get(strict.url + "/health").status_code == 200
            time.sleep(0.7)  # longer than a header may take
        assert client.get(strict.url + "/health").status_code == 200
    with connected(strict) as sock:
        started = time.monotonic()
        assert read_all(sock) == b""
        assert time.monotonic() - started > 1.5


def test_beyond_the_limit_the_longest_idle_connection_goes(strict: Any) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connected(strict)) for _ in range(60)]
        assert httpx.get(strict.url + "/health").status_code == 200
        time.sleep(0.2)
        sockets[0].setblocking(False)
        with contextlib.suppress(ConnectionError):
            assert sockets[0].recv(1) == b""
        sockets[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            sockets[-1].recv(1)


def probe(front: Any) -> float:
    """Return the median time of a request on a connection of its own."""
    host, port = front.url.removeprefix("http://").split(":")
    times = []
    for _ in range(30):
        started = time.perf_counter()
        with contextlib.closing(http.client.HTTPConnection(host, int(port))) as connection:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        times.append(time.perf_counter() - started)
    return sorted(times)[15]


def test_idle_connections_do_not_slow_a_probe(front: Any) -> None:
    """Two thousand of them, half with half a header; compared with the same server without."""
    raise_file_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3000:
        pytest.skip("this system does not allow so many open files")
    alone = probe(front)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connected(front)) for _ in range(2000)]
        for sock in sockets[::2]:
            sock.sendall(b"GET /health HTTP/1.1\r\n")
        crowded = probe(front)
    assert crowded < 3 * alone + 0.01, (alone, crowded)


def test_more_connections_than_the_system_allows_open_files(start_front: Any) -> None:
    """The rest get no place, and the log no line for each time that it is tried.

    The event loop alone tries 2,048 times at once, a thousand times a second.
    """
    front = start_front(prefix=("sh", "-c", 'ulimit -n 200 && exec "$@"', "sh")).wait_ready()
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            sock = stack.enter_context(connected(front))
            with contextlib.suppress(ConnectionError):  # it may be closed already
                sock.sendall(b"GET /health HTTP/1.1\r\n")
        assert httpx.get(front.url + "/ready", timeout=20).status_code == 200
        # Not even another engine lacks files.
        Target(front.url, front.process.pid).kill("octavo: engine")
        answer = front.post("/v1/completions", {"prompt": "hello", "max_tokens": 5})
        while answer.status_code == 503:
            time.sleep(0.05)
            answer = front.post("/v1/completions", {"prompt": "hello", "max_tokens": 5})
        assert answer.json()["choices"][0]["text"] == "hello"
    assert "At most 100 connections" in front.stderr
    assert len(front.stderr) < 10_000
