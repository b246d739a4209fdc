"""The front process as a whole: start, signals, drain, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_core.errors import ConfigError
from octavo_server.front import bind_socket
from support.scripted_engine import write_byte_model
from support.server import children_of, command_line, is_running


def assert_all_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def processes(front: Any) -> list[int]:
    return [front.process.pid, *children_of(front.process.pid)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_for_health(url: str, condition: Any) -> httpx.Response:
    deadline = time.monotonic() + 40
    while True:
        with contextlib.suppress(httpx.TransportError):
            response = httpx.get(url + "/health")
            if condition(response):
                return response
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_announced_curl_line_works(front: Any) -> None:
    first, command = front.announcement.splitlines()
    assert "bytes" in first
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"].startswith("user=What")


@pytest.mark.parametrize("target", ["a full disk", "a reader that has gone"])
def test_a_server_that_can_not_say_where_it_is_serves(start_front: Any, target: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    full = ("sh", "-c", 'exec "$@" > /dev/full', "sh")
    front = start_front(port=port, prefix=full if target == "a full disk" else ())
    front.process.stdout.close()
    url = f"http://127.0.0.1:{port}/ready"
    deadline = time.monotonic() + 20
    while "Standard output" not in front.stderr:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert httpx.get(url).status_code == 200
    assert front.stop() == 0
    assert "Traceback" not in front.stderr


def test_health_while_loading_and_a_signal_ends_it(start_front: Any) -> None:
    """Case C15: a signal ends a server that loads within seconds, without a traceback."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    front = start_front("run_slow_start", port=port)
    response = wait_for_health(url, lambda r: r.json()["stage"] == "loading weights")
    assert response.status_code == 503
    assert response.json()["progress"] == 0.25
    assert httpx.get(url + "/version").status_code == 200
    for path in ("/v1/models", "/v1/chat/completions"):
        refused = httpx.get(url + path)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "model_loading"
    pids = processes(front)
    started = time.monotonic()
    assert front.stop() == 0
    assert time.monotonic() - started < 4
    assert_all_gone(pids)
    assert "Traceback" not in front.stderr


def test_a_signal_ends_a_download_and_its_process(start_front: Any) -> None:
    port = free_port()
    front = start_front("slow_download", port=port)
    wait_for_health(f"http://127.0.0.1:{port}", lambda r: r.json()["stage"] == "downloading")
    pids = processes(front)
    assert any(command_line(pid) == "sleep 60" for pid in pids)
    assert front.stop() == 0
    assert_all_gone(pids)
    assert "Traceback" not in front.stderr


@pytest.mark.parametrize("delay", [0.05, 0.3, 0.6])
def test_a_signal_at_any_time_of_the_start_leaves_nothing(start_front: Any, delay: float) -> None:
    """Case C15."""
    front = start_front("run_slow_start")
    time.sleep(delay)
    pids = processes(front)
    started = time.monotonic()
    assert front.stop() in (0, -signal.SIGTERM)
    assert time.monotonic() - started < 4
    assert_all_gone(pids)
    assert "Traceback" not in front.stderr


def test_a_model_that_can_not_be_loaded_is_one_line(start_front: Any) -> None:
    front = start_front("run_broken_model")
    assert front.process.wait(timeout=20) == 1
    assert front.stderr.splitlines() == ["error: tensor x has the wrong shape."]


def test_a_model_that_is_not_there_is_one_line(start_front: Any) -> None:
    front = start_front(model="/no/such/dir")
    assert front.process.wait(timeout=20) == 1
    assert front.stderr.splitlines() == ["error: /no/such/dir does not exist."]


def test_an_engine_that_dies_while_it_starts(start_front: Any) -> None:
    front = start_front("run_dying_start")
    assert front.process.wait(timeout=20) == 1
    assert "exit code 7" in front.stderr.splitlines()[-1]


def test_an_engine_that_dies_ends_every_stream_and_the_server(start_front: Any) -> None:
    front = start_front(engine_restart="false").wait_ready()
    pids = processes(front)
    body = {"prompt": "slow" * 100, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", front.url + "/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        killer = threading.Thread(
            target=lambda: httpx.post(front.url + "/v1/completions", json={"prompt": "die, you"})
        )
        killer.start()
        rest = [line for line in lines if line]
        killer.join()
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert front.process.wait(timeout=20) == 1
    assert "engine" in front.stderr.splitlines()[-1]
    assert "Traceback" not in front.stderr
    assert_all_gone(pids)


def test_a_drain_lets_answers_finish_and_takes_no_new_ones(start_front: Any) -> None:
    """Case C15: a drain is a 503 for what comes, and no matter to what is there."""
    front = start_front().wait_ready()
    pids = processes(front)
    body = {"prompt": "slow" * 10, "max_tokens": 40, "stream": True}
    with (
        httpx.Client() as idle,
        httpx.stream("POST", front.url + "/v1/completions", json=body, timeout=20) as response,
    ):
        idle.get(front.url + "/health")  # a kept-alive connection
        lines = response.iter_lines()
        first = next(lines)
        front.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        for send in (idle.post, httpx.post):  # on an old and on a new connection
            refused = send(front.url + "/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
        health = httpx.get(front.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "shutting_down")
        events = [line for line in [first, *lines] if line]
    texts = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == "slow" * 10
    assert front.process.wait(timeout=20) == 0
    assert_all_gone(pids)


def test_a_half_sent_request_does_not_hold_up_the_end(start_front: Any) -> None:
    front = start_front(shutdown_timeout=30).wait_ready()
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(_raw_request({"prompt": "x"})[:-5])
        time.sleep(0.3)
        started = time.monotonic()
        front.process.send_signal(signal.SIGTERM)
        sock.settimeout(10)
        assert sock.recv(1000).startswith(b"HTTP/1.1 503")
        assert front.process.wait(timeout=20) == 0
    assert time.monotonic() - started < 4
    assert "Traceback" not in front.stderr


def test_a_model_without_a_chat_template(start_front: Any, tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "plain")
    (model / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    front = start_front(model=model).wait_ready()
    done = subprocess.run(
        front.announcement.splitlines()[1], shell=True, capture_output=True, text=True, timeout=20
    )
    assert json.loads(done.stdout)["choices"][0]["text"].startswith("Once upon")
    assert front.stderr.count("no chat template") == 1


def test_a_chat_template_with_a_mistake(start_front: Any, tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "broken")
    (model / "chat_template.jinja").write_text("{% for %}")
    front = start_front(model=model).wait_ready()
    assert "/v1/completions" in front.announcement
    for _ in range(2):
        body = {"messages": [{"role": "user", "content": "x"}]}
        response = front.post("/v1/chat/completions", body)
        assert response.status_code == 400
        assert "chat template can't be compiled" in response.json()["error"]["message"]
    assert front.stderr.count("can't be compiled") == 1
    assert "Traceback" not in front.stderr


def test_a_websocket_is_refused_without_advice(front: Any) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert httpx.get(front.url + "/v1/realtime", headers=headers).status_code == 404
    assert "pip install" not in front.stderr


@pytest.mark.parametrize("how", ["time-out", "second signal"])
def test_a_drain_that_takes_too_long_ends_with_an_error(start_front: Any, how: str) -> None:
    """Case C15: an error event, and no second Ctrl-C is needed."""
    front = start_front(shutdown_timeout=0.2 if how == "time-out" else 30).wait_ready()
    body = {"prompt": "slow" * 100, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", front.url + "/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        started = time.monotonic()
        front.process.send_signal(signal.SIGINT)
        if how == "second signal":
            time.sleep(0.2)
            front.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert "shutting down" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert front.process.wait(timeout=20) == 0
    assert time.monotonic() - started < 5
    assert "Traceback" not in front.stderr


def test_a_reader_that_does_not_read_can_not_hold_up_the_end(start_front: Any) -> None:
    """Case C15."""
    front = start_front(shutdown_timeout=0.2).wait_ready()
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(_raw_request({"prompt": "slow" * 100, "max_tokens": 400, "stream": True}))
        time.sleep(0.3)
        started = time.monotonic()
        front.process.send_signal(signal.SIGTERM)
        assert front.process.wait(timeout=20) == 0
        assert time.monotonic() - started < 6
    assert "Traceback" not in front.stderr


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place(start_front: Any, stream: bool) -> None:
    front = start_front(max_num_seqs=1).wait_ready()
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(_raw_request({"prompt": "slow" * 100, "max_tokens": 400, "stream": stream}))
        time.sleep(0.3)
    started = time.monotonic()
    assert front.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert time.monotonic() - started < 2


def test_a_full_queue_is_a_429(start_front: Any) -> None:
    front = start_front(max_num_queued_reqs=1).wait_ready()
    body = {"prompt": "slow" * 100, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", front.url + "/v1/completions", json=body, timeout=20):
        refused = front.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_many_streams_at_once_get_their_own_texts(front: Any) -> None:
    results: dict[int, str] = {}

    def run(number: int) -> None:
        prompt = f"{number}: " + "é" * number
        body = {"prompt": prompt, "max_tokens": 200, "stream": True}
        events = front.events("/v1/completions", {k: v for k, v in body.items() if k != "stream"})
        text = "".join(event["choices"][0]["text"] for event in events)
        results[number] = text if text != prompt else "same"

    threads = [threading.Thread(target=run, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(32), "same")


def test_the_front_imports_no_torch(front: Any) -> None:
    """It serves by now: whatever it imports, it has imported."""
    maps = Path(f"/proc/{front.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    modules = (
        "octavo_server.front, octavo_server.api.app, octavo_server.engine_client, "
        "octavo_server.input_processor, octavo_server.output_processor, octavo_server.tokenizer"
    )
    code = (
        f"import sys, {modules}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_port_in_use() -> None:
    with contextlib.closing(bind_socket("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)) as raised:
            bind_socket("127.0.0.1", port)
        assert raised.value.field == "port"
    # A restart need not wait.
    bind_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["1.2.3.4", "a..b"])
def test_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        bind_socket(host, 0)


def test_the_socket_is_not_inherited() -> None:
    with contextlib.closing(bind_socket("127.0.0.1", 0)) as listener:
        assert not listener.get_inheritable()


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = bind_socket("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with contextlib.closing(listener):
        assert listener.family is socket.AF_INET6


def _raw_request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
