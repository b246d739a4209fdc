"""From a body of the Responses API to a conversation."""

from __future__ import annotations

import json
import uuid
from typing import Any

from octavo_core.errors import InvalidRequestError
from octavo_core.sampling_params import SamplingParams
from octavo_server.api.chat_protocol import (
    AllowedTools,
    AllowedToolsChoice,
    Function,
    NamedFunction,
    NamedTool,
    ToolChoice,
)
from octavo_server.api.context import LoadedModel
from octavo_server.api.conversation import Conversation
from octavo_server.api.messages import arguments_object
from octavo_server.api.responses_protocol import (
    AllowedResponseTools,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputPart,
    MessageItem,
    NamedResponseTool,
    OtherItem,
    ReasoningItem,
    ResponsesRequest,
)
from octavo_server.api.responses_store import Item
from octavo_server.api.sampling import engine_options, shared_params, stop_strings
from octavo_server.api.structured_outputs import OwnConstraint
from octavo_server.api.tool_use import ToolUse

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def new_item_id(prefix: str) -> str:
    """Return a new id such as ``msg_1f0c…``."""
    return f"{prefix}_{uuid.uuid4().hex}"


def to_items(body: ResponsesRequest) -> list[Item]:
    """Return the request's input as items that have ids, and content in parts.

    Raises:
        InvalidRequestError: An item can't be served.
    """
    if isinstance(body.input, str):
        return [_message("user", [{"type": "input_text", "text": body.input}], None)]
    return [_item(f"input[{index}]", item) for index, item in enumerate(body.input)]


def to_conversation(body: ResponsesRequest, items: list[Item], model: LoadedModel) -> Conversation:
    """Return the conversation that `items` are.

    Args:
        items: Those of earlier responses, and the request's own.

    Raises:
        InvalidRequestError: Fields contradict each other.
    """
    messages = to_messages(items)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise InvalidRequestError("input is empty; it needs an item at least.", field="input")
    return Conversation(
        messages=messages,
        params=_params(body, model),
        tool_use=_tool_use(body),
        template_options=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        request_options=engine_options(body, body.safety_identifier or body.user or None),
    )


def to_messages(items: list[Item]) -> list[dict[str, Any]]:
    """Return the turns that items stand for; what the model did at a stretch is one turn."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append({"role": role, "content": _text(item["content"])})
            case "message":
                turn = _model_turn(messages)
                turn["content"] = "\n".join(filter(None, [turn["content"], _text(item["content"])]))
            case "function_call":
                function = {
                    "name": item["name"],
                    "arguments": arguments_object(item["arguments"]),
                }
                call = {"id": item["call_id"], "type": "function", "function": function}
                _model_turn(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item["call_id"],
                        "content": _text(item["output"]),
                    }
                )
            case "reasoning":
                thought = _text(item["content"]) or _text(item["summary"])
                if thought:
                    turn = _model_turn(messages)
                    turn["reasoning_content"] = turn["thinking"] = thought
    return messages


def _model_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if "text" in part else part["refusal"] for part in content)


def _item(field: str, item: Any) -> Item:
    match item:
        case MessageItem():
            kind = "output_text" if item.role == "assistant" else "input_text"
            return _message(item.role, _parts(f"{field}.content", item.content, kind), item.id)
        case FunctionCallItem():
            return {
                "id": item.id or new_item_id("fc"),
                "type": "function_call",
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.arguments,
                "status": "completed",
            }
        case FunctionCallOutputItem():
            output = item.output
            return {
                "id": item.id or new_item_id("fco"),
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": (
                    output
                    if isinstance(output, str)
                    else _parts(f"{field}.output", output, "input_text")
                ),
                "status": "completed",
            }
        case ReasoningItem():
            return {
                "id": item.id or new_item_id("rs"),
                "type": "reasoning",
                "summary": _parts(f"{field}.summary", item.summary or [], "summary_text"),
                "content": _parts(f"{field}.content", item.content or [], "reasoning_text"),
                "status": "completed",
            }
        case OtherItem():
            raise InvalidRequestError(
                f"{field} is of type {item.type!r}; this server takes message, function_call, "
                f"function_call_output and reasoning.",
                field=field,
            )
    raise AssertionError(item)


def _message(role: str, parts: list[dict[str, Any]], item_id: str | None) -> Item:
    return {
        "id": item_id or new_item_id("msg"),
        "type": "message",
        "role": role,
        "content": parts,
        "status": "completed",
    }


def _parts(field: str, content: str | list[InputPart], kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    parts = []
    for index, part in enumerate(content):
        if part.type == "refusal" and part.refusal is not None:
            parts.append({"type": "refusal", "refusal": part.refusal})
            continue
        if part.type not in _TEXT_PARTS:
            raise InvalidRequestError(
                f"{field}[{index}] is of type {part.type!r}; this model takes only text.",
                field=f"{field}[{index}]",
            )
        if part.text is None:
            raise InvalidRequestError(
                f"{field}[{index}].text is missing.", field=f"{field}[{index}].text"
            )
        parts.append({"type": part.type, "text": part.text})
    return parts


def _params(body: ResponsesRequest, model: LoadedModel) -> SamplingParams:
    return SamplingParams(
        **shared_params(body, model.sampling_defaults, text_constraint(body)),
        max_tokens=body.max_output_tokens,
        stop=stop_strings(body.stop),
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )


def text_constraint(body: ResponsesRequest) -> OwnConstraint:
    """Return what asks for a constraint in this API's own way.

    Raises:
        InvalidRequestError: A schema is missing.
    """
    text_format = body.text and body.text.format
    if not text_format or text_format.type == "text":
        return {}
    if text_format.type == "json_object":
        return {"text.format": {"json_object": True}}
    if text_format.json_schema is None:
        raise InvalidRequestError("text.format.schema is missing.", field="text.format.schema")
    return {"text.format": {"json": json.dumps(text_format.json_schema)}}


def _tool_use(body: ResponsesRequest) -> ToolUse:
    functions = [
        Function(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        for tool in body.tools or ()
    ]
    known = [function.name for function in functions]
    choice: ToolChoice | None
    match body.tool_choice:
        case NamedResponseTool(name=name):
            wanted = [name]
            choice = NamedTool(function=NamedFunction(name=name))
        case AllowedResponseTools(mode=mode, tools=tools):
            wanted = [tool.name for tool in tools]
            named = [NamedTool(function=NamedFunction(name=name)) for name in wanted]
            choice = AllowedToolsChoice(
                type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=named)
            )
        case given:
            wanted = []
            choice = given
    missing = [name for name in wanted if name not in known]
    if missing or (choice == "required" and not known):
        what = f"names {missing[0]!r}" if missing else "is 'required'"
        raise InvalidRequestError(
            f"tool_choice {what}, but tools has {', '.join(map(repr, known[:8])) or 'none'}.",
            field="tool_choice",
        )
    return ToolUse.of(functions, choice, body.parallel_tool_calls is not False)
