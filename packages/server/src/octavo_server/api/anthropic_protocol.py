"""The bodies of Anthropic's Messages API. Every field has its bounds here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from octavo_core.sampling_params import MAX_STOP_STRINGS
from octavo_server.api.json_object import JsonObject
from octavo_server.api.protocol import (
    GENERATION_ONLY,
    MAX_INT32,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    UNSUPPORTED,
    Body,
    Name,
    SamplingBody,
    StopString,
    StrictModel,
    TemplateOptions,
    Text,
    ToolName,
)


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(StrictModel):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(StrictModel):
    """Earlier thoughts that nobody here can read; they are left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(StrictModel):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: Name
    name: ToolName
    input: JsonObject


class OtherBlock(StrictModel):
    """A block of a kind that can't be served, such as an image."""

    type: Name


def _form_of_block(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    return f"<{kind}>" if kind in _BLOCK_TYPES else "<other>"


_BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


_is_text_or_blocks = Discriminator(
    _text_or_list,
    custom_error_type="form",
    custom_error_message="input should be a string or a list of blocks",
)
_by_type = Discriminator(
    _form_of_block,
    custom_error_type="form",
    custom_error_message="input should be an object with a type",
)

ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[OtherBlock, Tag("<other>")]
    | Annotated[OtherBlock, Tag("<thinking>")]
    | Annotated[OtherBlock, Tag("<redacted_thinking>")]
    | Annotated[OtherBlock, Tag("<tool_use>")]
    | Annotated[OtherBlock, Tag("<tool_result>")],
    _by_type,
]
ResultContent = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[ResultBlock], Field(max_length=MAX_PARTS), Tag("<list>")],
    _is_text_or_blocks,
]


class ToolResultBlock(StrictModel):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: ResultContent | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[OtherBlock, Tag("<other>")],
    _by_type,
]
MessageContent = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Block], Field(max_length=MAX_PARTS), Tag("<list>")],
    _is_text_or_blocks,
]
SystemPrompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[TextBlock], Field(max_length=MAX_PARTS), Tag("<list>")],
    _is_text_or_blocks,
]


class InputMessage(StrictModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: MessageContent


class AnthropicTool(StrictModel):
    """A tool of the client's own. Those that Anthropic's servers run can't be served."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None


class AnthropicToolChoice(StrictModel):
    """Whether a tool may, must or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """Whether the model should think before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None


class OutputFormat(StrictModel):
    """What the text has to look like."""

    type: Literal["json_schema"]
    json_schema: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(StrictModel):
    """How much to think, and what the text has to look like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(StrictModel):
    """Whom the request is for."""

    user_id: Name | None = None


class CountTokensRequest(Body):
    """Body of ``POST /v1/messages/count_tokens``: what a prompt is made of."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"chat_template": ()}

    model: Name | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: SystemPrompt | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateOptions | None = None


class MessagesRequest(CountTokensRequest, SamplingBody):
    """Body of ``POST /v1/messages``."""

    unsupported = UNSUPPORTED | GENERATION_ONLY | {"n": (1,), "best_of": (1,), "stop": ([],)}

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    metadata: Metadata | None = None
