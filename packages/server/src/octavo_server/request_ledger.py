"""Which answers the engine owes, and what is already there of each.

The front keeps this much of every request in flight, so that a new engine can go on where one
that crashed has stopped: tokens depend on nothing but the request and the tokens before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from octavo_core.wire import EngineCoreOutput, EngineCoreRequest

# A request that was in flight in so many crashes is not tried again.
MAX_CRASHES = 2
# New tokens after which a request is past where the engine crashed. What got lost on its way
# when the engine died is computed again first: a few steps' tokens.
TRIAL_TOKENS = 4
# Most trials after a crash. One takes a prefill and a few steps.
MAX_TRIALS = 128


class _Entry:
    """One request in flight."""

    __slots__ = ("is_sent", "is_suspect", "num_crashes", "request", "token_ids", "trial_end")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.token_ids: list[int] = list(request.output_token_ids)
        self.num_crashes = 0
        self.is_sent = False
        self.is_suspect = False  # since the last crash it got no further
        self.trial_end = 0


class RequestLedger:
    """The requests in flight of one front, in the order in which they came.

    Attributes:
        num_waiting_tokens: Tokens of the prompts whose answers have not begun.
    """

    def __init__(self) -> None:
        self.num_waiting_tokens = 0
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, request: EngineCoreRequest, *, is_sent: bool) -> None:
        """Follow a request.

        Args:
            is_sent: The engine gets it now; else it is for `unsent`.
        """
        entry = self._entries[request.request_id] = _Entry(request)
        entry.is_sent = is_sent
        self.num_waiting_tokens += len(request.prompt_token_ids)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose answers nobody waits for. Unknown ids are ignored."""
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is not None and not entry.token_ids:
                self.num_waiting_tokens -= len(entry.request.prompt_token_ids)

    def note(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Take note of a step's tokens, and forget what they end."""
        entries = self._entries
        for output in outputs:
            entry = entries.get(output.request_id)
            if entry is None:
                continue
            had_begun = bool(entry.token_ids)
            entry.token_ids += output.new_token_ids
            has_ended = output.finish_reason is not None
            if not had_begun and (entry.token_ids or has_ended):
                self.num_waiting_tokens -= len(entry.request.prompt_token_ids)
            if has_ended:
                del entries[output.request_id]

    def note_crash(self) -> list[str]:
        """Take note that the engine has crashed with what it had.

        Whoever was on trial alone is to blame, and those that passed before it are not.

        Returns:
            The requests that have met their last crash, which are forgotten.
        """
        there = [entry for entry in self._entries.values() if entry.is_sent]
        on_trial = [entry for entry in there if entry.is_suspect]
        for entry in on_trial or there:
            entry.num_crashes += 1
        for entry in there:
            entry.is_sent = False
            entry.is_suspect = True
        ended = [
            request_id
            for request_id, entry in self._entries.items()
            if entry.num_crashes >= MAX_CRASHES
        ]
        self.remove(ended)
        return ended

    def trials(self) -> list[list[str]]:
        """Return who is to be tried with whom after a crash: each alone, if they are not many."""
        suspects = [name for name, entry in self._entries.items() if entry.is_suspect]
        size = -(-len(suspects) // MAX_TRIALS) or 1
        return [suspects[start : start + size] for start in range(0, len(suspects), size)]

    def is_cleared(self, request_ids: Iterable[str]) -> bool:
        """True if all these have got past where they were at the crash, or have ended.

        Those are no suspects any more.
        """
        waiting = False
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            if len(entry.token_ids) >= entry.trial_end:
                entry.is_suspect = False
            else:
                waiting = True
        return not waiting

    def unsent(self, request_ids: Iterable[str] | None = None) -> list[EngineCoreRequest]:
        """Return what the engine has to get, of these requests or of all, and count it as sent."""
        names = list(self._entries) if request_ids is None else request_ids
        requests = []
        for name in names:
            entry = self._entries.get(name)
            if entry is None or entry.is_sent:
                continue
            entry.is_sent = True
            entry.trial_end = len(entry.token_ids) + TRIAL_TOKENS
            requests.append(_resumed(entry) if entry.num_crashes else entry.request)
        return requests


def _resumed(entry: _Entry) -> EngineCoreRequest:
    return msgspec.structs.replace(
        entry.request, output_token_ids=list(entry.token_ids), is_resumed=True
    )
