"""A server's processes: their names, and that none is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from support.server import Server, command_line, is_running, running_server


def post(server: Server, path: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, object] = json.load(response)
        return answer


def assert_gone(pids: list[int], within: float = 5.0) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(map(is_running, pids)):
            return
        time.sleep(0.05)
    raise AssertionError([command_line(pid) for pid in pids if is_running(pid)])


@pytest.mark.parametrize(
    ("backend", "signal_number"), [("uni", signal.SIGINT), ("mp", signal.SIGTERM)]
)
def test_titles_and_a_clean_end(tmp_path: Path, backend: str, signal_number: int) -> None:
    with running_server("--distributed-executor-backend", backend, log=tmp_path / "log") as server:
        pids = server.processes
        titles = {command_line(pid) for pid in pids}
        expected = {"octavo: front", "octavo: engine"}
        if backend == "mp":
            expected.add("octavo: worker 0")
        assert expected <= titles
        assert post(server, "/v1/completions", {"prompt": "The", "max_tokens": 2})["choices"]
        assert server.stop(signal_number) == 0
    assert_gone(pids)
    assert "Traceback" not in server.log


@pytest.mark.parametrize("delay", [0.2, 0.6, 2.0])
def test_ctrl_c_in_a_terminal_while_loading(tmp_path: Path, delay: float) -> None:
    """A terminal signals the whole group, the engine that is just starting included."""
    server = Server("--distributed-executor-backend", "mp", log=tmp_path / "log")
    time.sleep(delay)
    pids = server.processes
    has_started = command_line(server.process.pid) == "octavo: front"  # not Python's own start
    os.killpg(server.process.pid, signal.SIGINT)
    exit_code = server.process.wait(timeout=10)
    assert_gone(pids)
    if has_started:
        assert exit_code in (0, 130, -signal.SIGINT)
        assert "Traceback" not in server.log


def test_sigterm_while_loading(tmp_path: Path) -> None:
    server = Server(log=tmp_path / "log")
    time.sleep(1.0)
    pids = server.processes
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 5
    assert_gone(pids)
    assert "Traceback" not in server.log


def test_a_killed_front_leaves_nothing(tmp_path: Path) -> None:
    with running_server("--distributed-executor-backend", "mp", log=tmp_path / "log") as server:
        pids = server.processes
        server.process.kill()
    assert_gone(pids)


def test_a_dead_engine_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    with running_server("--no-engine-restart", log=tmp_path / "log") as server:
        (engine,) = [pid for pid in server.processes if command_line(pid) == "octavo: engine"]
        subprocess.run(["kill", "-9", str(engine)], check=True)
        assert server.process.wait(timeout=20) != 0
    assert "engine" in server.log.splitlines()[-1]


def test_a_dead_worker_is_noticed_by_an_idle_server(tmp_path: Path) -> None:
    flags = ("--no-engine-restart", "--distributed-executor-backend", "mp")
    with running_server(*flags, log=tmp_path / "log") as server:
        (worker,) = [pid for pid in server.processes if command_line(pid) == "octavo: worker 0"]
        os.kill(worker, signal.SIGKILL)
        assert server.process.wait(timeout=20) != 0
    assert "worker 0" in server.log.splitlines()[-1]


LLM_WITHOUT_SHUTDOWN = """
from octavo_server import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(distributed_executor_backend="mp", max_model_len=128)
    print(llm.generate("One, two,", SamplingParams(max_tokens=2))[0].outputs[0].token_ids)
"""


def test_a_script_that_just_ends_leaves_nothing(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "tmp"
    script.write_text(LLM_WITHOUT_SHUTDOWN)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list(folder.iterdir()) == []


def test_running_requests_finish_after_sigterm(tmp_path: Path) -> None:
    with running_server(log=tmp_path / "log") as server:
        pids = server.processes
        body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            server.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()
            server.process.send_signal(signal.SIGTERM)
            rest = response.read().decode()
        assert rest.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in rest.replace(" ", "")
        assert server.process.wait(timeout=20) == 0
    assert_gone(pids)


def test_a_client_that_hangs_up_frees_its_place(tmp_path: Path) -> None:
    """With one slot, the next request only runs because the first was aborted."""
    with running_server("--max-num-seqs", "1", log=tmp_path / "log") as server:
        for stream in (True, False):
            body = json.dumps(
                {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
            ).encode()
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
                    f"\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                sock.sendall(head.encode() + body)
                time.sleep(1.0)  # it runs by now
            started = time.monotonic()
            post(server, "/v1/completions", {"prompt": "The", "max_tokens": 2})
            assert time.monotonic() - started < 5


def test_a_port_in_use_fails_before_loading(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "octavo_server", "serve", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert done.returncode != 0
    assert time.monotonic() - started < 3
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr
