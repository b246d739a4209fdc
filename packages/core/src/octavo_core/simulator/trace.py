"""The arrivals that a simulation replays: one JSON object a line.

{"time": 0.0, "prompt_tokens": 512, "output_tokens": 128}
{"time": 0.4, "prompt_tokens": 700, "output_tokens": 9, "prefix_group": "a", "prefix_tokens": 600}
{"time": 0.9, "prompt_token_ids": [1, 15, 22], "output_tokens": 8, "priority": 1, "user": "ann"}

Requests of one ``prefix_group`` start with the same tokens, ``prefix_tokens`` of them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from octavo_core.errors import UserError

# Token ids are made up, but must look like ids: small and not negative.
_MARKERS = 1 << 30

# Prompts are built in memory, and a clock that counts steps needs its microseconds.
MAX_TOKENS = 10_000_000
MAX_TIME = 1e10  # seconds, 317 years: a Unix time will do


class TraceError(UserError):
    """A trace that can't be replayed. The message names the file and the line."""


class TraceEntry(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One arrival.

    Attributes:
        time: Seconds since the start of the trace, at most `MAX_TIME`.
        output_tokens: Tokens of the answer, which ends there; at most `MAX_TOKENS`.
        prompt_tokens: Length of the prompt, unless ``prompt_token_ids`` is given; at most
            `MAX_TOKENS`.
        prompt_token_ids: The prompt itself, which makes prefix hits exact.
        prefix_group: Requests with the same name start with the same tokens.
        prefix_tokens: How many of the prompt's tokens the group shares.
        priority: Lower runs earlier, under the priority policy.
        user: Whom the request is counted for, under the fair-share policy.
    """

    time: float
    output_tokens: int
    prompt_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    prefix_group: str | None = None
    prefix_tokens: int = 0
    priority: int = 0
    user: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, however it was given."""
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        return self.prompt_tokens or 0

    def problem(self) -> str | None:
        """Say what is wrong with the entry, or None."""
        if not math.isfinite(self.time) or self.time < 0:
            return f"time is {self.time}; it must be a number of seconds, at least 0"
        if self.time > MAX_TIME:
            return f"time is {self.time:g}; it must be at most {MAX_TIME:g} seconds"
        if self.output_tokens < 1:
            return f"output_tokens is {self.output_tokens}; it must be at least 1"
        for name in ("prompt_tokens", "output_tokens", "prefix_tokens"):
            count = getattr(self, name)
            if count is not None and count > MAX_TOKENS:
                return f"{name} is {count}; it must be at most {MAX_TOKENS}"
        if (self.prompt_tokens is None) == (self.prompt_token_ids is None):
            return "give one of prompt_tokens and prompt_token_ids"
        if self.num_prompt_tokens < 1:
            return "the prompt is empty; it needs a token"
        if self.num_prompt_tokens > MAX_TOKENS:
            return (
                f"prompt_token_ids has {self.num_prompt_tokens} tokens; it must have at most "
                f"{MAX_TOKENS}"
            )
        if min(self.prompt_token_ids or [0]) < 0 or max(self.prompt_token_ids or [0]) >= 1 << 31:
            return "prompt_token_ids holds a number that is no token id"
        if not 0 <= self.prefix_tokens <= self.num_prompt_tokens:
            return (
                f"prefix_tokens is {self.prefix_tokens}; it must be between 0 and the prompt's "
                f"{self.num_prompt_tokens} tokens"
            )
        if self.prefix_tokens and self.prefix_group is None:
            return "prefix_tokens needs a prefix_group"
        return None


_decode = msgspec.json.Decoder(TraceEntry).decode
_encode = msgspec.json.Encoder().encode


def read_trace(path: str | Path) -> Iterator[TraceEntry]:
    """Read a trace line by line, so that its length does not matter.

    Raises:
        TraceError: While iterating: a line is no entry, or comes before the one above it.
    """
    last_time = 0.0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                entry = _parse(path, number, line)
                if entry.time < last_time:
                    raise _error(
                        path,
                        number,
                        f"time is {entry.time:g}, before the line above ({last_time:g}); sort the "
                        f"trace by time",
                    )
                last_time = entry.time
                yield entry
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}.", field="trace") from error


def write_trace(path: str | Path, entries: Iterable[TraceEntry]) -> int:
    """Write a trace; returns the number of lines.

    Raises:
        TraceError: The file can't be written.
    """
    count = 0
    try:
        with open(path, "wb") as file:
            for entry in entries:
                file.write(_encode(entry) + b"\n")
                count += 1
    except OSError as error:
        raise TraceError(f"{path} can't be written: {error.strerror}.", field="trace") from error
    return count


def _parse(path: str | Path, number: int, line: bytes) -> TraceEntry:
    try:
        entry = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _error(path, number, _explain(error)) from None
    problem = entry.problem()
    if problem is not None:
        raise _error(path, number, problem)
    return entry


def _explain(error: Exception) -> str:
    """Return the decoder's words; of a field that there is not, with the name that it resembles."""
    reason = str(error).rstrip(".")
    unknown = re.search(r"unknown field `(.*)`", reason)
    if unknown is None:
        return reason
    import difflib  # only for a trace that is refused

    fields = TraceEntry.__struct_fields__
    close = difflib.get_close_matches(unknown[1], fields, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(fields)}"
    return f"there is no field {unknown[1]!r}; {hint}"


def _error(path: str | Path, number: int, reason: str) -> TraceError:
    end = "" if reason.endswith("?") else "."
    return TraceError(f"{path}, line {number}: {reason}{end}", field="trace")


class PromptMaker:
    """Makes token ids for entries that only state lengths.

    A prompt is a slice of one fixed list of ids, behind a marker that is the request's
    own or its group's. A block's hash covers all tokens before it, so one marker keeps
    whole prompts apart, and a slice costs 1 µs for 512 tokens where drawing them costs 200.
    """

    def __init__(self) -> None:
        self._filler = [7 * i % 50_000 for i in range(4096)]
        self._groups: dict[str, int] = {}

    def make(self, entry: TraceEntry, index: int) -> list[int]:
        """Return the prompt of the trace's `index`-th entry."""
        if entry.prompt_token_ids is not None:
            return entry.prompt_token_ids
        num_tokens, num_shared = entry.num_prompt_tokens, entry.prefix_tokens
        prompt: list[int] = []
        if num_shared and entry.prefix_group is not None:
            prompt = self._run(self._group_marker(entry.prefix_group), num_shared)
        if num_tokens > num_shared:
            prompt += self._run(2 * (index % (_MARKERS // 2)) + 1, num_tokens - num_shared)
        return prompt

    def _run(self, marker: int, num_tokens: int) -> list[int]:
        while len(self._filler) < num_tokens:
            self._filler += self._filler
        run = self._filler[:num_tokens]
        run[0] = marker
        return run

    def _group_marker(self, group: str) -> int:
        marker = self._groups.get(group)
        if marker is None:
            digest = hashlib.sha256(group.encode()).digest()
            marker = 2 * (int.from_bytes(digest[:4], "little") % (_MARKERS // 2))
            self._groups[group] = marker
        return marker
