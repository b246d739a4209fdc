from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.errors import ConfigError
from octavo_server.reasoning_parsers import (
    REASONING_PARSERS,
    ThinkParser,
    detect_reasoning_parser,
    reasoning_parser,
)
from octavo_server.reasoning_parsers.registry import HARMONY
from support.answers import cut, parse, summary

# The prompt has opened the block, what the model writes, and the reasoning and text in it.
CASES = [
    (False, "Hello", None, "Hello"),
    (False, "\n Hello ", None, "\n Hello "),
    (False, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    (False, "\n<think>\n Hm.\n\nHm. \n</think>\n\nYes. \n", "Hm.\n\nHm.", "Yes. \n"),
    (False, "<think>a < b <think></think>c</think>", "a < b <think>", "c</think>"),
    (False, "<think></think>Yes.", None, "Yes."),
    (False, "<think>Hm", "Hm", None),
    (False, "<thin", None, "<thin"),
    (False, "Yes <think>no</think>", None, "Yes <think>no</think>"),
    (True, "Hm.</think>Yes.", "Hm.", "Yes."),
    (True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    (True, "Hm.</thi", "Hm.</thi", None),
    (True, "\n</think>\n", None, None),
]


@pytest.mark.parametrize(("is_open", "text", "reasoning", "content"), CASES)
def test_what_is_reasoning(
    is_open: bool, text: str, reasoning: str | None, content: str | None
) -> None:
    for pieces in ([text], list(text)):
        answer = parse(ThinkParser(is_open=is_open), pieces)
        assert (answer.reasoning, answer.text) == (reasoning, content)


PIECES = st.sampled_from(["<think>", "</think>", "<th", "ink>", "\n", " ", "x", "</"])


@given(
    is_open=st.booleans(),
    pieces=st.lists(PIECES, max_size=20),
    cuts=st.lists(st.integers(min_value=0), max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_any_text_however_cut_says_the_same(
    is_open: bool, pieces: list[str], cuts: list[int]
) -> None:
    text = "".join(pieces)
    whole, parts = ThinkParser(is_open=is_open), ThinkParser(is_open=is_open)
    assert summary(parse(parts, cut(text, cuts))) == summary(parse(whole, [text]))
    assert parts.reasoning_spans == whole.reasoning_spans


def test_where_the_reasoning_is() -> None:
    parser = ThinkParser()
    parse(parser, list("<think> Hm. </think>Yes."))
    assert parser.reasoning_spans == [(7, 12)]
    parser = ThinkParser(is_open=True)
    parse(parser, list("Hm."))
    assert parser.reasoning_spans == [(0, None)]


@pytest.mark.parametrize("name", list(REASONING_PARSERS))
def test_each_spelling_is_found_in_a_template_and_read(name: str) -> None:
    kind = REASONING_PARSERS[name]
    assert detect_reasoning_parser(f"{{% if '{kind.closing}' in content %}}") == name
    assert reasoning_parser(name) == name
    answer = parse(kind(), [f"{kind.opening}a{kind.closing}b"])
    assert (answer.reasoning, answer.text) == ("a", "b")


def test_other_names() -> None:
    assert reasoning_parser("qwen3") == reasoning_parser("deepseek_r1") == "think"
    assert reasoning_parser("openai_gptoss") == HARMONY
    assert reasoning_parser("none") is None
    assert detect_reasoning_parser("<|channel|>") == HARMONY
    assert detect_reasoning_parser("{{ messages }}") is None
    with pytest.raises(ConfigError, match=r"--reasoning-parser must be one of auto, none, think"):
        reasoning_parser("thinker")
