"""From a chat body's messages to what a chat template expects."""

from __future__ import annotations

from typing import Any

from octavo_core.errors import InvalidRequestError
from octavo_server.api.body import decode_json
from octavo_server.api.chat_protocol import (
    ChatMessage,
    ContentPart,
    ToolCall,
)


def to_template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as plain dictionaries with text for content.

    Text parts are joined with a line break, as vLLM does for templates that want strings.
    Missing content is an empty string. The role ``developer`` is OpenAI's newer word for
    ``system``, which is the one that templates know.

    Raises:
        InvalidRequestError: A part is no text, or a tool call's arguments are nested too deep.
    """
    return [_to_dict(index, message) for index, message in enumerate(messages)]


def _to_dict(index: int, message: ChatMessage) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": _text(index, message.content)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and role == "assistant":
        # Templates know it by either name: Qwen's by the first, gpt-oss's by the second.
        result["reasoning_content"] = result["thinking"] = reasoning
    return result


def _text(index: int, content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        field = f"messages[{index}].content[{number}]"
        if part.type != "text":
            raise InvalidRequestError(
                f"{field} is of type {part.type!r}; this model takes only parts of type 'text'",
                field=field,
            )
        if part.text is None:
            raise InvalidRequestError(f"{field}.text is missing", field=f"{field}.text")
    return "\n".join(part.text for part in content if part.text is not None)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as an object, which is what templates write out."""
    function = {"name": call.function.name, "arguments": arguments_object(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def arguments_object(text: str) -> Any:
    """Return a call's arguments as an object, or as they are if they are none.

    Raises:
        InvalidRequestError: They are nested too deep.
    """
    try:
        value = decode_json(text.encode())
    except InvalidRequestError as error:
        if error.code == "too_deep":
            raise
        # A model may have written no JSON; the template gets what it wrote.
        return text
    return value if isinstance(value, dict) else text
