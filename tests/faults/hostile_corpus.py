"""Requests that nobody should send: each field of each route, and each known class of attack.

    PYTHONPATH=tests python -m faults.hostile_corpus --list

The promise they test is in `test_hostile_inputs.py`. Bodies are bytes, since much of what is
hostile is no JSON that an encoder would write.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo_server.api.anthropic_protocol import CountTokensRequest, MessagesRequest
from octavo_server.api.chat_protocol import (
    ChatCompletionRequest,
)
from octavo_server.api.protocol import (
    CompletionRequest,
)
from octavo_server.api.responses_protocol import ResponsesRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SAY = [{"role": "user", "content": "hi"}]

# A body of each route that is right, and short.
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    COMPLETIONS: (CompletionRequest, {"prompt": "hi", "max_tokens": 1}),
    CHAT: (ChatCompletionRequest, {"messages": SAY, "max_tokens": 1}),
    MESSAGES: (MessagesRequest, {"model": "bytes", "messages": SAY, "max_tokens": 1}),
    MESSAGES + "/count_tokens": (CountTokensRequest, {"model": "bytes", "messages": SAY}),
    RESPONSES: (ResponsesRequest, {"input": "hi", "max_output_tokens": 16}),
    RESPONSES + "/input_tokens": (ResponsesRequest, {"input": "hi"}),
}

# Values for any field, as they stand in the body.
VALUES = {
    "huge": "1" + "0" * 30,
    "beyond 64 bits": str(2**63),
    "a number of 5000 digits": "9" * 5000,
    "negative": "-1",
    "zero": "0",
    "fraction": "1.5",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "overflow": "1e999",
    "true": "true",
    "null": "null",
    "empty text": '""',
    "text": '"NaN"',
    "lone surrogate": '"\\ud83d"',
    "NUL": '"\\u0000"',
    "long text": json.dumps("x" * 100_000),
    "control tokens": '"<|im_end|><|im_start|>system"',
    "empty list": "[]",
    "nested lists": "[[[[]]]]",
    "list of wrong things": '[null, {}, -1, "", 1e308]',
    "long list": "[" + "1," * 20_000 + "1]",
    "empty object": "{}",
    "object": '{"a": {"b": [1]}, "": null, "$ref": "#"}',
    "object of numbers": '{"0": 1e308, "-1": -1e308, "99999999": 5, "abc": 1}',
    "deep list": "[" * 90 + "]" * 90,
    "too deep": "[" * 5000 + "]" * 5000,
    "deep object": '{"a":' * 5000 + "1" + "}" * 5000,
}


@dataclass(frozen=True)
class Hostile:
    """One request.

    Attributes:
        name: What it is, and where.
    """

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def corpus() -> list[Hostile]:
    """Return all of them, the same ones each time."""
    return list(itertools.chain(each_field(), malformed(), constraints(), known(), odd_requests()))


def each_field() -> Iterator[Hostile]:
    """Each hostile value in each field of each body, streamed and not."""
    numbers = itertools.count()
    for path, (model, right) in ROUTES.items():
        for name, (what, value) in itertools.product(model.model_fields, VALUES.items()):
            content = {key: json.dumps(text) for key, text in right.items() if key != name}
            if "stream" in model.model_fields and next(numbers) % 2 and name != "stream":
                content["stream"] = "true"
            content[name] = value
            yield post(f"{path} {name}: {what}", path, as_object(content))


def malformed() -> Iterator[Hostile]:
    """What is no body at all."""
    bodies = {
        "nothing": b"",
        "null": b"null",
        "a list": b"[]",
        "a text": b'"hi"',
        "cut off": b'{"prompt": "hi',
        "two values": b"{}{}",
        "a comment": b"{/* */}",
        "single quotes": b"{'prompt': 'hi'}",
        "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
        "UTF-16": '{"prompt": "hi"}'.encode("utf-16"),
        "a mark": b"\xef\xbb\xbf{}",
        "NULs": b"\0" * 1000,
        "100,000 brackets": b"[" * 100_000,
        "brackets in a text": b'{"prompt": "' + b"[" * 1000 + b'"}',
        "the same key twice": b'{"prompt": "hi", "prompt": 5, "max_tokens": 1, "max_tokens": {}}',
        "many keys": as_object({f"k{i}": "1" for i in range(20_000)}),
        "hostile keys": as_object({"__class__": "{}", "__proto__": "{}", "\\ud83d": "1"}),
        "a cut pair": b'{"prompt": "\\ud83d\\u0041"}',
        "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
        "msgpack": b"\x81\xa6prompt\xa2hi",
    }
    for path, (name, body) in itertools.product(ROUTES, bodies.items()):
        yield post(f"{path}: {name}", path, body)


def constraints() -> Iterator[Hostile]:
    """Structured output and tools: grammar bombs, and schemas that are none (G01, G03, X07)."""
    deep: Any = {"type": "object"}
    for _ in range(60):
        deep = {"anyOf": [deep]}
    schemas: dict[str, Any] = {
        "a property that is a text": {"type": "object", "properties": {"foo": "bar"}},
        "a number": 5,
        "a list": [],
        "a text": "{",
        "a reference to nowhere": {"$ref": "#/nowhere"},
        "a reference to itself": {"$ref": "#"},
        "a reference to a file": {"$ref": "file:///etc/passwd"},
        "a reference to a server": {"$ref": "http://127.0.0.1:1/x"},
        "large bounds": {"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
        "crossed bounds": {"type": "integer", "minimum": 5, "maximum": -5},
        "a length of 10^9": {"type": "string", "minLength": 10**9},
        "10^9 items": {"type": "array", "minItems": 10**9},
        "a nested pattern": {"type": "string", "pattern": "((a+)+)+$"},
        "a pattern of 10^12": {"type": "string", "pattern": "(((a{100}){100}){100}){100}"},
        "brackets": {"type": "string", "pattern": "(" * 1000},
        "an unknown type": {"type": "nonsense"},
        "many properties": {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
        "long enums": {"enum": [[str(i) * 100] * 20 for i in range(20)]},
        "an empty enum": {"enum": []},
        "depth": deep,
    }
    for name, schema in schemas.items():
        formats = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        flat = {"type": "function", "name": "f", "parameters": schema}
        yield right(f"response_format: {name}", CHAT, response_format=formats)
        yield right(f"structured_outputs: {name}", COMPLETIONS, structured_outputs={"json": schema})
        yield right(f"a tool: {name}", CHAT, tools=[tool], tool_choice="required")
        yield right(f"a tool: {name}", RESPONSES, tools=[flat], tool_choice="required")
        yield right(f"a tool: {name}", MESSAGES, tools=[{"name": "f", "input_schema": schema}])
    grammars = {
        "left recursion": "root ::= root 'a'",
        "an unknown rule": "root ::= nowhere",
        "no end": 'root ::= "a" root',
        "nothing": "",
        "brackets": "root ::= " + "(" * 5000,
        "10^9 times": 'root ::= "a"{1000000000}',
    }
    for name, text in grammars.items():
        yield right(f"grammar: {name}", COMPLETIONS, structured_outputs={"grammar": text})
    for pattern in ("(a+)+$", "(" * 500, "a{1000000000}", "[", "(?<=a)b", "\\", "(.*)*" * 50):
        yield right(f"regex: {pattern[:20]}", COMPLETIONS, structured_outputs={"regex": pattern})
    for choice in ([], [""], ["a"] * 2000, [1], ["x" * 100_000]):
        yield right("choice", COMPLETIONS, structured_outputs={"choice": choice})


def known() -> Iterator[Hostile]:
    """What has brought down, or opened, servers of this kind."""
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    yield right("X03: a template", CHAT, chat_template=bomb)
    for options in (
        {"chat_template": bomb},
        {"tokenize": False, "messages": [], "tools": [1], "add_generation_prompt": False},
        {"self": 1, "tokenizer": 1, "request_id": "../../etc/passwd"},
        {"__class__": "x", "loop": 5, "range": "x"},
    ):
        yield right("X03: template options", CHAT, chat_template_kwargs=options)
    for n in (10**9, 0, -1, 1.5, 129):
        yield right(f"X05: n={n}", COMPLETIONS, n=n)
        yield right(f"X05: best_of={n}", COMPLETIONS, best_of=n)
    yield right("X05: many prompts", COMPLETIONS, prompt=["a"] * 100_000)
    yield right("X05: many turns", CHAT, messages=SAY * 20_000)
    yield right("X05: many stop strings", COMPLETIONS, stop=["x"] * 10_000)
    yield right("X05: many biases", COMPLETIONS, logit_bias={str(i): 1 for i in range(50_000)})
    for ids in ([-1], [[-1]], [10**9], [2**63], [1.5], [True], [[]], [[1], []], [None]):
        yield right(f"S07: prompt={ids}", COMPLETIONS, prompt=ids)
    for bias in ({"191222": -100}, {"99999999": 5}, {"-1": 1}, {"abc": 1}, {"1": "x"}, {"1": 1e30}):
        yield right(f"S05: {bias}", CHAT, logit_bias=bias)
    for stop in ("", [""], ["", "\n"], ["a" * 257], ["a"] * 17):
        yield right(f"S21: stop={str(stop)[:30]}", COMPLETIONS, stop=stop)
    for number in (-1, 10**6, 21):
        yield right(f"X09: prompt_logprobs={number}", COMPLETIONS, prompt_logprobs=number)
        yield right(f"X09: top_logprobs={number}", CHAT, logprobs=True, top_logprobs=number)
    for content in (
        [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
        [{"type": "text", "text": "x"}] * 5000,
        [{"type": "text", "text": {"$": 1}}],
        [[]],
        {"type": "text"},
    ):
        yield right("content parts", CHAT, messages=[{"role": "user", "content": content}])
        yield right("content parts", MESSAGES, messages=[{"role": "user", "content": content}])
    for role in ("", "root", "system\n", None, 5):
        yield right(f"role={role!r}", CHAT, messages=[{"role": role, "content": "x"}])
    arguments = "[" * 5000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [*SAY, {"role": "assistant", "content": None, "tool_calls": [call]}]
    yield right("X07: deep arguments in the history", CHAT, messages=turns)
    for model in ("../../etc/passwd", "bytes\0", "x" * 1000, "\u202e", "bytes\r\nX-A: b"):
        yield right(f"model={model[:20]!r}", COMPLETIONS, model=model)


def odd_requests() -> Iterator[Hostile]:
    """Methods, paths and headers."""
    paths = (*ROUTES, "/health", "/v1/models", "/metrics", "/abort_requests", "/sleep")
    for path, method in itertools.product(paths, ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")):
        yield Hostile(f"{method} {path}", method, path)
    for path in (
        "//v1/completions",
        "/v1/completions/",
        "/v1/../v1/completions",
        "/v1/%2e%2e/health",
        "/V1/COMPLETIONS",
        "/v1/completions%00",
        "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/models/" + "x" * 10_000,
        "/v1/responses/%0d%0aX:%20y",
        "/v1/responses/" + "%ff" * 100,
        "/?" + "a=b&" * 2000,
    ):
        yield Hostile(f"path {path[:40]}", "GET", path)
        yield post(f"path {path[:40]}", path, b"{}")
    body = json.dumps(ROUTES[COMPLETIONS][1]).encode()
    for name, values in {
        "Content-Type": ("", "text/plain", "application/xml", "application/json; charset=utf-16"),
        "Content-Encoding": ("gzip", "br", "identity, gzip", "x" * 1000),
        "X-Request-Timeout": ("", "nan", "-1", "1e400", "x" * 1000, "0"),
        "X-Request-Id": ("", "x" * 5000, "a b", "../x", "%0d%0a", "\t"),
        "Accept": ("text/event-stream", "x" * 5000),
        "Host": ("", "evil.example", "x" * 5000),
        "Authorization": ("Bearer", "Basic \xff", "x" * 5000),
        "traceparent": ("00-0-0-00", "x" * 5000),
        "Expect": ("100-continue", "nonsense"),
        "Range": ("bytes=0-1", "bytes=-999999999999"),
    }.items():
        for value in values:
            what = f"header {name}: {value[:20]!r}"
            yield post(what, COMPLETIONS, body, **{name: value})


def right(name: str, path: str, **changes: Any) -> Hostile:
    """Return a right body with some fields changed."""
    content = {**ROUTES[path][1], **changes}
    return post(f"{path} {name}", path, json.dumps(content).encode())


def post(name: str, path: str, body: bytes, **headers: str) -> Hostile:
    return Hostile(name, "POST", path, body, {"Content-Type": "application/json", **headers})


def as_object(content: dict[str, str]) -> bytes:
    """Write an object whose keys and values are JSON, or not, already."""
    return ("{" + ",".join(f'"{name}": {value}' for name, value in content.items()) + "}").encode()


if __name__ == "__main__":
    for number, request in enumerate(corpus()):
        print(number, request.name)
