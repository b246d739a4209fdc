from __future__ import annotations

from typing import Any

from octavo_server.tool_prompt import with_tool_prompt

TOOLS = [{"type": "function", "function": {"name": "ping"}}]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_the_tools_are_in_the_system_message() -> None:
    for messages in ([turn("user", "hi")], [turn("system", ""), turn("user", "hi")]):
        system, user = with_tool_prompt(messages, TOOLS)
        assert system["role"] == "system"
        assert '{"type": "function", "function": {"name": "ping"}}' in system["content"]
        assert '<tool_call>\n{"name": <function>' in system["content"]
        assert user == turn("user", "hi")


def test_calls_and_results_become_text() -> None:
    function = {"name": "ping", "arguments": {"é": 1}}
    calls = [{"id": "a", "type": "function", "function": function}] * 2
    messages = [
        turn("user", "hi"),
        turn("assistant", "Well.", tool_calls=calls),
        turn("tool", "1", tool_call_id="a"),
        turn("tool", "2", tool_call_id="a"),
        turn("user", "and?"),
    ]
    call = '<tool_call>\n{"name": "ping", "arguments": {"é": 1}}\n</tool_call>'
    result = "<tool_response>\n{}\n</tool_response>"
    assert with_tool_prompt(messages, []) == [
        turn("user", "hi"),
        turn("assistant", f"Well.\n{call}\n{call}"),
        turn("user", f"{result.format(1)}\n{result.format(2)}"),
        turn("user", "and?"),
    ]
