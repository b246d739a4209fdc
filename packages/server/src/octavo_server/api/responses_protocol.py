"""The body of OpenAI's Responses API. Every field has its bounds here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from octavo_core.sampling_params import MAX_LOGPROBS
from octavo_server.api.chat_protocol import (
    NamedFunction,
    form_of_choice,
)
from octavo_server.api.json_object import JsonObject
from octavo_server.api.protocol import (
    GENERATION_ONLY,
    MAX_INT32,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    UNSUPPORTED,
    Name,
    ReasoningEffort,
    SamplingBody,
    Stop,
    StrictModel,
    TemplateOptions,
    Text,
    ToolName,
    one_of,
)

MAX_METADATA = 16
MAX_METADATA_VALUE_CHARS = 512

ItemStatus = Literal["in_progress", "completed", "incomplete"]


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


class InputPart(StrictModel):
    """A part of a message. Only text can be served; ``type`` says what else it was."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None


PartsOrText = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[InputPart], Field(max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="form",
        custom_error_message="input should be a string or a list of parts",
    ),
]


class MessageItem(StrictModel):
    """A message."""

    type: Literal["message"] = "message"
    id: Name | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: PartsOrText


class FunctionCallItem(StrictModel):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    id: Name | None = None
    call_id: Name
    name: ToolName
    arguments: Text


class FunctionCallOutputItem(StrictModel):
    """What a tool answered."""

    type: Literal["function_call_output"]
    id: Name | None = None
    call_id: Name
    output: PartsOrText


class ReasoningItem(StrictModel):
    """What the model thought earlier."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: Annotated[list[InputPart], Field(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[InputPart], Field(max_length=MAX_PARTS)] | None = None


_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class OtherItem(StrictModel):
    """An item of a kind that can't be served."""

    type: Name


def _form_of_item(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "message")
    return f"<{kind}>" if kind in _ITEM_TYPES else "<other>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[OtherItem, Tag("<other>")],
    Discriminator(
        _form_of_item,
        custom_error_type="form",
        custom_error_message="input should be an object with a type",
    ),
]
Input = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES), Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="form",
        custom_error_message="input should be a string or a list of items",
    ),
]


class ResponseTool(StrictModel):
    """A function. Tools that OpenAI's servers run can't be served."""

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedResponseTool(NamedFunction):
    """The one function that has to be called."""

    type: Literal["function"]


class AllowedResponseTools(StrictModel):
    """Some of the functions may, or one of them has to be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedResponseTool], Field(min_length=1, max_length=MAX_TOOLS)]


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedResponseTool, Tag("<named>")]
    | Annotated[AllowedResponseTools, Tag("<allowed>")],
    one_of(form_of_choice, "none, auto, required or an object that names a function"),
]


class TextFormat(StrictModel):
    """What the text has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    json_schema: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(StrictModel):
    """What the text has to look like. How long it should be is up to the model."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(StrictModel):
    """How much to think. Reasoning is shown as it is, without a summary."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictModel):
    """What a stream carries besides the answer."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingBody):
    """Body of ``POST /v1/responses``."""

    unsupported = (
        UNSUPPORTED
        | GENERATION_ONLY
        | {
            "best_of": (1,),
            "n": (1,),
            "max_tokens": (),
            "max_completion_tokens": (),
        }
    )

    model: Name | None = None
    input: Input
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Name], Field(max_length=MAX_PARTS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS)],
            ],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    service_tier: Name | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    # What can't be served. Only null passes.
    conversation: None = None
    prompt: None = None
    # Beyond OpenAI's.
    stop: Stop | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the text comes with log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
