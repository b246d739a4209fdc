"""What an answer consists of, as a client sees it: text, reasoning, and calls of tools.

Parsers make these events out of the model's text; each API writes them in its own shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Comes once for each call, before its arguments."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments. All of a call's pieces together are JSON text of an object."""

    index: int
    text: str


AnswerEvent = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta


@dataclass
class CollectedCall:
    """A call with all that came of its arguments."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class CollectedAnswer:
    """Events of one choice, put together.

    Attributes:
        text: All text, or None if there was none.
        reasoning: All reasoning, or None if there was none.
        calls: In the order of their index.
    """

    text: str | None = None
    reasoning: str | None = None
    calls: list[CollectedCall] = field(default_factory=list)


def collect(events: Iterable[AnswerEvent]) -> CollectedAnswer:
    """Put events together: the only way to a whole answer, so that it equals the streamed one."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[CollectedCall] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                thoughts.append(text)
            case CallStart(_, call_id, name):
                calls.append(CollectedCall(call_id, name))
                arguments.append([])
            case ArgumentsDelta(index, text):
                arguments[index].append(text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return CollectedAnswer("".join(texts) or None, "".join(thoughts) or None, calls)


def merge(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """Join neighbours that continue each other."""
    if len(events) < 2:
        return events
    merged: list[AnswerEvent] = []
    for event in events:
        match (merged[-1] if merged else None, event):
            case (TextDelta(before), TextDelta(text)):
                merged[-1] = TextDelta(before + text)
            case (ReasoningDelta(before), ReasoningDelta(text)):
                merged[-1] = ReasoningDelta(before + text)
            case (ArgumentsDelta(one, before), ArgumentsDelta(other, text)) if one == other:
                merged[-1] = ArgumentsDelta(one, before + text)
            case _:
                merged.append(event)
    return merged
