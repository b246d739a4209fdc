"""How conversations reach templates of one kind or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo_core.errors import InvalidRequestError
from octavo_core.model_spec import read_model_spec
from octavo_core.sampling_params import SamplingParams
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server.answer_parser import AnswerFormat
from octavo_server.api.chat_protocol import (
    Function,
)
from octavo_server.api.context import LoadedModel
from octavo_server.api.conversation import Conversation, PreparedConversation, prepare
from octavo_server.api.tool_use import ToolUse
from octavo_server.input_processor import InputProcessor
from octavo_server.tokenizer import load_tokenizer
from support.scripted_engine import write_byte_model

FUNCTIONS = [Function(name="f", parameters={"type": "object"}), Function(name="g")]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"é": 1}}}
LOOP = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "8", "tool_call_id": "call_1"},
]


def load(folder: Path, template: str) -> LoadedModel:
    path = write_byte_model(folder, chat_template=template)
    tokenizer = load_tokenizer(path)
    processor = InputProcessor(tokenizer, read_model_spec(path), 512)
    return LoadedModel("bytes", 512, tokenizer, processor, answer_format=AnswerFormat.of(template))


def ask(model: LoadedModel, messages: list[dict[str, Any]], **fields: Any) -> PreparedConversation:
    return prepare(model, "r", Conversation(messages, SamplingParams(), **fields))


def prompt_of(model: LoadedModel, messages: list[dict[str, Any]], **fields: Any) -> str:
    prepared = ask(model, messages, **fields)
    return model.tokenizer.decode(prepared.requests[0].prompt_token_ids)


def test_h01_arguments_are_objects_for_templates_that_write_json(tmp_path: Path) -> None:
    template = "{# tools #}{{ messages[1].tool_calls[0].function | tojson }}"
    shown = '{"name": "f", "arguments": {"é": 1}}'
    assert prompt_of(load(tmp_path, template), LOOP) == shown


def test_h01_arguments_are_text_for_templates_that_want_it(tmp_path: Path) -> None:
    template = (
        "{# tools #}{% for call in messages[1].tool_calls %}"
        "{{ '```' + call['function']['arguments'] + '```' }}{% endfor %}"
    )
    assert prompt_of(load(tmp_path, template), LOOP) == '```{"é": 1}```'


def test_h05_what_a_template_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    model = load(tmp_path, "{# tools #}{{ raise_exception('No tools here') }}")
    with pytest.raises(InvalidRequestError, match="No tools here"):
        ask(model, LOOP)


def test_ids_of_calls_are_what_mistral_takes(tmp_path: Path) -> None:
    template = (
        "{# tools [TOOL_CALLS] #}{{ messages[1].tool_calls[0].id }} {{ messages[2].tool_call_id }}"
    )
    model = load(tmp_path, template)
    first, second = prompt_of(model, LOOP).split()
    assert first == second
    assert len(first) == 9
    assert first.isalnum()
    kept = [{**LOOP[1], "tool_calls": [{**CALL, "id": "abcdefgh1"}]}]
    assert prompt_of(model, [LOOP[0], *kept, LOOP[2]]).split()[0] == "abcdefgh1"


def test_a_turn_of_calls_has_one_text_for_gpt_oss(tmp_path: Path) -> None:
    template = (
        "{# tools #}{% for message in messages %}{% if message.thinking and message.content %}"
        "{{ raise_exception('two texts') }}{% endif %}{{ message.content }}{{ message.thinking }};"
        "{% endfor %}"
    )
    model = load(tmp_path, template)
    thought = {**LOOP[1], "thinking": "T"}
    assert prompt_of(model, [LOOP[0], thought, LOOP[2]]) == "a;T;8;"
    both = {**thought, "content": "C"}
    assert prompt_of(model, [LOOP[0], both, LOOP[2]]) == "a;C;8;"


def test_a_prompt_that_opens_the_reasoning(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}</think>{% if enable_thinking %}<think>\n{% endif %}"
    model = load(tmp_path, template)
    assert ask(model, LOOP[:1], reasoning_effort="low").is_reasoning
    assert not ask(model, LOOP[:1], reasoning_effort="none").is_reasoning


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ reasoning_effort }}", "high"),
        ("{# <|channel|> #}{{ reasoning_effort }}", "high"),
        ("{{ enable_thinking }}{{ thinking }}", "TrueTrue"),
    ],
)
def test_the_effort_is_put_in_the_templates_words(
    tmp_path: Path, template: str, shown: str
) -> None:
    effort = "max" if "channel" in template else "high"
    assert prompt_of(load(tmp_path, template), LOOP[:1], reasoning_effort=effort) == shown


def test_a_control_token_format_needs_control_tokens_in_the_text(tmp_path: Path) -> None:
    model = load(tmp_path, "{# tools [TOOL_CALLS] #}{{ messages[0].content }}")
    use = ToolUse.of(FUNCTIONS, None, True)
    assert not ask(model, LOOP[:1], tool_use=use).skip_special_tokens
    assert ask(model, LOOP[:1]).skip_special_tokens


def test_a_forced_call_is_a_constraint(tmp_path: Path) -> None:
    model = load(tmp_path, "{# tools #}{{ messages[0].content }}")
    named = ToolUse(FUNCTIONS[:1], "named", False)
    params = ask(model, LOOP[:1], tool_use=named).requests[0].sampling_params
    assert params.structured_outputs is not None
    assert params.structured_outputs.json is not None
    required = ToolUse(FUNCTIONS, "required", True)
    prepared = ask(model, LOOP[:1], tool_use=required)
    params = prepared.requests[0].sampling_params
    assert params.structured_outputs is not None
    assert '{"const": "f"}' in (params.structured_outputs.json or "")
    assert prepared.constraint_field("text.format") == "tools"
    free = ask(model, LOOP[:1], tool_use=ToolUse.of(FUNCTIONS, None, True))
    assert free.requests[0].sampling_params.structured_outputs is None


@pytest.mark.parametrize("forced", [True, False])
def test_a_constraint_waits_for_the_end_of_the_reasoning(tmp_path: Path, forced: bool) -> None:
    model = load(tmp_path, "{# tools </think> #}{{ messages[0].content }}")
    use = ToolUse(FUNCTIONS, "required" if forced else "none", True)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    for content, after in (("a<think>\n", "</think>"), ("a", None)):
        conversation = Conversation([{"role": "user", "content": content}], params, use)
        prepared = prepare(model, "r", conversation)
        constraint = prepared.requests[0].sampling_params.structured_outputs
        assert constraint is not None
        assert constraint.after == after
        assert constraint.kind == ("json" if forced else "json_object")
