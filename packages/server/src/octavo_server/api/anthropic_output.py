"""An answer in the shape of Anthropic's API: blocks of content, as events or whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo_server.answer_events import (
    AnswerEvent,
    ArgumentsDelta,
    CallStart,
    ReasoningDelta,
    TextDelta,
)
from octavo_server.api.answer_reader import AnswerReader
from octavo_server.api.anthropic_errors import anthropic_error
from octavo_server.api.conversation import PreparedConversation
from octavo_server.api.errors import ApiError
from octavo_server.api.sse import named_event
from octavo_server.api.timing import Timing
from octavo_server.request_output import OutputDelta


class MessageWriter:
    """Writes one message. The whole message is what the events add up to.

    Args:
        message_id: The answer's id.
        max_tokens: As the request has it; the context may leave less.
    """

    def __init__(self, message_id: str, prepared: PreparedConversation, max_tokens: int) -> None:
        self._id = message_id
        self._prepared = prepared
        self._reader = AnswerReader(prepared)
        self._max_tokens = max_tokens
        self._finish_reason: str | None = None
        self._num_cached_tokens = 0
        self._timing: Timing | None = None
        self._began = False
        self._blocks: list[dict[str, Any]] = []
        # The text of the open block, or None if none is open.
        self._pieces: list[str] | None = None

    def note_timing(self, timing: Timing) -> None:
        """Have the answer tell how long its parts took."""
        self._timing = timing

    def begin(self) -> bytes:
        """Nothing comes before the usage of the prompt is known."""
        return b""

    async def step(self, deltas: Sequence[OutputDelta]) -> bytes:
        """Write one step's deltas."""
        events: list[dict[str, Any]] = []
        for delta in deltas:
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
            if not self._began:
                self._began = True
                events += [self._message_start(), {"type": "ping"}]
            for event in self._reader.push(delta):
                events += self._write(event)
            self._finish_reason = delta.finish_reason or self._finish_reason
        return b"".join(named_event(event["type"], event) for event in events)

    def end(self) -> bytes:
        """Close the message."""
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        events = [
            *self._close_block(),
            {"type": "message_delta", "delta": delta, **self._totals()},
            {"type": "message_stop"},
        ]
        return b"".join(named_event(event["type"], event) for event in events)

    def fail(self, error: ApiError) -> bytes:
        """Write an error."""
        return named_event("error", anthropic_error(error))

    async def result(self) -> dict[str, Any]:
        """Return the whole message."""
        return self._message(
            self._blocks, self._stop_reason(), self._stop_sequence(), self._totals()
        )

    def _write(self, event: AnswerEvent) -> list[dict[str, Any]]:
        match event:
            case TextDelta(text):
                events = self._open_block({"type": "text", "text": ""})
                delta = {"type": "text_delta", "text": text}
            case ReasoningDelta(text):
                events = self._open_block({"type": "thinking", "thinking": "", "signature": ""})
                delta = {"type": "thinking_delta", "thinking": text}
            case CallStart(_, call_id, name):
                return self._new_block(
                    {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                )
            case ArgumentsDelta(_, text):
                events = []
                delta = {"type": "input_json_delta", "partial_json": text}
        assert self._pieces is not None
        self._pieces.append(text)
        return [*events, self._block_delta(delta)]

    def _open_block(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Open a block, unless one of its kind is open."""
        if self._pieces is not None and self._blocks[-1]["type"] == block["type"]:
            return []
        return self._new_block(block)

    def _new_block(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close_block()
        self._blocks.append(block)
        self._pieces = []
        index = len(self._blocks) - 1
        start = {"type": "content_block_start", "index": index, "content_block": dict(block)}
        return [*events, start]

    def _close_block(self) -> list[dict[str, Any]]:
        if self._pieces is None:
            return []
        text, self._pieces = "".join(self._pieces), None
        block = self._blocks[-1]
        events: list[dict[str, Any]] = []
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        elif block["type"] == "thinking":
            # Clients send it back and want one; nothing here reads it.
            signature = hashlib.sha256(text.encode()).hexdigest()
            block |= {"thinking": text, "signature": signature}
            delta = {"type": "signature_delta", "signature": signature}
            events.append(self._block_delta(delta))
        else:
            block["text"] = text
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _block_delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _message_start(self) -> dict[str, Any]:
        return {
            "type": "message_start",
            "message": self._message([], None, None, {"usage": self._usage()}),
        }

    def _message(
        self,
        content: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
        totals: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.model.name,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            **totals,
        }

    def _stop_reason(self) -> str:
        if self._finish_reason == "length":
            is_full = self._reader.num_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        # A call that a stop sequence has cut off is none to be carried out.
        if self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if self._reader.num_calls else "end_turn"

    def _stop_sequence(self) -> str | None:
        reason = self._reader.stop_reason
        return reason if isinstance(reason, str) else None

    def _totals(self) -> dict[str, Any]:
        timing = {} if self._timing is None else {"timing": self._timing.field()}
        return {"usage": self._usage(), **timing}

    def _usage(self) -> dict[str, Any]:
        # Anthropic counts what came from the cache apart.
        usage: dict[str, Any] = {
            "input_tokens": self._prepared.num_prompt_tokens - self._num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached_tokens,
            "output_tokens": self._reader.num_tokens,
        }
        if self._reader.can_reason and self._finish_reason is not None:
            num_tokens = self._reader.num_reasoning_tokens()
            usage["output_tokens_details"] = {"thinking_tokens": num_tokens}
        return usage


def _input(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        # The answer was cut off, as its stop_reason says.
        return {}
