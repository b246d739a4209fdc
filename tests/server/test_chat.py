"""``octavo chat`` as a process of its own, talking to a scripted server on loopback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo_client import Client, Health
from octavo_core.errors import EngineDeadError
from octavo_server.cli.chat import StatusLine
from octavo_server.cli.local_server import LocalServer, free_port
from support.scripted_server import Reply, ScriptedServer

CHAT = """
import argparse, sys
from octavo_server.cli import chat
parser = argparse.ArgumentParser()
chat.add_arguments(parser)
sys.exit(chat.run(parser.parse_args()))
"""

# Answers 503 twice, then 200; ends at SIGTERM. Stands for a server where only its life matters.
FAKE_SERVER = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
asked = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        body = b'{"stage": "loading weights", "progress": 0.5}'
        self.send_response(503 if asked < 3 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


def answer(*texts: str, finish_reason: str = "stop") -> Reply:
    events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    events += [{"choices": [{"delta": {"content": text}}]} for text in texts]
    events += [{"choices": [{"delta": {}, "finish_reason": finish_reason}]}]
    parts = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return Reply.stream(*parts, b"data: [DONE]\n\n")


def greet(server: ScriptedServer, *replies: Reply) -> None:
    """Script the questions that come before the first turn, then `replies`."""
    server.replies.extend([Reply(200), Reply.json({"data": [{"id": "tiny"}]}), *replies])


def chat(server: ScriptedServer, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHAT, "--url", server.url, *flags],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def sent(server: ScriptedServer) -> list[Any]:
    return [got.body for got in server.received if got.method == "POST"]


def test_each_line_of_a_pipe_is_a_turn(server: ScriptedServer) -> None:
    greet(server, answer("Hel", "lo"), answer("Bye"))
    done = chat(server, "Hi\n\nGo\n", "--system", "Be brief.", "--temperature", "0")
    assert (done.stdout, done.stderr, done.returncode) == ("Hello\nBye\n", "", 0)
    first, second = sent(server)
    assert (first["model"], first["temperature"]) == ("tiny", 0.0)
    assert "max_tokens" not in first
    assert [(m["role"], m["content"]) for m in second["messages"]] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Go"),
    ]


def test_reset_and_exit(server: ScriptedServer) -> None:
    greet(server, answer("a"), answer("b"))
    done = chat(server, "one\n/reset\ntwo\n/exit\nthree\n", "--max-tokens", "3")
    assert done.stdout == "a\nb\n"
    assert [len(body["messages"]) for body in sent(server)] == [1, 1]
    assert sent(server)[1]["max_tokens"] == 3


def test_failed_turn_leaves_no_trace(server: ScriptedServer) -> None:
    refusal = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    server.replies.extend([Reply(200), Reply.json(refusal, 400), answer("fine")])
    done = chat(server, "long\nshort\n", "--model", "other")
    assert done.stdout == "fine\n"
    assert "too long (HTTP 400) /reset" in done.stderr
    assert done.returncode == 1
    assert sent(server)[1]["model"] == "other"
    assert sent(server)[1]["messages"] == [{"role": "user", "content": "short"}]


def test_nobody_at_the_url() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHAT, "--url", f"http://127.0.0.1:{free_port()}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "can't be reached" in done.stderr
    assert "octavo serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_broken_pipe_is_quiet(server: ScriptedServer) -> None:
    greet(server, answer(*["x" * 1000] * 200))
    command = [sys.executable, "-c", CHAT, "--url", server.url]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, input=b"hi\n", stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


class Terminal:
    """A process whose standard streams are a terminal."""

    def __init__(self, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "dumb"}
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 10.0) -> None:
        """Read until `text` was shown since the last call."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not appear in {self.seen!r}"
            if select.select([self._master], [], [], left)[0]:
                self.seen += os.read(self._master, 4096).decode()
        self.seen = self.seen.partition(text)[2]

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until `text` is shown.

        One that comes between the prompt and the reading is noticed with the next key only:
        that is CPython's way to wait for input.
        """
        for attempt in range(10):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError) if attempt < 9 else contextlib.nullcontext():
                self.wait_for(text, seconds=2.0)
                return

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(server: ScriptedServer) -> Iterator[Terminal]:
    opened = Terminal([sys.executable, "-c", CHAT, "--url", server.url])
    yield opened
    opened.close()


def test_ctrl_c_stops_the_answer_only(server: ScriptedServer, terminal: Terminal) -> None:
    chunk = b'data: {"choices":[{"delta":{"content":"la "}}]}\n\n'
    endless = [part for _ in range(500) for part in (chunk, 0.02)]
    greet(server, Reply.stream(*endless), answer("do\x1b[2Jne"))
    terminal.wait_for("> ")
    terminal.type("sing\n")
    terminal.wait_for("la la")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("[stopped]")
    assert server.client_left.wait(3)
    terminal.wait_for("> ")
    terminal.type("again\n")
    terminal.wait_for("do[2Jne")  # without the escape character
    first, second = sent(server)
    assert first["messages"] == [{"role": "user", "content": "sing"}]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"].startswith("la la")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


def test_ctrl_c_at_the_prompt_does_not_end_it(server: ScriptedServer, terminal: Terminal) -> None:
    greet(server)
    terminal.wait_for("> ")
    terminal.interrupt_until("/exit or Ctrl-D")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(10) == 0


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_status_line_does_not_go_back_when_the_server_is_ready() -> None:
    out = FakeTerminal()
    status = StatusLine(out)
    status.show_health(Health())
    status.show_health(Health(status=503, stage="warming up", progress=0.5))
    status.show_health(Health(ready=True, status=200))
    status.clear()
    shown = out.getvalue().replace("\r\x1b[K", "|")
    assert shown == "|starting the server …|warming up 50% …|"


def test_empty_key_of_the_environment_is_none(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    greet(server, answer("Hello"))
    done = chat(server, "Hi\n")
    assert (done.stdout, done.stderr, done.returncode) == ("Hello\n", "", 0)
    assert "authorization" not in server.received[0].headers


def test_own_server_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "the operator's")
    monkeypatch.setenv("OCTAVO_SSL_CERTFILE", "/x.pem")
    code = (
        "import os; print([os.environ.get(n) for n in ('OCTAVO_API_KEY', 'OCTAVO_SSL_CERTFILE')])"
    )
    with LocalServer("", [sys.executable, "-c", code]) as server:
        assert server._process is not None
        server._process.wait(10)
        assert server._last_lines() == f"['{server.api_key}', None]"


def test_own_server_ends_with_its_block() -> None:
    stages = []
    with LocalServer("", [sys.executable, "-c", FAKE_SERVER]) as server:
        assert server._process is not None
        process = psutil.Process(server._process.pid)
        with Client(server.url) as client:
            server.wait_until_ready(client, lambda health: stages.append(health.stage), 20)
        assert process.is_running()
    assert "loading weights" in stages
    assert not process.is_running()


def test_own_server_that_fails_says_why() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        LocalServer("", command) as server,
        Client(server.url) as client,
        pytest.raises(EngineDeadError, match="no such model"),
    ):
        server.wait_until_ready(client, lambda health: None, 20)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end the child")
def test_own_server_ends_with_a_killed_parent(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from octavo_server.cli.local_server import LocalServer
with LocalServer("", [sys.executable, "-c", {FAKE_SERVER!r}]) as server:
    print(server._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.05)
