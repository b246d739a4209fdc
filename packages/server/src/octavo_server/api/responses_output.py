"""An answer in the shape of the Responses API: items, as numbered events or whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from octavo_server.answer_events import (
    AnswerEvent,
    ArgumentsDelta,
    CallStart,
    ReasoningDelta,
    TextDelta,
)
from octavo_server.api.answer_reader import AnswerReader
from octavo_server.api.conversation import PreparedConversation
from octavo_server.api.errors import ApiError
from octavo_server.api.logprobs import TokenCutter, chat_logprobs
from octavo_server.api.responses_input import new_item_id
from octavo_server.api.responses_protocol import ResponsesRequest
from octavo_server.api.responses_store import EventLog, Item
from octavo_server.api.sse import named_event
from octavo_server.api.timing import Timing
from octavo_server.request_output import OutputDelta, PositionLogprobs


class ResponseWriter:
    """Writes one response. The whole response is what the events add up to.

    Args:
        response_id: The answer's id.
        body: What was asked for, which the response repeats.
        is_stored: As the response says.
        on_end: Called when the response is complete or has failed, before that is told.
        log: Keeps the events, if others are to follow them.

    Attributes:
        status: ``queued``, ``in_progress``, ``completed``, ``incomplete``, ``failed`` or
            ``cancelled``.
    """

    def __init__(
        self,
        response_id: str,
        body: ResponsesRequest,
        prepared: PreparedConversation,
        *,
        is_stored: bool,
        on_end: Callable[[], None],
        log: EventLog | None = None,
    ) -> None:
        self.status = "queued" if body.background else "in_progress"
        self._head = _head(response_id, body, prepared, is_stored)
        self._prepared = prepared
        self._reader = AnswerReader(prepared)
        self._on_end = on_end
        self._log = log
        self._num_events = 0
        self._num_cached_tokens = 0
        self._timing: Timing | None = None
        self._finish_reason: str | None = None
        self._error: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self._items: list[Item] = []
        # The text of the open item, or None if none is open.
        self._pieces: list[str] | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._cutter = TokenCutter(
            prepared.model.tokenizer, skip_special_tokens=prepared.skip_special_tokens
        )
        # Of tokens whose text is held back.
        self._unwritten: list[PositionLogprobs] = []

    def note_timing(self, timing: Timing) -> None:
        """Have the response tell how long its parts took."""
        self._timing = timing

    def begin(self) -> bytes:
        """Say that there is a response."""
        created = self._event("response.created", response=self.whole())
        if self.status == "queued":
            created += self._event("response.queued", response=self.whole())
            self.status = "in_progress"
        return created + self._event("response.in_progress", response=self.whole())

    async def step(self, deltas: Sequence[OutputDelta]) -> bytes:
        """Write one step's deltas."""
        written = b""
        for delta in deltas:
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
            for event, positions in self._read(delta):
                logprobs = (chat_logprobs(positions) or {"content": []})["content"]
                written += self._write(event, logprobs)
            self._finish_reason = delta.finish_reason or self._finish_reason
        return written

    def _read(self, delta: OutputDelta) -> Iterator[tuple[AnswerEvent, list[PositionLogprobs]]]:
        """Yield what a delta tells, texts with the log-probabilities of their tokens."""
        if delta.logprobs is None:
            for event in self._reader.push(delta):
                yield event, []
            return
        pieces = self._cutter.cut(delta.text, delta.logprobs)
        told = self._reader.push_pieces([text for text, _ in pieces], delta)
        for (_, started), events in zip(pieces, told, strict=True):
            self._unwritten += started
            for event in events:
                # Tokens of tags, thoughts and calls belong to no text.
                positions, self._unwritten = self._unwritten, []
                yield event, positions if isinstance(event, TextDelta) else []

    def end(self) -> bytes:
        """Close the response, complete or cut off or cancelled."""
        if self._finish_reason in (None, "abort"):
            self.status = "cancelled"
        elif self._finish_reason == "length":
            self.status = "incomplete"
        else:
            self.status = "completed"
        written = self._close_item()
        self._completed_at = int(time.time()) if self.status == "completed" else None
        self._on_end()
        name = "incomplete" if self.status == "cancelled" else self.status
        return written + self._event(f"response.{name}", response=self.whole())

    def fail(self, error: ApiError) -> bytes:
        """Write an error."""
        self.status = "failed"
        written = self._close_item()
        code = error.code if isinstance(error.code, str) else "server_error"
        self._error = {"code": code, "message": error.message}
        self._on_end()
        return written + self._event("response.failed", response=self.whole())

    async def result(self) -> dict[str, Any]:
        """Return the whole response."""
        return self.whole()

    def whole(self) -> dict[str, Any]:
        """Return the response as it is now."""
        is_done = self.status in ("completed", "incomplete")
        is_cut = self.status == "incomplete"
        return {
            **self._head,
            "status": self.status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [dict(item) for item in self._items],
            "usage": self._usage() if is_done else None,
            "completed_at": self._completed_at,
            **({} if self._timing is None else {"timing": self._timing.field()}),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        data = named_event(kind, content)
        if self._log is not None:
            self._log.append(data)
        return data

    def _write(self, event: AnswerEvent, logprobs: list[dict[str, Any]]) -> bytes:
        match event:
            case TextDelta(text):
                written = self._open("message")
                self._logprobs += logprobs
                kind, extra = "output_text", {"content_index": 0, "logprobs": logprobs}
            case ReasoningDelta(text):
                written = self._open("reasoning")
                kind, extra = "reasoning_text", {"content_index": 0}
            case CallStart():
                return self._open("function_call", event)
            case ArgumentsDelta(_, text):
                written, kind, extra = b"", "function_call_arguments", {}
        assert self._pieces is not None
        self._pieces.append(text)
        return written + self._event(f"response.{kind}.delta", **self._place(), delta=text, **extra)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open(self, kind: str, call: CallStart | None = None) -> bytes:
        """Open an item, unless one of its kind is open and goes on."""
        if call is None and self._pieces is not None and self._items[-1]["type"] == kind:
            return b""
        written = self._close_item()
        item = _new_item(kind, call)
        self._items.append(item)
        self._pieces = []
        self._logprobs = []
        index = len(self._items) - 1
        written += self._event("response.output_item.added", output_index=index, item=item)
        if kind != "function_call":
            written += self._event(
                "response.content_part.added",
                **self._place(),
                content_index=0,
                part=_part(kind, "", []),
            )
        return written

    def _close_item(self) -> bytes:
        if self._pieces is None:
            return b""
        text, self._pieces = "".join(self._pieces), None
        item = dict(self._items[-1])
        # What was open when the answer was cut off is not complete.
        is_cut = self._finish_reason == "length" or self.status in ("failed", "cancelled")
        item["status"] = "incomplete" if is_cut else "completed"
        place = self._place()
        if item["type"] == "function_call":
            item["arguments"] = text
            written = self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=text,
            )
        else:
            part = _part(item["type"], text, self._logprobs)
            item["content"] = [part]
            is_message = item["type"] == "message"
            written = self._event(
                f"response.{part['type']}.done",
                **place,
                content_index=0,
                text=text,
                **({"logprobs": self._logprobs} if is_message else {}),
            ) + self._event("response.content_part.done", **place, content_index=0, part=part)
        self._items[-1] = item
        index = len(self._items) - 1
        return written + self._event("response.output_item.done", output_index=index, item=item)

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = self._prepared.num_prompt_tokens, self._reader.num_tokens
        cached = {"cached_tokens": self._num_cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": num_input,
            "input_tokens_details": cached,
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens()},
            "total_tokens": num_input + num_output,
        }


def _new_item(kind: str, call: CallStart | None) -> Item:
    if call is not None:
        return {
            "id": new_item_id("fc"),
            "type": kind,
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
    if kind == "reasoning":
        return {
            "id": new_item_id("rs"),
            "type": kind,
            "summary": [],
            "content": [],
            "encrypted_content": None,
            "status": "in_progress",
        }
    return {
        "id": new_item_id("msg"),
        "type": kind,
        "role": "assistant",
        "content": [],
        "status": "in_progress",
    }


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _head(
    response_id: str, body: ResponsesRequest, prepared: PreparedConversation, is_stored: bool
) -> dict[str, Any]:
    params = prepared.requests[0].sampling_params
    reasoning, text = body.reasoning, body.text
    text_format = text.format if text is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": prepared.model.name,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": params.temperature,
        "text": {
            "format": (
                text_format.model_dump(by_alias=True, exclude_none=True)
                if text_format is not None
                else {"type": "text"}
            ),
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": _tool_choice(body),
        "tools": [
            {"parameters": None, "strict": False, **tool.model_dump(exclude_none=True)}
            for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)
