"""One face for every tokenizer."""

from __future__ import annotations

from pathlib import Path


class Tokenizer:
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes | None:
        raise NotImplementedError

    def is_special(self, token_id: int) -> bool:
        raise NotImplementedError


def load_tokenizer(path: str | Path) -> Tokenizer:
    raise NotImplementedError
