"""Parsers of tool calls: what each format says, however it is cut, and what is no call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.errors import ConfigError
from octavo_server.answer_events import ArgumentsDelta, CallStart, TextDelta
from octavo_server.tool_parsers import TOOL_PARSERS, Scanner, detect_tool_parser, tool_parser
from octavo_server.tool_parsers.deepseek import DeepSeekParser
from octavo_server.tool_parsers.forced import ForcedArgumentsParser, ForcedCallsParser
from octavo_server.tool_parsers.harmony import HarmonyParser
from octavo_server.tool_parsers.hermes import HermesParser
from octavo_server.tool_parsers.llama3_json import Llama3JsonParser
from octavo_server.tool_parsers.mistral import MistralParser
from octavo_server.tool_parsers.pythonic import PythonicParser
from octavo_server.tool_parsers.qwen3_coder import Qwen3CoderParser
from octavo_server.tool_parsers.scanner import COMMIT_CHARS
from support.answers import calls_of, cut, parse, summary

PARIS = ("get_weather", {"city": "Paris"})
PING: tuple[str, Any] = ("ping", {})

HERMES_PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_PING = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
DEEP = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
V3_PARIS = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>'
)
V31_PARIS = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
V31_PING = "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
HARMONY_PARIS = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}<|call|>'
)
HARMONY_FINAL = "<|start|>assistant<|channel|>final<|message|>Hello!"

# Parser, what the model writes, and the text, reasoning and calls in it.
GOOD: list[tuple[type[Scanner], str, str | None, str | None, list[tuple[str, Any]]]] = [
    (HermesParser, "Hello <b>, 1 < 2\n", "Hello <b>, 1 < 2\n", None, []),
    (HermesParser, HERMES_PARIS, None, None, [PARIS]),
    (HermesParser, f"Let me see.\n\n{HERMES_PARIS}", "Let me see.", None, [PARIS]),
    (HermesParser, f"{HERMES_PARIS}\n{HERMES_PING}\n", None, None, [PARIS, PING]),
    (HermesParser, f"a {HERMES_PING} b {HERMES_PARIS} c", "abc", None, [PING, PARIS]),
    (HermesParser, HERMES_PARIS.removesuffix("\n</tool_call>"), None, None, [PARIS]),
    (
        HermesParser,
        '<tool_call>{"arguments": {"city": "Paris"}, "x": [1, {}], "name": "get_weather"}',
        None,
        None,
        [PARIS],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "ping", "arguments": null}</tool_call>',
        None,
        None,
        [PING],
    ),
    (HermesParser, '<tool_call>{"name": "ping", "arguments": ""}</tool_call>', None, None, [PING]),
    (HermesParser, '<tool_call>{"name": "ping"}</tool_call>', None, None, [PING]),
    (
        HermesParser,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        None,
        None,
        [PARIS],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d\\\'</tool_call>", "b": True}}'
        "</tool_call>",
        None,
        None,
        [("f", {"a": "x\ny\\d'</tool_call>", "b": True})],
    ),
    (Llama3JsonParser, "Hello {x}", "Hello {x}", None, []),
    (
        Llama3JsonParser,
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        None,
        None,
        [PARIS],
    ),
    (
        Llama3JsonParser,
        'So: <|python_tag|>{"type": "function", "name": "ping", "parameters": {}}; '
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "So:",
        None,
        [PING, PARIS],
    ),
    (Llama3JsonParser, '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', None, []),
    (
        MistralParser,
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "ping", "arguments": {}}]',
        None,
        None,
        [PARIS, PING],
    ),
    (
        MistralParser,
        'I see[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]ping{}',
        "I see",
        None,
        [PARIS, PING],
    ),
    (
        MistralParser,
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}',
        None,
        None,
        [PARIS],
    ),
    (PythonicParser, "[1, 2] is a list", "[1, 2] is a list", None, []),
    (PythonicParser, "[get_weather(city='Paris'), ping()]", None, None, [PARIS, PING]),
    (
        PythonicParser,
        '<|python_start|>[f(a=[1, -2.5, (True, None)], b={"k": \'"\\x41\\n\'}, c=1e3,)]'
        "<|python_end|>",
        None,
        None,
        [("f", {"a": [1, -2.5, [True, None]], "b": {"k": '"A\n'}, "c": 1000})],
    ),
    (PythonicParser, "[unknown(a=1)]", "[unknown(a=1)]", None, []),
    (DeepSeekParser, f"Sure.{DEEP.format(V3_PARIS)}", "Sure.", None, [PARIS]),
    (DeepSeekParser, DEEP.format(V31_PARIS + "\n" + V31_PING), None, None, [PARIS, PING]),
    (HarmonyParser, "plain", "plain", None, []),
    (
        HarmonyParser,
        f"<|channel|>analysis<|message|>Hm, hm.<|end|>{HARMONY_FINAL}",
        "Hello!",
        "Hm, hm.",
        [],
    ),
    (
        HarmonyParser,
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_PARIS}",
        None,
        "Hm.",
        [PARIS],
    ),
    (
        HarmonyParser,
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}',
        None,
        None,
        [PARIS],
    ),
    (
        HarmonyParser,
        f"<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant{HARMONY_PARIS}",
        "I'll look.",
        None,
        [PARIS],
    ),
]

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {
            "a": {"type": "array"},
            "b": {"type": "boolean"},
            "c": {"type": ["integer", "null"]},
            "d": {"anyOf": [{"type": "string"}, {"type": "number"}]},
            "e": {"type": "object"},
        }
    },
    "get_weather": {"properties": {"city": {"type": "string"}}},
    "ping": {},
}
CODER_PARIS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
GOOD += [
    (Qwen3CoderParser, f"I look.\n{CODER_PARIS}\n", "I look.", None, [PARIS]),
    (Qwen3CoderParser, "<function=ping>\n</function>", None, None, [PING]),
    (
        Qwen3CoderParser,
        "<tool_call><function=f><parameter=a>[1, 2]</parameter><parameter=b>True</parameter>"
        "<parameter=c>null</parameter><parameter=d>1.5</parameter><parameter=e>{oops</parameter>"
        '<parameter=x>\n\n "5"\n<b>\n\n</parameter></function></tool_call>',
        None,
        None,
        [("f", {"a": [1, 2], "b": True, "c": None, "d": 1.5, "e": "{oops", "x": '\n "5"\n<b>\n'})],
    ),
]

# What no parser may take for a call; all of it stays text, white space between calls aside.
BAD: list[tuple[type[Scanner], str]] = [
    (HermesParser, "<tool_call>"),
    (HermesParser, "<tool_call>Paris</tool_call>"),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {oops}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "\\ud8"}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}"),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 500 + "}}"),
    (HermesParser, '<tool_call>{"name": "' + "f" * 300 + '", "arguments": {}}'),
    (Qwen3CoderParser, "<tool_call><function=f><parameter=a>1"),
    (Qwen3CoderParser, "<tool_call><function=f>Paris</function></tool_call>"),
    (Qwen3CoderParser, "<function=f><parameter=x>1</parameter><parameter=x>2</parameter>"),
    (Llama3JsonParser, '{"name": "f", "parameters": {"a": '),
    (Llama3JsonParser, '<|python_tag|>print("hi")'),
    (MistralParser, '[TOOL_CALLS][{"name": "f"'),
    (MistralParser, "[TOOL_CALLS]no call at all"),
    (MistralParser, "[TOOL_CALLS]f[ARGS]5"),
    (PythonicParser, "[f(a=1, a=2)]"),
    (PythonicParser, "[f(a=open('x'))]"),
    (PythonicParser, "[f(1)]"),
    (PythonicParser, "[f(a='x"),
    (PythonicParser, "[f(a='\\ud800\\xZZ')]"),
    (DeepSeekParser, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{,}"),
    (DeepSeekParser, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}"),
    (HarmonyParser, "<|channel|>"),
]


def make(kind: type[Scanner], **options: Any) -> Scanner:
    return kind(SCHEMAS, **options)


@pytest.mark.parametrize(("kind", "text", "content", "reasoning", "calls"), GOOD)
def test_what_each_format_says(
    kind: type[Scanner],
    text: str,
    content: str | None,
    reasoning: str | None,
    calls: list[tuple[str, Any]],
) -> None:
    answer = parse(make(kind), [text])
    assert (answer.text, answer.reasoning, calls_of(answer)) == (content, reasoning, calls)
    assert len({call.id for call in answer.calls}) == len(calls)


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_what_is_no_call_is_text(kind: type[Scanner], text: str) -> None:
    answer = parse(make(kind), [text])
    assert (answer.text, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, text, *_ in GOOD] + BAD, ids=lambda value: str(value)
)
def test_one_character_at_a_time_says_the_same(kind: type[Scanner], text: str) -> None:
    assert summary(parse(make(kind), list(text))) == summary(parse(make(kind), [text]))


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|message|>", "\\"),
        *("<|channel|>", "analysis", "<|end|>", "<|call|>", " to=functions.f", "[f(", "a=", ")]"),
        *('{"name": "f", "arguments": ', '{"a": 1}', "}", "{", "[", "]", '"', "'", ",", ":", " "),
        *(
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "\n",
            "x",
            "é",
            "1",
            "\\u00",
        ),
    ]
)


@given(
    kind=st.sampled_from([*TOOL_PARSERS.values(), ForcedCallsParser]),
    pieces=st.lists(PIECES, max_size=30),
    cuts=st.lists(st.integers(min_value=0), max_size=8),
    commit=st.sampled_from([0, 3, COMMIT_CHARS]),
)
@settings(max_examples=300, deadline=None)
def test_any_text_however_cut_says_the_same(
    kind: type[Scanner], pieces: list[str], cuts: list[int], commit: int
) -> None:
    text = "".join(pieces)
    whole = parse(make(kind, commit_chars=commit), [text])
    assert summary(parse(make(kind, commit_chars=commit), cut(text, cuts))) == summary(whole)
    if commit == COMMIT_CHARS:
        for call in whole.calls:
            assert isinstance(json.loads(call.arguments), dict)


def test_a_long_call_is_sent_as_it_comes() -> None:
    parser = make(HermesParser)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"text": "') == []
    start, arguments = parser.push("x" * (COMMIT_CHARS + 1))
    assert isinstance(start, CallStart)
    assert isinstance(arguments, ArgumentsDelta)
    assert parser.push("more") == [ArgumentsDelta(0, "more")]
    assert parser.push('"}}</tool_call> and text') == [
        ArgumentsDelta(0, '"}'),
        TextDelta("and text"),
    ]


def test_a_long_call_that_breaks_keeps_what_was_sent() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"text": "' + "x" * 600 + '" oops'
    answer = parse(make(HermesParser), [text])
    assert answer.calls[0].arguments == '{"text": "' + "x" * 600 + '" '
    assert answer.text == "oops"


def test_ids_of_mistral_are_what_its_templates_take() -> None:
    answer = parse(make(MistralParser), ["[TOOL_CALLS]ping{}"])
    assert len(answer.calls[0].id) == 9
    assert answer.calls[0].id.isalnum()


def test_g09_empty_arguments_are_an_object() -> None:
    for arguments in ("{}", "{ \n }", "null", '""'):
        text = f'<tool_call>{{"name": "ping", "arguments": {arguments}}}</tool_call>'
        assert parse(make(HermesParser), [text]).calls[0].arguments == "{}"


def test_forced_arguments_are_sent_from_the_first_character() -> None:
    parser = ForcedArgumentsParser(["f"], commit_chars=0)
    start, brace = parser.push("{")
    assert (start.name, brace) == ("f", ArgumentsDelta(0, "{"))  # type: ignore[union-attr]
    assert parser.push('"a": "x') == [ArgumentsDelta(0, '"a": "x')]
    assert parser.push('"}') == [ArgumentsDelta(0, '"}')]
    assert parser.finish() == []


def test_forced_calls() -> None:
    paris = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    text = f'[{paris},{{"name": "ping", "parameters": {{}}}}]'
    parser = make(ForcedCallsParser, commit_chars=0)
    assert calls_of(parse(parser, list(text))) == [PARIS, PING]


@pytest.mark.parametrize(
    ("sign", "kind"),
    [
        ("<|channel|>", HarmonyParser),
        ("<｜tool▁call▁begin｜>", DeepSeekParser),
        ("[TOOL_CALLS]", MistralParser),
        ("<tool_call>", HermesParser),
        ("<tool_call>\n<function=", Qwen3CoderParser),
        ("[func_name1(params_name1=params_value1", PythonicParser),
        ('{"name": function name, "parameters": dictionary', Llama3JsonParser),
        ("{% for message in messages %}", None),
    ],
)
def test_the_template_tells_the_format(sign: str, kind: type[Scanner] | None) -> None:
    assert detect_tool_parser(f"{{{{ bos_token }}}} {sign} …") is kind


def test_a_parser_can_be_named() -> None:
    assert tool_parser("qwen3") is HermesParser
    assert tool_parser("pythonic") is PythonicParser
    assert tool_parser("none") is None
    with pytest.raises(ConfigError, match=r"--tool-call-parser.*hermes"):
        tool_parser("hermse")


HOSTILE: list[tuple[type[Scanner], Callable[[int], str]]] = [
    (HermesParser, lambda n: "<tool_call>" * n),
    (HermesParser, lambda n: "<tool_call>{" * n),
    (HermesParser, lambda n: '<tool_call>{"name": "f", "arguments": ' + "{" * n),
    (HermesParser, lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "\\d" * n),
    (HermesParser, lambda n: "</tool_cal" * n),
    (Llama3JsonParser, lambda n: "{" * n),
    (Llama3JsonParser, lambda n: "<|python_tag|>{" * n),
    (MistralParser, lambda n: "[TOOL_CALLS][{" * n),
    (MistralParser, lambda n: "[TOOL_CALLS]" + "f" * n),
    (PythonicParser, lambda n: "[f(" + "a=1," * n),
    (PythonicParser, lambda n: "[f(a=" + "[" * n),
    (PythonicParser, lambda n: "[f(" + ",".join(f"a{i}=1" for i in range(n))),
    (DeepSeekParser, lambda n: "<｜tool▁call▁begin｜>" * n),
    (HarmonyParser, lambda n: "<|channel|>" * n),
    (HarmonyParser, lambda n: "<|channel|>analysis<|message|>" + " " * n),
    (Qwen3CoderParser, lambda n: "<function=f>" * n),
    (Qwen3CoderParser, lambda n: "<function=f>" + "<parameter=x>" * n),
    (HermesParser, lambda n: "Action:" + " " * n),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE)
@pytest.mark.parametrize("size", [3, 1 << 30])
def test_x13_work_is_linear(kind: type[Scanner], text: Callable[[int], str], size: int) -> None:
    """Counted in calls, not in seconds: 8 times the text makes about 8 times the calls."""
    few, many = (num_calls(make(kind), text(n), size) for n in (250, 2000))
    assert many < 12 * few + 1000


def num_calls(parser: Scanner, text: str, size: int) -> int:
    """Return how many calls parsing makes; in a stream, nothing much may wait in the parser."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        for start in range(0, len(text), size):
            parser.push(text[start : start + size])
            assert len(parser._buffer) - parser._position < 64
        parser.finish()
    finally:
        sys.setprofile(None)
    return count
