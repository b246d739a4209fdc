"""Structured output over HTTP: its fields in all their forms, and its refusals.

The scripted model repeats the prompt as far as the constraint allows.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.front import FrontUnderTest
from support.json_schemas import BROKEN, UNSUPPORTED
from support.server import children_of, command_line, is_running

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    """A front whose engine follows grammars."""
    running = FrontUnderTest(tmp_path_factory.mktemp("front"), "constrained_engine")
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def choice_of(front: Any, prompt: str, path: str = COMPLETIONS, **fields: Any) -> tuple[str, str]:
    """Answer with and without a stream; both have to agree."""
    body: dict[str, Any] = {"max_tokens": 100, **fields}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    response = front.post(path, body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    events = [event["choices"][0] for event in front.events(path, body)]
    if path == CHAT:
        assert "".join(event["delta"].get("content") or "" for event in events) == text
    else:
        assert "".join(event["text"] for event in events) == text
    assert events[-1]["finish_reason"] == choice["finish_reason"]
    return text, choice["finish_reason"]


def error_of(front: Any, path: str = CHAT, stream: bool = False, **fields: Any) -> dict[str, Any]:
    body = {"stream": stream, **fields}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "car"}]
    else:
        body["prompt"] = "car"
    response = front.post(path, body)
    assert response.status_code == 400, response.text
    # Not a stream: the refusal comes before any byte of one.
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    return error


def test_a_schema_is_followed(front: Any) -> None:
    prompt = '{"name": "Ada", "age": 36} and more'
    fields = json_schema(PERSON, strict=True, description="someone")
    assert choice_of(front, prompt, **fields) == ('{"name": "Ada", "age": 36}', "stop")


def test_a_model_that_has_other_ideas_follows_it_too(front: Any) -> None:
    text, finish_reason = choice_of(front, "Once upon a time", CHAT, **json_schema(PERSON))
    assert finish_reason in ("stop", "length")
    assert text.startswith('{"name": "')


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": {"enum": ["no"]}}},
        {"structured_outputs": {"json": '{"enum": ["no"]}'}},
        {"structured_outputs": {"regex": '"no"'}},
        {"structured_outputs": {"choice": ['"no"']}},
        {"structured_outputs": {"grammar": 'start: "\\"no\\""'}},
        {"structured_outputs": {"grammar": 'root ::= "\\"no\\""'}},
        {"guided_json": {"enum": ["no"]}},
        {"guided_regex": '"no"'},
        {"guided_choice": ['"no"']},
        {"guided_grammar": 'root ::= "\\"no\\""'},
        {"guided_json": {"enum": ["no"]}, "guided_decoding_backend": "outlines"},
        json_schema({"enum": ["no"]}),
    ],
)
def test_every_way_to_say_it(front: Any, path: str, fields: dict[str, Any]) -> None:
    assert choice_of(front, "yes", path, **fields) == ('"no"', "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json_object": True},
    ],
)
def test_any_object(front: Any, fields: dict[str, Any]) -> None:
    prompt = '{"a": [1, {"b": null}], "c": "d"} and more'
    text, finish_reason = choice_of(front, prompt, **fields)
    assert (json.loads(text), finish_reason) == ({"a": [1, {"b": None}], "c": "d"}, "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": None},
        {"guided_json": None, "guided_json_object": False},
    ],
)
def test_what_asks_for_nothing(front: Any, fields: dict[str, Any]) -> None:
    assert choice_of(front, "abc", **fields) == ("abc", "stop")


def test_a_forced_text_is_whole(front: Any) -> None:
    """T01: characters of several tokens, all of them forced."""
    text = "a🫠龜🥹 é b"
    for path in (COMPLETIONS, CHAT):
        fields = {"structured_outputs": {"choice": [text]}}
        assert choice_of(front, "x", path, **fields) == (text, "stop")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_in_a_forced_text(front: Any, include: bool) -> None:
    """T05 and T07: tokens that come all at once still end at the stop string."""
    fields: dict[str, Any] = {
        "structured_outputs": {"choice": ["a,b,c,d,e"]},
        "stop": ["c,d"],
        "include_stop_str_in_output": include,
    }
    assert choice_of(front, "x", **fields) == ("a,b,c,d" if include else "a,b,", "stop")


def test_max_tokens_cuts_a_forced_text(front: Any) -> None:
    fields = {"structured_outputs": {"choice": ["abcdefgh"]}, "max_tokens": 5}
    assert choice_of(front, "x", **fields) == ("abcde", "length")
    response = front.post(COMPLETIONS, {"prompt": "x", **fields})
    assert response.json()["usage"]["completion_tokens"] == 5


def test_logprobs_of_a_constrained_answer(front: Any) -> None:
    """S17: strict JSON, one entry for each token."""
    response = front.post(
        COMPLETIONS,
        {"prompt": "x", "structured_outputs": {"choice": ["abc"]}, "logprobs": 3},
    )
    choice = json.loads(response.text, parse_constant=_refuse)["choices"][0]
    assert choice["text"] == "abc"
    assert len(choice["logprobs"]["tokens"]) == 3


def _refuse(constant: str) -> None:
    raise AssertionError(constant)


def test_each_choice_and_each_prompt_has_a_matcher_of_its_own(front: Any) -> None:
    response = front.post(
        COMPLETIONS,
        {"prompt": ["yes", "no", "maybe"], "n": 2, "structured_outputs": {"choice": ["no", "yes"]}},
    )
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert texts[:4] == ["yes", "yes", "no", "no"]
    assert set(texts[4:]) <= {"yes", "no"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["property_is_a_string", "ref_to_nowhere", "type", "bounds"])
def test_a_broken_schema_is_a_400_with_its_place(front: Any, name: str, stream: bool) -> None:
    """G01 and G03"""
    text, place = BROKEN[name]
    error = error_of(front, stream=stream, **json_schema(json.loads(text)))
    assert error["param"] == "response_format"
    assert place in error["message"]
    assert choice_of(front, "abc") == ("abc", "stop")


@pytest.mark.parametrize("name", ["not", "unique", "overlapping", "look_ahead"])
def test_an_unsupported_keyword_is_named(front: Any, name: str) -> None:
    schema, word = UNSUPPORTED[name]
    error = error_of(front, COMPLETIONS, structured_outputs={"json": schema})
    assert error["param"] == "structured_outputs"
    assert word in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (json_schema(5), "response_format.json_schema.schema"),
        (json_schema(None), "response_format.json_schema.schema"),
        (json_schema([]), "response_format.json_schema.schema"),
        (json_schema("{"), "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["x"] * 1025}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["x" * 40_000] * 2}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'root ::= "x'}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "a", **json_schema({})}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "["}, "guided_regex"),
        (json_schema({"description": "x" * 70_000}), "response_format.json_schema.schema"),
    ],
)
def test_what_is_wrong_is_named(front: Any, fields: dict[str, Any], param: str) -> None:
    """G01 and X07"""
    assert error_of(front, **fields)["param"] == param


def test_a_deep_schema_is_refused(front: Any) -> None:
    """X07"""
    schema: dict[str, Any] = {}
    for _ in range(20):
        schema = {"anyOf": [schema]}
    assert "32 levels" in error_of(front, **json_schema(schema))["message"]
    text = '{"anyOf":[' * 3000 + "{}" + "]}" * 3000
    assert "deep" in error_of(front, structured_outputs={"json": text})["message"]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, signal_number: int) -> None:
    front = FrontUnderTest(tmp_path, "constrained_engine")
    try:
        front.wait_ready()
        assert choice_of(front, "yes", guided_choice=["no"]) == ("no", "stop")
        children = children_of(front.process.pid)
        assert any("grammar" in command_line(child) for child in children)
        front.process.send_signal(signal_number)
        front.process.wait(timeout=20)
        deadline = time.monotonic() + 20
        while any(map(is_running, children)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_running, children))
    finally:
        front.stop()
