"""A model's vocabulary, as the grammar library needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import llguidance

from octavo_core.errors import InvalidRequestError
from octavo_core.model_spec import ModelSpec
from octavo_server.tokenizer import Tokenizer

# What a JSON number is written with.
_NUMBER_STARTS = tuple(bytes([byte]) for byte in b"0123456789.eE+-")


class GrammarVocabulary:
    """Token ids and their bytes, and the library's index of them.

    Args:
        tokens: For each id the bytes that it adds to a text; empty for those without a text.
        special_ids: Control tokens, which no text of a grammar ever means.
        end_ids: Tokens that end an answer.
        encode: Tokenizes a text that must come next; the tokens must have its bytes.

    Attributes:
        index: The library's tokenizer.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        end_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.end_ids = tuple(end_ids)
        wrapper = _Wrapper(tokens, special_ids, self.end_ids[0], encode)
        # Without the library's "slices" a mask takes 94 us on average and not 69, but the index is
        # built in 0.1 s and not 0.2 (49,152 tokens), which nobody else in the process can run in.
        self.index = llguidance.LLTokenizer(
            wrapper, n_vocab=len(tokens), eos_token=list(self.end_ids), slices=[]
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of a mask: a bit for each token, in words of 32."""
        return -(-len(self.tokens) // 32) * 4

    @cached_property
    def number_mask(self) -> int:
        """Bits of the tokens that may continue a JSON number."""
        number_ids = (i for i, token in enumerate(self.tokens) if token.startswith(_NUMBER_STARTS))
        return int.from_bytes(self._mask(number_ids), "little")

    @cached_property
    def free_mask(self) -> bytes:
        """A mask that allows everything but to end."""
        ends = frozenset(self.end_ids)
        return self._mask(i for i in range(len(self.tokens)) if i not in ends)

    def _mask(self, token_ids: Iterable[int]) -> bytes:
        mask = bytearray(self.num_bytes)
        for token_id in token_ids:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)


class _Wrapper(llguidance.TokenizerWrapper):
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        end_id: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = list(special_ids)
        self.eos_token_id = end_id
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


def model_vocabulary(tokenizer: Tokenizer, spec: ModelSpec) -> GrammarVocabulary:
    """Return the vocabulary of a model.

    Ids that only one of the logits and the tokenizer has are left out, and so never allowed.

    Raises:
        InvalidRequestError: The model has no end token, so that no answer could end.
    """
    size = min(tokenizer.vocab_size, spec.vocab_size)
    ids = dict.fromkeys((*spec.eos_token_ids, *tokenizer.eos_token_ids))
    end_ids = [token_id for token_id in ids if 0 <= token_id < size]
    if not end_ids:
        raise InvalidRequestError(
            "this model has no end-of-sequence token, which structured output needs.",
            field="structured_outputs",
        )
    tokens = [tokenizer.token_bytes(token_id) or b"" for token_id in range(size)]
    special_ids = [token_id for token_id in tokenizer.special_tokens.values() if token_id < size]
    return GrammarVocabulary(
        tokens, special_ids, end_ids, _TextEncoder(tokenizer, tokens, special_ids)
    )


def byte_vocabulary() -> GrammarVocabulary:
    """Return a vocabulary of the 256 bytes, good enough to see what a grammar costs."""
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return GrammarVocabulary(tokens, [256], [256], lambda text: list(text.encode()))


class _TextEncoder:
    """Tokenizes pieces of text, such that the tokens have the bytes of the text and no others.

    Args:
        tokenizer: The model's tokenizer.
        tokens: Bytes of each token.
        special_ids: Control tokens, which stand for no text.
    """

    # Byte 2, which no text has. Tokenizers that put a space in front of every text put it in front
    # of this, and it is a token of its own.
    _GUARD = "\x02"

    def __init__(
        self, tokenizer: Tokenizer, tokens: Sequence[bytes], special_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        special = frozenset(special_ids)
        self._by_bytes: dict[bytes, int] = {}
        for token_id, token in enumerate(tokens):
            if token_id not in special:
                self._by_bytes.setdefault(token, token_id)
        self._longest = max(map(len, tokens))

    def __call__(self, text: str) -> list[int]:
        data = text.encode()
        for found in (self._encode(text), self._encode_behind_guard(text)):
            if self._spells(found, data):
                return found
        return self._encode_greedily(data)

    def _encode(self, text: str) -> list[int]:
        # The tokenizer without its added tokens is another one, built when it is needed first.
        if any(token in text for token in self._tokenizer.added_tokens):
            return self._tokenizer.encode_plain(text)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_behind_guard(self, text: str) -> list[int]:
        found = self._encode(self._GUARD + text)
        guard = self._by_bytes.get(self._GUARD.encode())
        return found[found.index(guard) + 1 :] if guard in found else []

    def _encode_greedily(self, data: bytes) -> list[int]:
        found: list[int] = []
        while data:
            for length in range(min(self._longest, len(data)), 0, -1):
                token_id = self._by_bytes.get(data[:length])
                if token_id is not None:
                    found.append(token_id)
                    break
            else:
                return found  # a byte that no token has
            data = data[length:]
        return found

    def _spells(self, token_ids: list[int], data: bytes) -> bool:
        size = len(self._tokens)
        if any(token_id >= size for token_id in token_ids):
            return False
        return b"".join(self._tokens[token_id] for token_id in token_ids) == data
