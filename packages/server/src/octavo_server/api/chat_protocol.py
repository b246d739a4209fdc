"""The body of a chat: its messages and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from octavo_core.sampling_params import MAX_LOGPROBS
from octavo_server.api.json_object import JsonObject
from octavo_server.api.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    UNSUPPORTED,
    GenerationRequest,
    InvalidField,
    Name,
    NumTokens,
    ReasoningEffort,
    StrictModel,
    TemplateOptions,
    Text,
    ToolName,
    one_of,
    text_or_list,
)


class ContentPart(StrictModel):
    """One part of a message. Only text can be served; ``type`` says what else it was."""

    type: Name
    text: Text | None = None


Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Tag("<list>")],
    one_of(text_or_list, "a string or a list of parts"),
]


class FunctionCall(StrictModel):
    """A call that the model made earlier: ``arguments`` is JSON in a string."""

    name: Name
    arguments: Text = ""


class ToolCall(StrictModel):
    """A tool call in an assistant's earlier turn."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(StrictModel):
    """What the model may call: ``parameters`` is a JSON schema."""

    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool. Only functions can be served."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(StrictModel):
    """A function by its name."""

    name: ToolName


class NamedTool(StrictModel):
    """The one tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(StrictModel):
    """Some of the tools."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(StrictModel):
    """``{"type": "allowed_tools"}``: some of the tools may, or one of them has to be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def form_of_choice(value: Any) -> str | None:
    """Return the tag of what a ``tool_choice`` is meant for."""
    if isinstance(value, str):
        return "<word>"
    if not isinstance(value, dict):
        return None
    return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    one_of(form_of_choice, "none, auto, required or an object that names a function"),
]


class ChatMessage(StrictModel):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None


def check_final_message(message: ChatMessage, add_generation_prompt: bool | None) -> None:
    """Refuse a last message that can't be gone on from.

    Raises:
        InvalidField: It is not the model's, or another turn is to be opened after it.
    """
    if message.role != "assistant":
        raise InvalidField(
            f"continue_final_message is true, but the last of the messages is of the role "
            f"{message.role!r}; it must be the assistant's",
            "continue_final_message",
        )
    if add_generation_prompt:
        raise InvalidField(
            "continue_final_message and add_generation_prompt can't both be true",
            "continue_final_message",
        )


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    unsupported = UNSUPPORTED | {
        "reasoning": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "chat_template": (),
        "documents": ([],),
        "add_special_tokens": (False,),
        "verbosity": ("medium",),
        "store": (False,),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatCompletionRequest:
        """Refuse alternatives where no log-probabilities were asked for, and empty answers."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs needs logprobs to be true", "top_logprobs")
        for name in ("max_completion_tokens", "max_tokens"):
            if getattr(self, name) == 0:
                raise InvalidField(f"{name} is 0; it must be at least 1", name)
        return self

    @model_validator(mode="after")
    def check_final_message(self) -> ChatCompletionRequest:
        """Refuse to go on from a message that the model did not begin."""
        if self.continue_final_message:
            check_final_message(self.messages[-1], self.add_generation_prompt)
        return self

    @model_validator(mode="after")
    def check_tool_choice(self) -> ChatCompletionRequest:
        """Refuse a choice among tools that are not there."""
        names = {tool.function.name for tool in self.tools or ()}
        match self.tool_choice:
            case None | "none" | "auto":
                chosen = []
            case "required":
                chosen = [] if names else [""]
            case NamedTool(function=function):
                chosen = [function.name]
            case AllowedToolsChoice(allowed_tools=allowed):
                chosen = [tool.function.name for tool in allowed.tools]
        for name in chosen:
            if name not in names:
                what = f"names {name!r}" if name else "is 'required'"
                raise InvalidField(
                    f"tool_choice {what}, but tools has "
                    f"{', '.join(map(repr, sorted(names)[:8])) or 'none'}",
                    "tool_choice",
                )
        return self
