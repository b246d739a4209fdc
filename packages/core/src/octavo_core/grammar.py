"""What the engine needs of structured output: grammars, and matchers that follow an answer.

A `Grammar` is a compiled constraint, shared by all requests with the same one. A
`GrammarMatcher` follows one request's answer through it, token by token. The engine keeps it
exactly where the request's known tokens are, so steps that are taken back leave it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo_core.structured_outputs import StructuredOutputsParams


class GrammarMatcher(Protocol):
    """One answer's place in a grammar.

    Any method may raise, whatever it likes: its request then fails, and no other. A `UserError`
    says that the constraint is at fault.
    """

    @property
    def is_terminated(self) -> bool:
        """True once the answer is complete and nothing may follow but its end."""
        ...

    def bitmask(self) -> bytes:
        """Return the tokens that may come next.

        Returns:
            ``[ceil(vocab_size / 32)]`` int32, little-endian: bit ``i`` of word ``j``, counted
            from the lowest, is token ``32 j + i``. An end token's bit is set only if the answer
            may end here. At least one bit is set.
        """
        ...

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Move on by tokens of the answer.

        Raises:
            ValueError: A token is not allowed.
        """
        ...

    def take_forced_tokens(self) -> list[int]:
        """Move on by the tokens that must come next, and return them; most often there are none.

        They are a function of the tokens accepted so far, so that an answer is the same
        whenever it is resumed.
        """
        ...


class Grammar(Protocol):
    """A compiled constraint."""

    def new_matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of an answer."""
        ...


class GrammarBackend(Protocol):
    """Compiles constraints for one model's vocabulary."""

    def prepare(self) -> None:
        """Do once, in any thread, what would make the first compilation slow."""
        ...

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a constraint, in any thread; it may take seconds.

        Raises:
            InvalidRequestError: The constraint is malformed or not supported; the message names
                the place.
        """
        ...
