"""What all parsers of model output are built on: a scanner that reads text as it comes.

A parser is a generator that reads as if the whole text were there and pauses where it is
not: ``yield`` means "more text, please". So a parser reads top to bottom like the format's
description, and gives the same events however the text was cut.

Work is linear in the text and bounded for each character, since prompts can steer a model to
write anything: no regular expression here can backtrack, nothing is read twice, and only
what could begin a marker is held back.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from octavo_server.answer_events import (
    AnswerEvent,
    ArgumentsDelta,
    CallStart,
    ReasoningDelta,
    TextDelta,
    merge,
)

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Write = Callable[[str], None]

# A call is checked as a whole before any of it is sent, so that one that breaks becomes text.
# Only a longer one is sent as it comes, since its reader would wait too long for the rest.
COMMIT_CHARS = 512
MAX_CALLS = 128
MAX_TOOL_NAME_CHARS = 256

_SPACE = re.compile(r"[ \t\r\n]*+")


class MalformedCallError(Exception):
    """The text is no call after all. Never leaves the parsers."""


class Markers:
    """Fixed strings to look for, compiled once."""

    def __init__(self, *markers: str) -> None:
        longest_first = sorted(markers, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        # Beginnings of markers by their last character, the longest first. Most text ends in a
        # character that no beginning ends in, and is done with after one look.
        self._beginnings: dict[str, list[str]] = {}
        for marker in longest_first:
            for length in range(len(marker) - 1, 0, -1):
                same_end = self._beginnings.setdefault(marker[length - 1], [])
                if marker[:length] not in same_end:
                    same_end.append(marker[:length])
        for same_end in self._beginnings.values():
            same_end.sort(key=len, reverse=True)

    def held_length(self, text: str, start: int) -> int:
        """Return how many characters at the end of `text` may be the beginning of a marker."""
        for beginning in self._beginnings.get(text[-1:], ()):
            if text.endswith(beginning, start):
                return len(beginning)
        return 0


class Call:
    """One call while it is read.

    Attributes:
        name: None until it was read.
        is_started: True once a part of it has been sent, and it can't become text any more.
    """

    def __init__(self, scanner: Scanner, name: str | None = None) -> None:
        self._scanner = scanner
        self._pieces: list[str] = []
        self._num_chars = 0
        self._index = -1
        self.name = name
        self.is_started = False

    def write(self, text: str) -> None:
        """Add to the arguments."""
        if self.is_started:
            self._scanner.emit(ArgumentsDelta(self._index, text))
            return
        self._pieces.append(text)
        self._num_chars += len(text)
        if self.name is not None and self._num_chars > self._scanner.commit_chars:
            self._start()

    def end(self) -> None:
        """Send what was not sent yet."""
        if not self.name:
            raise MalformedCallError
        if not self.is_started:
            if not self._pieces:
                self._pieces.append("{}")
            self._start()

    def _start(self) -> None:
        assert self.name is not None
        self._index = self._scanner.start_call(self.name)
        self.is_started = True
        self._scanner.emit(ArgumentsDelta(self._index, "".join(self._pieces)))
        self._pieces.clear()


class Scanner:
    """Base of the parsers of model output: text in, events out.

    Args:
        tools: The tools that may be called: their names and the JSON schemas of their
            parameters, or the names alone.
        commit_chars: A longer call is sent as it comes, however it goes on.

    Attributes:
        needs_special_tokens: True if the format is written in control tokens, which must then
            be part of the text.
        reasoning_spans: Where in the text the model was thinking: pairs of a start and an end
            in characters; the last one may have no end yet.
    """

    name: ClassVar[str] = ""
    needs_special_tokens: ClassVar[bool] = False

    def __init__(
        self,
        tools: Mapping[str, dict[str, Any]] | Sequence[str] = (),
        *,
        commit_chars: int = COMMIT_CHARS,
    ) -> None:
        self.tool_names = frozenset(tools)
        self._parameters: dict[str, dict[str, Any]] = (
            dict(tools) if isinstance(tools, Mapping) else {}
        )
        self.commit_chars = commit_chars
        self.reasoning_spans: list[tuple[int, int | None]] = []
        self._buffer = ""
        self._position = 0
        self._num_dropped = 0
        self._closed = False
        self._raw: list[str] | None = None
        self._events: list[AnswerEvent] = []
        self._num_calls = 0
        self._space = ""
        self._after_mark = False
        self._steps = self.parse()

    def push(self, text: str) -> list[AnswerEvent]:
        """Take more of the model's text; return what it tells."""
        self._num_dropped += self._position
        self._buffer = self._buffer[self._position :] + text
        self._position = 0
        return self._run()

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back, now that the text is at its end."""
        self._closed = True
        events = self._run()
        if self._space and not self._after_mark:
            events = merge([*events, TextDelta(self._space)])
        self._space = ""
        return events

    def _run(self) -> list[AnswerEvent]:
        next(self._steps, None)
        events, self._events = self._events, []
        return merge(events)

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        raise NotImplementedError

    def parameters_of(self, name: str) -> dict[str, Any]:
        """Return the JSON schema of a tool's parameters; empty if it is not known."""
        return self._parameters.get(name, {})

    # What goes out

    def emit(self, event: AnswerEvent) -> None:
        """Send an event."""
        self._events.append(event)

    def text(self, piece: str) -> None:
        """Send text. White space before and after a call or a marker is no part of the answer."""
        stripped = piece.rstrip()
        if not stripped:
            self._space += piece
            return
        if self._after_mark:
            self._after_mark = False
            self.emit(TextDelta(stripped.lstrip()))
        else:
            self.emit(TextDelta(self._space + stripped))
        self._space = piece[len(stripped) :]

    def mark(self) -> None:
        """Note that the text is interrupted here."""
        self._space = ""
        self._after_mark = True

    def start_call(self, name: str) -> int:
        """Send the start of a call, which is then no text any more, and return its index."""
        self.mark()
        self._raw = None
        index = self._num_calls
        self._num_calls += 1
        self.emit(CallStart(index, self.new_id(), name))
        return index

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def copy_reasoning(self, end: Markers) -> Steps[str]:
        """Send text up to a marker as reasoning, without the white space around it."""
        start = self._num_dropped + self._position
        self.reasoning_spans.append((start, None))
        trimmer = _Trimmer(lambda text: self.emit(ReasoningDelta(text)))
        marker = yield from self.copy_until(end, trimmer.write)
        if marker:
            stop = self._num_dropped + self._position - len(marker)
            self.reasoning_spans[-1] = (start, stop)
        self.mark()
        return marker

    def attempt(self, body: Steps[None], opening: str) -> Steps[bool]:
        """Read a call. If there is none after all, what was read is text.

        Args:
            body: Reads the call.
            opening: What was read of it already.

        Returns:
            True if there was a call.
        """
        if self._num_calls >= MAX_CALLS:
            self.text(opening)
            return False
        self._raw = [opening]
        try:
            yield from body
        except MalformedCallError:
            # A call that was sent in part stays what it is, like one that was cut off.
            if self._raw is not None:
                self.text("".join(self._raw))
            return False
        finally:
            self._raw = None
        return True

    # What comes in

    def take(self, count: int) -> str:
        """Take characters that are there."""
        return self._advance(self._position + count)

    def _advance(self, end: int) -> str:
        taken = self._buffer[self._position : end]
        self._position = end
        if self._raw is not None:
            self._raw.append(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Undo taking `text`, the last that was taken."""
        self._position -= len(text)
        if self._raw is not None:
            self._raw[-1] = self._raw[-1].removesuffix(text)

    def peek(self) -> Steps[str]:
        """Return the next character, or nothing at the end."""
        while self._position == len(self._buffer) and not self._closed:
            yield
        return self._buffer[self._position : self._position + 1]

    def accept(self, marker: str) -> Steps[bool]:
        """Take `marker` if it comes next."""
        while True:
            found = self._buffer[self._position : self._position + len(marker)]
            if found == marker:
                self.take(len(marker))
                return True
            if self._closed or not marker.startswith(found):
                return False
            yield

    def expect(self, marker: str) -> Steps[None]:
        """Take `marker`, without which there is no call."""
        if not (yield from self.accept(marker)):
            raise MalformedCallError

    def expect_or_end(self, marker: str) -> Steps[None]:
        """Take white space and `marker`; models may leave out the last one of an answer."""
        if (yield from self.skip_space()):
            yield from self.expect(marker)

    def skip_space(self) -> Steps[str]:
        """Take white space; return the character after it."""
        return (yield from self.copy_space(_ignore))

    def copy_space(self, write: Write) -> Steps[str]:
        """Pass on white space; return the character after it, or nothing at the end."""
        while True:
            space = self.take_run(_SPACE)
            if space:
                write(space)
            following = yield from self.peek()
            if following not in (" ", "\t", "\r", "\n"):
                return following

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Take what matches from here on, of the text that is there."""
        match = pattern.match(self._buffer, self._position)
        return "" if match is None else self._advance(match.end())

    def copy_until(self, markers: Markers, write: Write | None = None) -> Steps[str]:
        """Pass on text up to the first marker and take that, too.

        Args:
            write: Takes the text; by default it is the answer's text.

        Returns:
            The marker, or nothing at the end of the text.
        """
        write = write or self.text
        while True:
            match = markers.pattern.search(self._buffer, self._position)
            if match is not None:
                if match.start() > self._position:
                    write(self._advance(match.start()))
                return self._advance(match.end())
            held = 0 if self._closed else markers.held_length(self._buffer, self._position)
            if len(self._buffer) - held > self._position:
                write(self._advance(len(self._buffer) - held))
            if self._closed:
                return ""
            yield

    def copy_rest(self) -> Steps[None]:
        """Send all that is left as text."""
        while (yield from self.peek()):
            self.text(self._advance(len(self._buffer)))

    def take_until(self, markers: Markers, max_chars: int) -> Steps[tuple[str, str]]:
        """Take a short text up to a marker; return both."""
        pieces: list[str] = []
        num_chars = 0

        def keep(piece: str) -> None:
            nonlocal num_chars
            num_chars += len(piece)
            if num_chars > max_chars:
                raise MalformedCallError
            pieces.append(piece)

        marker = yield from self.copy_until(markers, keep)
        if not marker:
            raise MalformedCallError
        return "".join(pieces), marker


class _Trimmer:
    """Passes text on without the white space around it."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._space: list[str] = []
        self._began = False

    def write(self, piece: str) -> None:
        stripped = piece.rstrip()
        if stripped:
            text = "".join([*self._space, stripped]) if self._began else stripped.lstrip()
            self._began = True
            self._space.clear()
            self._write(text)
        if self._began:
            self._space.append(piece[len(stripped) :])


def _ignore(text: str) -> None:
    pass
