"""``octavo run-batch`` as a process of its own, against a front on a scripted engine."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo_core.errors import ConfigError
from octavo_server.batch_file import BadLine, BatchOutput, BatchRequest, BatchResult, read_requests
from octavo_server.cli import run_batch as run_batch_command

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> str:
    request = {"custom_id": custom_id, "method": method, "url": url, "body": body}
    return json.dumps(request)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines))
    return path


def command(source: Path, target: Path, url: str, *flags: str) -> list[str]:
    files = ["-i", str(source), "-o", str(target)]
    return [sys.executable, "-m", "octavo_server", "run-batch", *files, "--url", url, *flags]


def run_batch(
    source: Path, target: Path, url: str, *flags: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(source, target, url, *flags),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def results(path: Path) -> dict[str | None, Any]:
    read = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {result["custom_id"]: result for result in read}
    assert len(by_id) == len(read)
    return by_id


def test_answers_and_errors_line_by_line(front: Any, tmp_path: Path) -> None:
    source = write(
        tmp_path,
        line("text", prompt="hello", max_tokens=3),
        "",
        line("chat", CHAT, messages=[{"role": "user", "content": "hi"}]),
        line("wrong field", prompt="x", temperature=9),
        line("no such route", "/v1/nothing"),
        line("other model", model="gpt-5", prompt="x"),
        line("streamed", prompt="x", stream=True),
        line("text", prompt="again"),
        line("elsewhere", "//example.org/v1/completions"),
        line("read", COMPLETIONS, "GET"),
        line("two lines", COMPLETIONS + "\r\nX-Api-Key: guess"),
        line("long", COMPLETIONS + "?" + 70000 * "x"),
        line("breaks", prompt="break it"),
        "{not json",
    )
    target = tmp_path / "out.jsonl"
    done = run_batch(source, target, front.url)
    assert done.returncode == 1
    assert "2 answered, 11 failed, 0 answered before" in done.stderr
    lines = [json.loads(text) for text in target.read_text().splitlines()]
    assert all(set(item) == {"id", "custom_id", "response", "error"} for item in lines)
    assert len({item["id"] for item in lines}) == len(lines)
    good = {item["custom_id"]: item for item in lines if item["error"] is None}
    bad = {item["custom_id"]: item["error"] for item in lines if item["error"]}

    text = good["text"]["response"]
    assert text["status_code"] == 200
    assert text["body"]["choices"][0]["text"] == "hel"
    assert text["request_id"] == text["body"]["id"]
    assert good["chat"]["response"]["body"]["object"] == "chat.completion"
    statuses = {name: item["response"]["status_code"] for name, item in good.items()}
    assert statuses == {
        "text": 200,
        "chat": 200,
        "wrong field": 400,
        "no such route": 404,
        "other model": 404,
        "breaks": 500,
    }
    error = good["wrong field"]["response"]["body"]["error"]
    assert error["param"] == "temperature"
    assert set(bad) == {"streamed", "text", "elsewhere", "read", "two lines", "long", None}
    assert {item["code"] for item in bad.values()} == {"invalid_line"}
    assert "line 14" in bad[None]["message"]
    assert "line 8: custom_id 'text' was there before" in bad["text"]["message"]


def test_a_second_run_answers_what_has_no_answer(front: Any, tmp_path: Path) -> None:
    source = write(tmp_path, *(line(f"r{i}", prompt=f"p{i}", max_tokens=2) for i in range(6)))
    target = tmp_path / "out.jsonl"
    assert run_batch(source, target, front.url).returncode == 0
    first = results(target)
    # As if one had failed, one were not done, and the run had ended in the middle of a line.
    kept = [json.dumps(first[f"r{i}"]) for i in range(3)]
    failed = {**first["r3"], "response": {**first["r3"]["response"], "status_code": 500}}
    target.write_text("\n".join([*kept, json.dumps(failed), json.dumps(first["r4"])[:40]]))
    done = run_batch(source, target, front.url)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        0,
        "3 answered, 0 failed, 3 answered before",
    )
    second = results(target)
    assert set(second) == set(first)
    assert all(second[f"r{i}"] == first[f"r{i}"] for i in range(3))
    assert run_batch(source, target, front.url).stderr.splitlines()[-1] == (
        "0 answered, 0 failed, 6 answered before"
    )
    assert results(target) == second


def test_a_run_that_is_killed_goes_on_later(front: Any, tmp_path: Path) -> None:
    source = write(tmp_path, *(line(f"r{i}", prompt=f"slow{i}", max_tokens=5) for i in range(30)))
    target = tmp_path / "out.jsonl"
    process = subprocess.Popen(command(source, target, front.url, "--max-concurrency", "2"))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (target.exists() and target.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_before = len(target.read_text().splitlines())
    assert 0 < num_before < 30
    assert run_batch(source, target, front.url).returncode == 0
    assert set(results(target)) == {f"r{i}" for i in range(30)}


def test_no_more_at_a_time_than_allowed(start_front: Any, tmp_path: Path) -> None:
    """A third request at one time would be refused by this front."""
    front = start_front(max_num_queued_reqs=2).wait_ready()
    source = write(tmp_path, *(line(f"r{i}", prompt=f"p{i}", max_tokens=2) for i in range(9)))
    done = run_batch(source, tmp_path / "out.jsonl", front.url, "--max-concurrency", "2")
    assert done.returncode == 0, done.stderr


def test_without_a_server_nothing_is_written_off(tmp_path: Path) -> None:
    source, target = write(tmp_path, line("a", prompt="x")), tmp_path / "out.jsonl"
    code = (
        "import sys; from octavo_client import Client; from octavo_client.calls import *;"
        "Client.wait_until_ready = lambda self: None;"
        "import octavo_server.cli.run_batch as b; b._MAX_RETRIES = 0;"
        "from octavo_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    words = command(source, target, "http://127.0.0.1:9")[3:]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "can't be reached" in done.stderr
    assert target.read_text() == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("", "0 answered, 0 failed")],
)
def test_an_input_without_lines(
    tmp_path: Path, front: Any, content: str | None, words: str
) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content)
    done = run_batch(source, tmp_path / "out.jsonl", front.url)
    assert words in done.stderr
    assert done.returncode == (2 if content is None else 0)


def test_the_input_is_not_overwritten(tmp_path: Path, front: Any) -> None:
    source = write(tmp_path, line("a", prompt="x"))
    before = source.read_text()
    assert run_batch(source, source, front.url).returncode == 2
    other = tmp_path / "other"
    other.write_text(before + "\n")
    with pytest.raises(ConfigError, match="no answer of a batch"):
        BatchOutput(other)
    assert (source.read_text(), other.read_text()) == (before, before + "\n")


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with target.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run"):
            BatchOutput(target)
    with BatchOutput(target) as output:
        output.write(BatchResult.failed("a", "x", "y"))
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_lines_that_are_too_long_are_read_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_server.batch_file.MAX_LINE_BYTES", 200)
    source = write(tmp_path, line("a", prompt="x"), line("b", prompt="x" * 900), line("c"))
    first, second, third = read_requests(source)
    assert isinstance(second, BadLine)
    assert "longer than 200" in second.reason
    assert isinstance(first, BatchRequest)
    assert isinstance(third, BatchRequest)
    assert (first.custom_id, third.custom_id) == ("a", "c")


def test_a_server_of_its_own_gets_its_own_key(
    start_front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for a key that nobody else knows, whatever key is in the environment."""
    front = start_front(api_key="sk-own").wait_ready()

    class KeyedServer(contextlib.nullcontext["KeyedServer"]):
        url = front.url
        api_key = "sk-own"

        def __init__(self, model: str) -> None:
            super().__init__(self)

        def wait_until_ready(self, *_: Any) -> None: ...

    monkeypatch.setattr(run_batch_command, "LocalServer", KeyedServer)
    monkeypatch.setattr("octavo_server.model_source.resolve_model", lambda model: None)
    source, target = write(tmp_path, line("a", prompt="x")), tmp_path / "answers.jsonl"
    args = argparse.Namespace(
        input_file=source,
        output_file=target,
        max_concurrency=2,
        url=None,
        model="",
        api_key="sk-other",
    )
    assert run_batch_command.run(args) == 0
    assert results(target)["a"]["response"]["status_code"] == 200


def test_a_wrong_key_writes_nothing_off(start_front: Any, tmp_path: Path) -> None:
    front = start_front(api_key="sk-right").wait_ready()
    lines = [line(f"r{i}", prompt=f"p{i}", max_tokens=2) for i in range(20)]
    source, target = write(tmp_path, *lines), tmp_path / "out.jsonl"
    done = run_batch(source, target, front.url, "--api-key", "sk-wrong", "--max-concurrency", "2")
    assert done.returncode == 1
    assert "--api-key" in done.stderr
    assert target.read_text() == ""
    assert run_batch(source, target, front.url, "--api-key", "sk-right").returncode == 0
    assert len(results(target)) == 20


def test_an_input_that_can_be_read_only_once(front: Any, tmp_path: Path) -> None:
    """A pipe, for example ``-i <(grep ...)``; nothing of it must get lost."""
    target = tmp_path / "out.jsonl"
    source = "\n".join(line(str(number), prompt="hello", max_tokens=3) for number in range(3))
    done = subprocess.run(
        command(Path("/dev/stdin"), target, front.url),
        input=source,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "3 answered, 0 failed" in done.stderr
    assert set(results(target)) == {"0", "1", "2"}


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full"])
def test_a_target_that_is_no_file(name: str, tmp_path: Path) -> None:
    """``/dev/full`` was read for answers until the memory ended."""
    with pytest.raises(ConfigError, match="no regular file"):
        BatchOutput(Path(name))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="no regular file"):
        BatchOutput(fifo)


def test_a_full_disk_is_one_line(front: Any, tmp_path: Path) -> None:
    """A limit on a file's size stands for it. What was answered until then stays answered."""
    source = write(tmp_path, *(line(str(i), prompt="hello " * 30) for i in range(40)))
    target = tmp_path / "out.jsonl"
    limit = ("sh", "-c", 'trap "" XFSZ; ulimit -f 8 && exec "$@"', "sh")
    done = subprocess.run(
        [*limit, *command(source, target, front.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"octavo run-batch: error: {target} can't be written: File too large.\n"
    done = run_batch(source, target, front.url)
    assert done.returncode == 0
    assert " 0 answered before" not in done.stderr
    assert len(results(target)) == 40
