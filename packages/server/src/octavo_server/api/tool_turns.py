"""Turns of a tool loop, as the one or other chat template wants them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from octavo_server.tool_parsers.mistral import ID_CHARS

Message = dict[str, Any]


def has_tool_turns(messages: Sequence[Message]) -> bool:
    """True if there are calls or their results."""
    return any(turn["role"] in ("tool", "function") or "tool_calls" in turn for turn in messages)


def with_text_arguments(messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages with the arguments of calls as JSON text, which some templates want.

    Returns:
        None if there are no calls.
    """
    if not any("tool_calls" in message for message in messages):
        return None

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return _with_calls(messages, as_text)


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with ids of calls as Mistral's templates take them, and no others."""
    short = _with_calls(
        messages, lambda call: {**call, "id": _short_id(call["id"])} if call.get("id") else call
    )
    return [
        {**message, "tool_call_id": _short_id(message["tool_call_id"])}
        if "tool_call_id" in message
        else message
        for message in short
    ]


def with_one_thought(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with no more than one text in a turn of calls.

    gpt-oss has one place for what it thought and said before a call, and refuses two texts.
    """
    return [
        {key: value for key, value in message.items() if key != "thinking"}
        if message.get("tool_calls") and message.get("content")
        else message
        for message in messages
    ]


def _short_id(call_id: str) -> str:
    if len(call_id) == ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:ID_CHARS]


def _with_calls(
    messages: Sequence[Message], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[Message]:
    return [
        {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
