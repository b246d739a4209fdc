"""Puts streams with named events together, and checks their order on the way."""

from __future__ import annotations

import json
from typing import Any


def named_events(text: str) -> list[dict[str, Any]]:
    """Read the events of a stream, each of which has its type as its name."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream's response together, and check the order of its events."""
    created, in_progress, *middle, last = events
    assert created["type"] == "response.created"
    assert in_progress["type"] == "response.in_progress"
    assert created["response"]["status"] == in_progress["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    output: list[dict[str, Any]] = []
    text = ""
    for event in middle:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(output) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert not output or output[-1]["status"] != "in_progress"
            output.append(event["item"])
            text = ""
        elif kind == "output_item.done":
            assert event["item"]["id"] == output[-1]["id"]
            output[-1] = event["item"]
            shown = event["item"].get("arguments") or event["item"]["content"][0]["text"]
            assert shown == text
        else:
            assert event["item_id"] == output[-1]["id"]
            if kind.endswith(".delta"):
                text += event["delta"]
            elif kind.endswith("_text.done"):
                assert event["text"] == text
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == text
            elif kind == "content_part.done":
                assert event["part"]["text"] == text
            else:
                assert kind == "content_part.added"
                assert event["part"]["text"] == ""
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["output"] == output
    return response


def joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream's message together, and check the order of its events."""
    start, ping, *middle, last, stop = events
    assert [event["type"] for event in (start, ping, last, stop)] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    pieces: list[str] = []
    is_open = False
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        block = message["content"][-1] if message["content"] else {}
        if kind == "start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            pieces, is_open = [], True
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        if kind == "stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = _arguments("".join(pieces), last["delta"]["stop_reason"])
            continue
        assert kind == "delta"
        delta = {key: value for key, value in event["delta"].items() if key != "type"}
        ((key, text),) = delta.items()
        if key == "partial_json":
            pieces.append(text)
        else:
            block[key] += text
    assert not is_open
    rest = {name: value for name, value in last.items() if name not in ("type", "delta")}
    return {**message, **last["delta"], **rest}


def _arguments(text: str, stop_reason: str) -> Any:
    """Read a call's arguments; those that were cut off are none."""
    try:
        return json.loads(text)
    except ValueError:
        assert stop_reason in ("max_tokens", "stop_sequence"), text
        return {}
