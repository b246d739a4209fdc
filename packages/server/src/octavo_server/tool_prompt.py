"""Tools for models whose chat template says nothing of them.

The conversation is rewritten into turns that every template takes: a system message lists the
tools and asks for calls in the format of Hermes, in which earlier calls are then written, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INSTRUCTIONS = """\
You can call functions. Their signatures, as JSON:
<tools>
{tools}
</tools>
To call one, answer with a JSON object in tags, and with one such pair of tags for each call:
<tool_call>
{{"name": <function>, "arguments": <object>}}
</tool_call>"""


def with_tool_prompt(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the conversation with `tools` described, and calls and results as plain turns.

    Args:
        messages: As for a chat template; content is text.
        tools: In the shape of OpenAI's API.
    """
    turns = [_plain_turn(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=listed)
        if turns and turns[0]["role"] == "system":
            content = "\n\n".join(filter(None, [turns[0]["content"], instructions]))
            turns[0] = {**turns[0], "content": content}
        else:
            turns.insert(0, {"role": "system", "content": instructions})
    return _joined(turns)


def _plain_turn(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [content, *(_call(call["function"]) for call in calls)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, texts))}


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _joined(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring results of tools: many templates want users and models to take turns."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        before = joined[-1] if joined else None
        if before is not None and _is_response(before) and _is_response(turn):
            joined[-1] = {**before, "content": f"{before['content']}\n{turn['content']}"}
        else:
            joined.append(turn)
    return joined


def _is_response(turn: dict[str, Any]) -> bool:
    return turn["role"] == "user" and str(turn["content"]).startswith("<tool_response>")
