"""Failures that other servers of this kind had, by their case ids: requests of real clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_core.errors import ConfigError
from octavo_server.tokenizer import read_chat_template
from support.scripted_engine import write_byte_model
from support.server import children_of, is_running

CHAT = "/v1/chat/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}


def _tool_loop(form: Callable[[str], Any], nothing: Any) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": form("S")},
        {"role": "user", "content": form("5+3?")},
        {"role": "assistant", "content": nothing, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": form("8")},
    ]


def _as_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize("nothing", [[], None, ""])
def test_h03_lists_of_parts_in_a_tool_loop(talker: Any, nothing: Any) -> None:
    """Case H03: each turn may be a list of text parts, and an assistant's may be an empty one."""
    answers = []
    for messages in (_tool_loop(str, ""), _tool_loop(_as_parts, nothing)):
        response = talker.post(CHAT, {"messages": messages, "max_tokens": 400})
        assert response.status_code == 200, response.text
        answers.append(response.json()["choices"][0]["message"]["content"])
    assert answers[0] == answers[1]
    assert "tool=8" in answers[0]


def test_h03_parts_are_joined_with_a_line_break(talker: Any) -> None:
    """Case H03: where a template wants text, the parts of a turn are its lines."""
    prompts = [
        talker.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()
        for content in ("a\nb", [*_as_parts("a"), *_as_parts("b")])
    ]
    assert prompts[0] == prompts[1]


def test_h03_an_image_for_a_text_model(talker: Any) -> None:
    """Case H03: a part that the model can't take is a 400 that names its place."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"messages": [{"role": "user", "content": [*_as_parts("see:"), image]}]}
    response = talker.post(CHAT, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[1]"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"stream_options": {}}, {"stream_options": None}),
        *({"include_usage": False}, {"include_usage": None}),
    ],
)
def test_h09_no_usage_unless_asked_for(front: Any, path: str, options: dict[str, Any]) -> None:
    """Case H09: a stream tells no usage where ``include_usage`` is not true."""
    if "include_usage" in options:
        options = {"stream_options": options}
    events = front.events(path, _question(path) | options)
    assert all("usage" not in event for event in events)
    assert all(event["choices"] for event in events)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_h09_usage_is_one_more_event(front: Any, path: str) -> None:
    """Case H09: usage comes last, alone, and is what a whole answer says; before, it is null."""
    body = _question(path)
    *others, last = front.events(path, body | {"stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"]) == ([], front.post(path, body).json()["usage"])
    assert all(event["usage"] is None and event["choices"] for event in others)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_each_chunk_tells_the_usage_so_far(front: Any, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = _question(path) | {"stream_options": options, "n": 2, "prompt_logprobs": 1}
    *others, last = front.events(path, body)
    counts = [event["usage"]["completion_tokens"] for event in others]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] > counts[0]
    for event in others:
        usage = event["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    response = front.post(
        path, body | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    )
    assert response.status_code == 400
    assert "continuous_usage_stats needs include_usage" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_h09_options_of_a_stream_without_one(front: Any, path: str) -> None:
    """Case H09: ``stream_options`` where nothing streams is a 400."""
    options = {"stream": False, "stream_options": {"include_usage": True}}
    response = front.post(path, _question(path) | options)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


def _question(path: str) -> dict[str, Any]:
    what = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return what | {"max_tokens": 5, "cache_salt": os.urandom(8).hex()}


def _serve(*args: str, **environment: str) -> tuple[int, str]:
    """Run ``octavo serve`` until it ends, and return its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "octavo_server", "serve", *args, "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/dir", ["/no/such/dir does not exist"]),
        ("{folder}", ["{folder} has no", "config.json", "tokenizer.json", "weights"]),
        ("{folder}/config.json", ["config.json", "name the folder"]),
        ("{folder}/empty.gguf", ["empty.gguf", "is empty"]),
        ("user/definitely-missing", ["user/definitely-missing", "HF_HUB_OFFLINE"]),
    ],
)
def test_c01_a_model_that_is_not_there_is_one_line(
    tmp_path: Path, model: str, words: list[str]
) -> None:
    """Case C01: a mistyped model ends the server with one line that names it and what is missing.

    No network: the hub is forbidden, and a path would be refused before it is asked.
    """
    (tmp_path / "empty.gguf").touch()
    if model.endswith("config.json"):
        (tmp_path / "config.json").write_text("{}")
    home = str(tmp_path / "hub")
    code, output = _serve(
        model.format(folder=tmp_path), "--port", "0", HF_HUB_OFFLINE="1", HF_HOME=home
    )
    assert code != 0
    lines = output.strip().splitlines()
    assert len(lines) == 1, output
    for word in words:
        assert word.format(folder=tmp_path) in lines[0]


def test_c09_a_base_model_without_a_template(start_front: Any, tmp_path: Path) -> None:
    """Case C09: chats get a 400 that says what to do, completions work, the log warns once."""
    model = write_byte_model(tmp_path / "base")
    (model / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    front = start_front(model=model).wait_ready()
    response = front.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "no chat template" in message
    assert "--chat-template" in message
    assert front.post("/v1/completions", {"prompt": "hi"}).status_code == 200
    warnings = [line for line in front.stderr.splitlines() if line.startswith("W ")]
    assert len(warnings) == 1
    assert "chat template" in warnings[0]


def test_c09_a_template_of_the_operators(start_front: Any, tmp_path: Path) -> None:
    """Case C09: --chat-template stands in for what the model has, or has not."""
    template = tmp_path / "mine.jinja"
    template.write_text("<{{ messages[-1].content }}>")
    front = start_front(chat_template=template).wait_ready()
    response = front.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert response.json()["choices"][0]["message"]["content"] == "<hi>"


@pytest.mark.parametrize("content", [None, "{% for %}"])
def test_c09_a_template_that_is_none(tmp_path: Path, content: str | None) -> None:
    """Case C09: what can't be used is refused before anything is loaded."""
    template = tmp_path / "mine.jinja"
    if content is not None:
        template.write_text(content)
    with pytest.raises(ConfigError, match=r"--chat-template .*mine\.jinja can't be used"):
        read_chat_template(str(template))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], ["port", "70000", "at most 65535"]),
        (["--host", "no.such.host.invalid"], ["--host", "no.such.host.invalid"]),
        (["--host", "192.0.2.1"], ["192.0.2.1", "--host"]),
    ],
)
def test_c13_addresses_that_can_not_be(flags: list[str], words: list[str]) -> None:
    """Case C13: such an address is one line and an exit code, before anything is loaded."""
    code, output = _serve("/no/such/dir", *flags)
    assert code != 0
    lines = output.strip().splitlines()
    assert len(lines) == 1, output
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_c13_a_port_in_use(start_front: Any, host: str) -> None:
    """Case C13: the port is tried first, so there is no engine yet that could be left behind."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        sock.listen()
        port = sock.getsockname()[1]
        front = start_front(host=host, port=port)
        assert front.process.wait(timeout=20) != 0
        assert str(port) in front.stderr
        assert "in use" in front.stderr
        assert "engine" not in front.stderr


def test_c13_a_quick_restart_gets_the_same_port(start_front: Any) -> None:
    """Case C13: connections of the last server that the kernel still remembers do not matter.

    And its engine, which is killed last, has no hold on the socket.
    """
    first = start_front().wait_ready()
    port = int(first.url.rpartition(":")[2])
    with httpx.Client() as client:
        client.get(first.url + "/health")
        engines = children_of(first.process.pid)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(timeout=20)
        second = start_front(port=port).wait_ready()
    assert second.url == first.url
    assert json.loads(httpx.get(second.url + "/health").text)["status"] == "ok"
    assert not any(is_running(pid) for pid in engines)
