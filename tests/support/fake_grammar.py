"""A grammar without a library, for tests of scheduling.

Its language is defined by its tokens alone: what may come next is a hash of what came before.
A number in the regex says which language; words in it ask for misbehaviour.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from octavo_core.errors import InvalidRequestError
from octavo_core.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 1000
EOS_TOKEN_ID = 999
NUM_ALLOWED = 5
BITMASK_BYTES = 4 * (-(-VOCAB_SIZE // 32))


class FakeGrammarBackend:
    """Compiles ``regex="<language> [words]"``.

    ``unsupported`` can't be compiled, ``broken`` makes compiling fail, ``fill`` makes the
    matcher fail at the fourth mask, ``accept`` at the fourth token, and ``complex`` likewise
    through the request's own fault.
    """

    def __init__(self) -> None:
        self.num_compiled = 0

    def prepare(self) -> None:
        pass

    def compile(self, params: StructuredOutputsParams) -> FakeGrammar:
        self.num_compiled += 1
        assert params.regex is not None
        if "unsupported" in params.regex:
            raise InvalidRequestError("the regex is not supported.", field="structured_outputs")
        if "broken" in params.regex:
            raise RuntimeError("the compiler has a bug")
        return FakeGrammar(params.regex)


class FakeGrammar:
    def __init__(self, regex: str) -> None:
        self.regex = regex

    def new_matcher(self) -> FakeMatcher:
        return FakeMatcher(self.regex)


class FakeMatcher:
    """Allows five tokens at a time, forces some now and then, and ends in its own time."""

    def __init__(self, regex: str) -> None:
        self.regex = regex
        self.token_ids: list[int] = []
        self.ended = False

    @property
    def is_terminated(self) -> bool:
        return self.ended or self._draw("end") % 23 == 0

    def allowed(self) -> list[int]:
        """The tokens that may come next, the end token among them where it may end."""
        if self.is_terminated:
            return [EOS_TOKEN_ID]
        first = self._draw("allowed")
        tokens = [(first + 101 * i) % EOS_TOKEN_ID for i in range(NUM_ALLOWED)]
        return [*tokens, EOS_TOKEN_ID] if first % 3 == 0 else tokens

    def bitmask(self) -> bytes:
        if "fill" in self.regex and len(self.token_ids) >= 3:
            raise RuntimeError("the matcher can't fill its mask")
        mask = bytearray(BITMASK_BYTES)
        for token_id in self.allowed():
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if "complex" in self.regex and len(self.token_ids) >= 3:
                raise InvalidRequestError("it is too complex.", field="structured_outputs")
            if "accept" in self.regex and len(self.token_ids) >= 3:
                raise RuntimeError("the matcher can't go on")
            if token_id not in self.allowed():
                raise ValueError(f"token {token_id} is not allowed after {self.token_ids}")
            self.ended |= token_id == EOS_TOKEN_ID
            self.token_ids.append(token_id)

    def take_forced_tokens(self) -> list[int]:
        """Some tokens in a row, a quarter of the time."""
        if self.is_terminated or self._draw("forced") % 4:
            return []
        forced: list[int] = []
        for _ in range(1 + self._draw("count") % 7):
            if self.is_terminated:
                break
            token_id = self.allowed()[0]
            self.accept_tokens([token_id])
            forced.append(token_id)
        return forced

    def _draw(self, what: str) -> int:
        text = f"{self.regex.split()[0]} {what} {self.token_ids}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
