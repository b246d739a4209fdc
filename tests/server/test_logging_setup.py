"""Lines that nobody can forge, in both formats, and the access log."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

import httpx

from octavo_server.logging_setup import JSONFormatter, LineFormatter

FORGED = "x\nI 11-29 00:00:00 front: admin logged in\r\x1b[31mred\x85\u2028end"
START = re.compile(r"[DIWEC] \d\d-\d\d \d\d:\d\d:\d\d front: ")


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error is not None else None
    return logging.LogRecord("octavo_server.x", logging.WARNING, "", 1, message, args, info)


def test_a_message_stays_one_line() -> None:
    for made in (record("%s", FORGED), record(FORGED)):
        line = LineFormatter("front").format(made)
        assert START.match(line)
        assert len(line.splitlines()) == 1
        assert "\\x1b[31m" in line
        assert "é" in LineFormatter("front").format(record("é"))


def test_a_traceback_can_not_begin_a_line() -> None:
    text = LineFormatter("front").format(record("failed", error=ValueError(FORGED)))
    first, *rest = text.splitlines()
    assert first.endswith("failed")
    assert rest
    assert all(line.startswith("  | ") for line in rest)
    assert not any(START.match(line) for line in rest)


def test_json_lines() -> None:
    text = JSONFormatter("front").format(record("%s", FORGED, error=ValueError(FORGED)))
    assert len(text.splitlines()) == 1
    content = json.loads(text)
    assert content["message"] == FORGED
    assert content["level"] == "warning"
    assert (content["process"], content["logger"]) == ("front", "octavo_server.x")
    assert FORGED.splitlines()[0] in content["traceback"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", content["time"])


def test_json_that_can_not_be_encoded_is_still_a_line() -> None:
    assert json.loads(JSONFormatter("front").format(record("%s", "\ud800")))


def wait_for(front: Any, words: str) -> None:
    deadline = time.monotonic() + 10
    while words not in front.stderr:
        assert time.monotonic() < deadline, front.stderr
        time.sleep(0.02)


def test_the_access_log_has_a_line_for_each_request(start_front: Any) -> None:
    front = start_front(access_log="true", json_logs="true", log_stats_interval=0.2).wait_ready()
    assert httpx.get(front.url + "/version?a=%0aI%20forged").status_code == 200
    httpx.get(front.url + "/nope")
    front.post("/v1/completions", {"prompt": "slow" * 20, "max_tokens": 40})
    wait_for(front, "/v1/completions")
    wait_for(front, "Avg generation throughput")
    lines = [json.loads(line) for line in front.stderr.splitlines()]
    access = [line for line in lines if line["logger"] == "octavo_server.access"]
    assert [(line["method"], line["path"], line["status"]) for line in access] == [
        ("GET", "/version?a=%0aI%20forged", 200),
        ("GET", "/nope", 404),
        ("POST", "/v1/completions", 200),
    ]
    assert access[2]["seconds"] > 0.5
    # The engine's lines have the same form.
    assert {line["process"] for line in lines} <= {"front", "engine"}
