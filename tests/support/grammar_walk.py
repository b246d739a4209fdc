"""Writes random answers under a grammar, without a model."""

from __future__ import annotations

import random

from octavo_core.grammar import Grammar
from octavo_server.grammar_vocabulary import GrammarVocabulary

MAX_TOKENS = 3000

# Tokens that bring an answer nearer to its end.
_CLOSING = (
    *(b'"', b'"}', b'"]', b"}", b"]", b'",', b'", "', b", ", b'":'),
    *(b"0", b"1", b"true", b"null", b"@", b".", b"a", b" "),
)


class Walker:
    """A model that has no idea, and gets tired.

    Args:
        vocabulary: What the grammars were compiled for.
        seed: Decides everything.
    """

    def __init__(self, vocabulary: GrammarVocabulary, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        tokens = vocabulary.tokens
        self._closing = [i for text in _CLOSING for i, token in enumerate(tokens) if token == text]
        self._ends = set(vocabulary.end_ids)

    def write(self, grammar: Grammar) -> tuple[bytes, int]:
        """Return one whole answer, and how many of its tokens were forced."""
        matcher = grammar.new_matcher()
        token_ids: list[int] = []
        num_forced = 0
        while not matcher.is_terminated:
            assert len(token_ids) < MAX_TOKENS, "the answer does not end"
            token_id = self._choose(int.from_bytes(matcher.bitmask(), "little"), len(token_ids))
            if token_id in self._ends:
                break
            matcher.accept_tokens([token_id])
            forced = matcher.take_forced_tokens()
            token_ids += [token_id, *forced]
            num_forced += len(forced)
        return b"".join(self._vocabulary.tokens[i] for i in token_ids), num_forced

    def _choose(self, bits: int, length: int) -> int:
        assert bits, "nothing is allowed"
        tired = self._random.random() < min(0.9, 0.2 + length / 60)
        if tired:
            for token_id in (*self._ends, *self._random.sample(self._closing, len(self._closing))):
                if bits >> token_id & 1:
                    return token_id
        for _ in range(20):
            token_id = self._random.randrange(len(self._vocabulary.tokens))
            if bits >> token_id & 1:
                return token_id
        text = f"{bits:b}"[::-1]
        allowed = [place for place, bit in enumerate(text) if bit == "1"]
        return self._random.choice(allowed)
