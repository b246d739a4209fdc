"""Reads one choice's deltas: what it says, why it ended, how much of it was reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from octavo_server.answer_events import AnswerEvent, CallStart, ReasoningDelta, TextDelta
from octavo_server.api.conversation import PreparedConversation
from octavo_server.request_output import CompletionOutput, OutputDelta


class AnswerReader:
    """One choice of a conversation.

    Attributes:
        finish_reason: In OpenAI's words; None until the last delta.
        stop_reason: The stop string or token id that ended the choice, if one did.
        num_calls: Calls that have begun.
        num_tokens: Tokens of the choice.
    """

    def __init__(self, prepared: PreparedConversation) -> None:
        self._prepared = prepared
        self._parser = prepared.new_parser()
        self._counts_reasoning = self._parser.can_reason
        # Kept only where they are counted at the end.
        self._token_ids: list[int] = []
        self.num_tokens = 0
        self.num_calls = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def can_reason(self) -> bool:
        """True if reasoning is told from the answer."""
        return self._counts_reasoning

    def push(self, delta: OutputDelta) -> list[AnswerEvent]:
        """Take a delta of this choice; return what it tells."""
        (events,) = self.push_pieces([delta.text], delta)
        return events

    def push_pieces(
        self, texts: Sequence[str], output: OutputDelta | CompletionOutput
    ) -> list[list[AnswerEvent]]:
        """Take a delta or a whole choice whose text was cut; return what each piece tells.

        Args:
            texts: One piece at least; what the end tells comes with the last one.
        """
        self.num_tokens += len(output.token_ids)
        if self._counts_reasoning:
            self._token_ids += output.token_ids
        told = [self._parser.push(text) for text in texts]
        if output.finish_reason is not None:
            told[-1] += self._parser.finish()
        self.num_calls += sum(isinstance(event, CallStart) for events in told for event in events)
        if output.finish_reason is not None:
            self.finish_reason = self._prepared.finish_reason(output.finish_reason, self.num_calls)
            self.stop_reason = output.stop_reason
        return told

    def push_whole(self, output: CompletionOutput) -> list[AnswerEvent]:
        """Take the whole choice at once; return all that it tells."""
        (events,) = self.push_pieces([output.text], output)
        return events

    def num_reasoning_tokens(self) -> int:
        """Return how many tokens of the choice were reasoning."""
        return self._parser.num_reasoning_tokens(
            self._prepared.model.tokenizer,
            self._token_ids,
            skip_special_tokens=self._prepared.skip_special_tokens,
        )


def by_kind(events: Sequence[AnswerEvent]) -> list[list[AnswerEvent]]:
    """Group neighbours of one kind: text, reasoning, or anything of calls."""
    if len(events) == 1:
        return [list(events)]
    return [list(group) for _, group in groupby(events, _kind)]


def _kind(event: AnswerEvent) -> type:
    return type(event) if isinstance(event, TextDelta | ReasoningDelta) else CallStart
