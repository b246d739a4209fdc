from __future__ import annotations

import pytest

from octavo_core.config import resolve_config
from octavo_core.errors import ConfigError
from octavo_server.answer_events import AnswerEvent, CollectedAnswer, collect
from octavo_server.answer_parser import AnswerFormat, AnswerParser
from octavo_server.reasoning_parsers import ThinkParser
from octavo_server.tokenizer import Tokenizer, load_tokenizer
from octavo_server.tool_parsers.harmony import HarmonyParser
from octavo_server.tool_parsers.hermes import HermesParser
from octavo_server.tool_parsers.mistral import MistralParser
from support.answers import calls_of
from support.scripted_engine import write_byte_model

PING = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'


def run(parser: AnswerParser, text: str) -> CollectedAnswer:
    events: list[AnswerEvent] = [event for letter in text for event in parser.push(letter)]
    return collect([*events, *parser.finish()])


def test_text_passes_where_there_is_nothing_to_find() -> None:
    assert run(AnswerParser(), f"<think>x</think>{PING}").text == f"<think>x</think>{PING}"


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    answer = run(AnswerParser(ThinkParser(), HermesParser()), f"<think>{PING}</think>Hi.{PING}")
    assert answer.reasoning == PING
    assert answer.text == "Hi."
    assert calls_of(answer) == [("ping", {})]


def test_calls_after_the_first_and_reasoning_can_be_dropped() -> None:
    parser = AnswerParser(ThinkParser(), HermesParser(), single_call=True, shows_reasoning=False)
    answer = run(parser, f"<think>x</think>{PING}{PING}")
    assert answer.reasoning is None
    assert calls_of(answer) == [("ping", {})]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_byte_model(tmp_path_factory.mktemp("bytes") / "model"))


@pytest.mark.parametrize(
    ("parser", "text", "reasoning"),
    [
        (AnswerParser(ThinkParser()), "<think>é!</think>Yes.", "é!"),
        (AnswerParser(ThinkParser(is_open=True)), "é!", "é!"),
        (AnswerParser(ThinkParser()), "Yes.", ""),
        (AnswerParser(), "<think>é!</think>", ""),
        (
            AnswerParser(None, HarmonyParser()),
            "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            "abc",
        ),
    ],
)
def test_reasoning_tokens_are_counted(
    tokenizer: Tokenizer, parser: AnswerParser, text: str, reasoning: str
) -> None:
    run(parser, text)
    token_ids = tokenizer.encode_plain(text)
    count = parser.num_reasoning_tokens(tokenizer, token_ids, skip_special_tokens=True)
    assert count == len(reasoning.encode())


def test_a_format_is_found_or_named() -> None:
    found = AnswerFormat.of("{% if tools %}[TOOL_CALLS]{% endif %} [/THINK]")
    assert found.tool_parser is MistralParser
    assert found.reasoning == "mistral"
    assert found.takes_tools
    assert found.describe() == "mistral and mistral"
    config = resolve_config({"tool_call_parser": "hermes", "reasoning_parser": "none"}).server
    named = AnswerFormat.of("[TOOL_CALLS] [/THINK]", config)
    assert (named.tool_parser, named.reasoning, named.takes_tools) == (HermesParser, None, False)
    assert AnswerFormat.of(None).tool_parser is HermesParser
    with pytest.raises(ConfigError):
        AnswerFormat.of("", resolve_config({"reasoning_parser": "x"}).server)


def test_where_a_prompt_leaves_the_model() -> None:
    found = AnswerFormat.of("</think>")
    assert found.is_open("<|im_start|>assistant\n<think>\n")
    assert not found.is_open("<think>\n\n</think>\n\n")
    assert not AnswerFormat.of("").is_open("<think>")
