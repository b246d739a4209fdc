"""A constraint that begins only after some text, such as the end of a model's thinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo_server.grammar_vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from octavo_server.llguidance_backend import LLGuidanceMatcher


class DelayedMatcher:
    """Leaves an answer free until a marker has come, and then follows a grammar.

    Before the marker the answer may not end: what was promised is still to come.

    Args:
        inner: Follows what comes after the marker.
        marker: The text that is waited for.
        vocabulary: The model's vocabulary.
    """

    def __init__(
        self, inner: LLGuidanceMatcher, marker: bytes, vocabulary: GrammarVocabulary
    ) -> None:
        self._inner = inner
        self._marker = marker
        self._vocabulary = vocabulary
        self._tail: bytes | None = b""  # what may be a part of the marker; None after it

    @property
    def is_terminated(self) -> bool:
        """True once nothing may follow but the end."""
        return self._tail is None and self._inner.is_terminated

    def bitmask(self) -> bytes:
        """Return the tokens that may come next."""
        return self._inner.bitmask() if self._tail is None else self._vocabulary.free_mask

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Move on by tokens of the answer.

        Raises:
            ValueError: A token after the marker is not allowed.
        """
        for token_id in token_ids:
            if self._tail is None:
                self._inner.accept_tokens([token_id])
            else:
                self._look_for_marker(self._tail + self._vocabulary.tokens[token_id])

    def take_forced_tokens(self) -> list[int]:
        """Move on by the tokens that must come next, and return them."""
        return self._inner.take_forced_tokens() if self._tail is None else []

    def _look_for_marker(self, text: bytes) -> None:
        place = text.find(self._marker)
        if place < 0:
            self._tail = text[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""
            return
        self._tail = None
        # A token that holds the marker's end may hold blanks after it, which mean nothing.
        rest = text[place + len(self._marker) :].strip()
        if rest:
            self._inner.accept_text(rest)
