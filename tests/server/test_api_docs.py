"""docs/api.md tells users what the schema says: no field without a row, no other limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octavo_core import sampling_params, structured_outputs
from octavo_core.config import LimitsConfig
from octavo_server.api import body, protocol
from octavo_server.api.anthropic_protocol import MessagesRequest
from octavo_server.api.chat_protocol import (
    ChatCompletionRequest,
)
from octavo_server.api.completions import DEFAULT_MAX_TOKENS
from octavo_server.api.pooling_protocol import (
    ClassificationRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from octavo_server.api.protocol import (
    CompletionRequest,
    GenerationRequest,
)
from octavo_server.api.responses_protocol import ResponsesRequest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
SECTIONS = dict(section.split("\n", 1) for section in PAGE.split("\n## ")[1:])
SHARED, COMPLETIONS, CHAT = (
    text for title, text in SECTIONS.items() if title.startswith("Fields of ")
)


def row(table: str, field: str) -> str:
    (found,) = re.findall(rf"^\| `{field}` \|(.*)$", table, re.MULTILINE)
    return str(found)


@pytest.mark.parametrize(
    ("table", "model"),
    [(SHARED, GenerationRequest), (COMPLETIONS, CompletionRequest), (CHAT, ChatCompletionRequest)],
)
def test_every_field_has_its_row(table: str, model: Any) -> None:
    shared = set() if model is GenerationRequest else set(GenerationRequest.model_fields)
    # A route may have a word of its own for a shared name.
    for field in set(model.model_fields) - shared:
        assert row(table, field)


@pytest.mark.parametrize(
    ("title", "model"), [("`/v1/responses`", ResponsesRequest), ("`/v1/messages`", MessagesRequest)]
)
def test_every_field_of_the_other_apis_is_told(title: str, model: Any) -> None:
    told = set(re.findall(r"`(\w+)", SECTIONS[title]))
    assert set(model.model_fields) - told - {"model", "stream_options"} == set()


@pytest.mark.parametrize(
    "model", [PoolingRequest, ClassificationRequest, ScoreRequest, RerankRequest]
)
def test_every_field_of_pooling_is_told(model: Any) -> None:
    told = set(re.findall(r"`(\w+)", SECTIONS["Embeddings and scores"]))
    assert set(model.model_fields) - told == set()


@pytest.mark.parametrize(
    ("table", "field", "limits"),
    [
        (SHARED, "n", [sampling_params.MAX_N]),
        (SHARED, "temperature", [2, sampling_params.GREEDY_TEMPERATURE]),
        (
            SHARED,
            "stop",
            [sampling_params.MAX_STOP_STRINGS, sampling_params.MAX_STOP_STRING_CHARS],
        ),
        (SHARED, "stop_token_ids", [sampling_params.MAX_STOP_TOKEN_IDS]),
        (SHARED, "presence_penalty", [-2, 2]),
        (SHARED, "repetition_penalty", [sampling_params.MAX_REPETITION_PENALTY]),
        (
            SHARED,
            "logit_bias",
            [
                sampling_params.MAX_LOGIT_BIAS_IDS,
                -sampling_params.MAX_LOGIT_BIAS,
                sampling_params.MAX_LOGIT_BIAS,
            ],
        ),
        (SHARED, "allowed_token_ids", [sampling_params.MAX_ALLOWED_TOKEN_IDS]),
        (
            SHARED,
            "bad_words",
            [sampling_params.MAX_BAD_WORDS, sampling_params.MAX_BAD_WORD_CHARS],
        ),
        (SHARED, "logprob_token_ids", [sampling_params.MAX_LOGPROB_TOKEN_IDS]),
        (SHARED, "prompt_logprobs", [sampling_params.MAX_LOGPROBS]),
        (SHARED, "max_tokens", [DEFAULT_MAX_TOKENS]),
        (SHARED, "cache_salt", [protocol.MAX_NAME_CHARS]),
        (SHARED, "user", [protocol.MAX_NAME_CHARS]),
        (SHARED, "structured_outputs", [structured_outputs.MAX_CHOICES]),
        (COMPLETIONS, "prompt", [protocol.MAX_PROMPTS]),
        (COMPLETIONS, "logprobs", [sampling_params.MAX_LOGPROBS]),
        (CHAT, "messages", [protocol.MAX_MESSAGES]),
        (CHAT, "top_logprobs", [sampling_params.MAX_LOGPROBS]),
        (CHAT, "chat_template_kwargs", [protocol.MAX_TEMPLATE_OPTIONS]),
    ],
)
def test_limits_are_those_of_the_schema(table: str, field: str, limits: list[float]) -> None:
    told = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", row(table, field))]
    assert set(limits) <= set(told)


def test_limits_of_the_whole_body_and_of_messages() -> None:
    assert (
        f"at most {LimitsConfig().max_request_body_size >> 20} MiB and {body.MAX_DEPTH} levels"
        in PAGE
    )
    assert f"{protocol.MAX_PARTS} parts" in PAGE
    assert f"up to {protocol.MAX_TOOL_CALLS}\n`tool_calls`" in PAGE
