"""From a body of Anthropic's API to a conversation."""

from __future__ import annotations

import json
from typing import Any

from octavo_core.errors import InvalidRequestError
from octavo_core.sampling_params import SamplingParams
from octavo_server.api.anthropic_protocol import (
    AnthropicToolChoice,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    OtherBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from octavo_server.api.chat_protocol import (
    Function,
    NamedFunction,
    NamedTool,
    ToolChoice,
)
from octavo_server.api.context import LoadedModel
from octavo_server.api.conversation import Conversation
from octavo_server.api.sampling import engine_options, shared_params
from octavo_server.api.structured_outputs import OwnConstraint
from octavo_server.api.tool_use import ToolUse


def to_conversation(body: CountTokensRequest, model: LoadedModel) -> Conversation:
    """Return the conversation that a body describes.

    Raises:
        InvalidRequestError: It has blocks that can't be served, or fields contradict each other.
    """
    messages = _messages(body)
    # An answer goes on where the model's last turn ends, if that is given.
    last = messages[-1]
    prefill = None
    if last["role"] == "assistant" and "tool_calls" not in last:
        prefill = messages.pop()["content"]
    options: dict[str, Any] = {}
    params = SamplingParams(max_tokens=1)
    if isinstance(body, MessagesRequest):
        params = _params(body, model)
        options = engine_options(body, (body.metadata and body.metadata.user_id) or None)
    return Conversation(
        messages=messages,
        params=params,
        tool_use=_tool_use(body),
        template_options=body.chat_template_kwargs or {},
        reasoning_effort=_effort(body),
        shows_reasoning=body.thinking is None or body.thinking.display != "omitted",
        prefill=prefill,
        request_options=options,
    )


def _params(body: MessagesRequest, model: LoadedModel) -> SamplingParams:
    return SamplingParams(
        **shared_params(body, model.sampling_defaults, output_constraint(body)),
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
    )


def output_constraint(body: MessagesRequest) -> OwnConstraint:
    """Return what asks for a constraint in this API's own way."""
    schema = body.output_config and body.output_config.format
    return {"output_config.format": {"json": json.dumps(schema.json_schema)}} if schema else {}


def _effort(body: CountTokensRequest) -> str | None:
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    if body.output_config is not None and body.output_config.effort is not None:
        return body.output_config.effort
    return "medium" if body.thinking is not None else None


def _tool_use(body: CountTokensRequest) -> ToolUse:
    functions = [
        Function(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        for tool in body.tools or ()
    ]
    given = body.tool_choice
    if given is None:
        return ToolUse.of(functions, None, True)
    if given.type in ("any", "tool"):
        _check_choice(given, [function.name for function in functions])
    choice: ToolChoice = "auto"
    match given.type:
        case "none":
            choice = "none"
        case "any":
            choice = "required"
        case "tool":
            choice = NamedTool(function=NamedFunction(name=given.name or ""))
    return ToolUse.of(functions, choice, not given.disable_parallel_tool_use)


def _check_choice(choice: AnthropicToolChoice, known: list[str]) -> None:
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequestError(
            "tool_choice.name is missing; it must name a tool.", field="tool_choice.name"
        )
    wanted = choice.name if choice.type == "tool" else choice.type
    if not known or (choice.type == "tool" and wanted not in known):
        raise InvalidRequestError(
            f"tool_choice is {wanted!r}, but tools has "
            f"{', '.join(map(repr, known[:8])) or 'none'}.",
            field="tool_choice",
        )


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        text = body.system
        if not isinstance(text, str):
            text = "\n".join(block.text for block in text)
        messages.append({"role": "system", "content": text})
    for index, message in enumerate(body.messages):
        messages += _turns(f"messages[{index}]", message)
    return messages


def _turns(field: str, message: InputMessage) -> list[dict[str, Any]]:
    """Return the turns of a template that one of Anthropic's stands for: results are their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    turns: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                turns.append(_result(f"{field}.content[{number}]", block))
            case OtherBlock():
                raise _refused(f"{field}.content[{number}]", block)
    turn: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = turn["thinking"] = "\n".join(thoughts)
    if not turns or texts or calls:
        turns.append(turn)
    return turns


def _result(field: str, block: ToolResultBlock) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        texts = []
        for number, part in enumerate(content):
            if isinstance(part, OtherBlock):
                raise _refused(f"{field}.content[{number}]", part)
            texts.append(part.text)
        content = "\n".join(texts)
    if block.is_error and not content:
        content = "The tool failed."
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _refused(field: str, block: OtherBlock) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is of type {block.type!r}; this model takes only text, thinking, tool_use and "
        f"tool_result.",
        field=field,
    )
