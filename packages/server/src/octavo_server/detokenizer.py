"""Text from tokens as they come, without half characters and without stop strings.

Two parts that know nothing of each other. A decoder turns tokens into text that is
final: all its pieces joined equal ``tokenizer.decode`` of all the tokens. A
`StopStringFilter` then holds back whatever may still turn out to be a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from octavo_server.tokenizer import Tokenizer, fallback_byte

REPLACEMENT_CHARACTER = "\ufffd"


class Detokenizer:
    """The text of one answer.

    Args:
        skip_special_tokens: Leave control tokens out of the text.
        stop: Strings that end the answer.
        include_stop_str_in_output: Keep the stop string that was met.
        min_tokens: Stop strings that are complete before this many tokens don't count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = make_decoder(tokenizer)
        self._filter = StopStringFilter(stop, include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met, if one was. Later tokens add nothing."""
        return self._filter.matched

    def push(self, token_id: int) -> str:
        """Take one token; return the text that has become certain."""
        self._num_tokens += 1
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        text = self._decoder.push(token_id)
        return self._filter.push(text, self._num_tokens >= self._min_tokens) if text else ""

    def finish(self, token_id: int | None = None) -> str:
        """Return all that was held back, as no token will follow.

        Args:
            token_id: A token that ended the answer and is no part of the text; it only counts.
        """
        if token_id is not None:
            self._num_tokens += 1
        text = self._filter.push(self._decoder.finish(), self._num_tokens >= self._min_tokens)
        return text + self._filter.finish()


# Decoders


class IncrementalDecoder(Protocol):
    """Turns tokens into text whose pieces, joined, equal decoding them all at once."""

    def push(self, token_id: int) -> str:
        """Take one token; return the text that no later token can change."""
        ...

    def finish(self) -> str:
        """Return the rest."""
        ...


def make_decoder(tokenizer: Tokenizer) -> IncrementalDecoder:
    """Return the decoder that fits a tokenizer."""
    kind = tokenizer.decoder_rule.kind
    if kind == "byte_level":
        return ByteLevelDecoder(tokenizer)
    if kind == "byte_fallback":
        return ByteFallbackDecoder(tokenizer)
    return WindowDecoder(tokenizer)


class ByteLevelDecoder:
    """For byte-level BPE: a character is whole when its last byte is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id) or b"")

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteFallbackDecoder:
    """For SentencePiece models: tokens are text, and byte tokens spell the characters it lacks.

    The library judges a run of byte tokens as a whole: one byte that is no UTF-8 turns
    every byte of the run into U+FFFD. So a run is held until it ends, which in practice
    is a token after the character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._strip = tokenizer.decoder_rule.strip
        self._strip_left = tokenizer.decoder_rule.strip_count
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return ""
        token_bytes = self._tokenizer.token_bytes(token_id) or b""
        if fallback_byte(piece) is not None:
            self._run += token_bytes
            return ""
        return self._strip_front(self._end_run() + token_bytes.decode())

    def finish(self) -> str:
        return self._strip_front(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT_CHARACTER * len(run)

    def _strip_front(self, text: str) -> str:
        while text and self._strip_left:
            if text[0] != self._strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowDecoder:
    """For any other tokenizer: decode a few tokens with and without the new ones, and compare.

    The window starts at the last token whose text was given out, so that a decoder
    which looks at the token before (spaces, joining marks) sees it.
    """

    # A text that still ends in half a character after so many tokens never was one.
    MAX_HELD_TOKENS = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        incomplete = text.endswith(REPLACEMENT_CHARACTER)
        if not text or (incomplete and len(self._held) < self.MAX_HELD_TOKENS):
            return ""
        self._context, self._held = self._held, []
        return text

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        both = self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)
        return both[len(before) :]


class TextOffsets:
    """Where in the text each token of an answer starts, in characters.

    A token that begins in the middle of a character starts where the character does; one
    that is no part of the text starts where the text has got to.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = make_decoder(tokenizer)
        # The byte tokens that a `ByteFallbackDecoder` holds, which may spell several characters.
        self._run = bytearray()
        self._length = 0

    def push(self, token_id: int) -> int:
        """Take the next token and return its offset."""
        before = self._length
        start = before + _num_whole_characters(self._run)
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return start
        token_bytes = self._tokenizer.token_bytes(token_id) or b""
        self._length += len(self._decoder.push(token_id))
        if self._length > before:
            # The text may begin with what was held: the token itself is only its end.
            self._run.clear()
            return max(before, self._length - len(token_bytes.decode(errors="replace")))
        if self._is_held_byte(token_id):
            self._run += token_bytes
        return start

    def _is_held_byte(self, token_id: int) -> bool:
        if self._tokenizer.decoder_rule.kind != "byte_fallback":
            return False
        return fallback_byte(self._tokenizer.piece(token_id) or "") is not None


def _num_whole_characters(data: bytearray) -> int:
    return len(codecs.getincrementaldecoder("utf-8")(errors="replace").decode(bytes(data)))


# Stop strings


class StopStringFilter:
    """Lets text through up to the first stop string.

    The first is the one that is complete first, however the text was cut into
    pieces; of two that end together, the longer. At most the longest stop string
    less one character is held back, and only what could be the start of one.
    """

    def __init__(self, stop: Sequence[str], include_stop_string: bool) -> None:
        self._stop = stop
        self._include = include_stop_string
        self._starts = _starts_by_last_character(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """Take new text; return what can be given out.

        Args:
            may_stop: False lets complete stop strings pass.
        """
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        num_old, text = len(self._held), self._held + text
        if may_stop and (match := self._first_match(text, num_old)):
            start, self.matched = match
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back, since it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Find the stop string that ends first, after the `num_old` characters seen before."""
        found = [
            (text.find(string, max(0, num_old - len(string) + 1)), string) for string in self._stop
        ]
        matches = [(start, string) for start, string in found if start >= 0]
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length, string in self._starts.get(text[-1:], ()):
            if text.endswith(string[:length]):
                return length
        return 0


def _starts_by_last_character(stop: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
    """Sort the beginnings of stop strings by their last character, the longest first.

    Most tokens end in a character that no beginning ends in, so one look-up is all that
    they cost: 9 instead of 15 µs a token with three stop strings.
    """
    starts: dict[str, list[tuple[int, str]]] = {}
    for string in stop:
        for length in range(1, len(string)):
            starts.setdefault(string[length - 1], []).append((length, string))
    for items in starts.values():
        items.sort(reverse=True)
    return starts
