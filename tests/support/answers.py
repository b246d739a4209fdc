"""Feeds a parser of model output, and puts together what it says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from octavo_server.answer_events import AnswerEvent, CallStart, CollectedAnswer, collect
from octavo_server.tool_parsers import Scanner


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """Cut `text` at each of `cuts`, wherever they are."""
    edges = [0, *sorted(number % (len(text) + 1) for number in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def feed(parser: Scanner, pieces: Sequence[str]) -> list[AnswerEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def parse(parser: Scanner, pieces: Sequence[str]) -> CollectedAnswer:
    events = feed(parser, pieces)
    started = [event.index for event in events if isinstance(event, CallStart)]
    assert started == list(range(len(started)))
    return collect(events)


def summary(answer: CollectedAnswer) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    """All but the ids, with arguments as text."""
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def calls_of(answer: CollectedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def joined_chunks(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the chunks of a chat stream together, as an SDK does."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in (choice for event in events for choice in event["choices"]):
        message: dict[str, Any] = {"role": None, "content": None}
        choice = choices.setdefault(chunk["index"], {"message": message, "finish_reason": None})
        message, delta = choice["message"], chunk["delta"]
        message["role"] = delta.get("role") or message["role"]
        for key in ("content", "reasoning", "reasoning_content"):
            if delta.get(key):
                message[key] = (message.get(key) or "") + delta[key]
        for fragment in delta.get("tool_calls", ()):
            _add_fragment(message.setdefault("tool_calls", []), fragment)
        choice["finish_reason"] = chunk["finish_reason"] or choice["finish_reason"]
    for choice in choices.values():
        if choice["message"].keys() == {"role", "content"}:
            choice["message"]["content"] = choice["message"]["content"] or ""
    return [choices[index] for index in sorted(choices)]


def _add_fragment(calls: list[dict[str, Any]], fragment: dict[str, Any]) -> None:
    if fragment["index"] == len(calls):
        calls.append(
            {
                "id": fragment["id"],
                "type": fragment["type"],
                "function": {"name": fragment["function"]["name"], "arguments": ""},
            }
        )
    calls[fragment["index"]]["function"]["arguments"] += fragment["function"]["arguments"]
