"""The identity of a full KV block.

A block's K and V depend on its own tokens, on all tokens before them, and on extra
keys: the adapter, a cache salt, the contents that placeholder tokens stand for. So its
hash covers the parent's hash, its token ids and the extra keys. SHA-256, because
whoever finds a collision reads another's cache.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from octavo_core.request import Request

ROOT_HASH = hashlib.sha256(b"octavo prefix cache 1").digest()

ExtraKey = tuple[str, str] | tuple[str, str, int]
"""A tag, a value, and for media the place. The tag keeps an adapter "x" and a salt "x" apart."""

_HASH_BYTES = 32
_encode = msgspec.msgpack.Encoder().encode


def hash_block(
    parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()
) -> bytes:
    """Hash one full block.

    Args:
        parent: Hash of the block before it, or `ROOT_HASH`.
        token_ids: The ``block_size`` tokens of the block.
        extra_keys: What else its K and V depend on.

    Returns:
        32 bytes. Equal only for equal inputs: the parent's length is fixed, the
        number of tokens is written first, and the extra keys end the message.
    """
    num_tokens = len(token_ids)
    message = _packer(num_tokens)(parent, num_tokens, *token_ids) + _encoded(extra_keys)
    return hashlib.sha256(message).digest()


def _encoded(extra_keys: Sequence[ExtraKey]) -> bytes:
    return _encode(extra_keys) if extra_keys else b""


@cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    return struct.Struct(f"={_HASH_BYTES}s{num_tokens + 1}I").pack


def extend_block_hashes(request: Request, block_size: int, num_blocks: int) -> None:
    """Make sure that ``request.block_hashes`` covers its first `num_blocks` full blocks."""
    hashes, token_ids, media = request.block_hashes, request.token_ids, request.media
    parent = hashes[-1] if hashes else ROOT_HASH
    pack, sha256 = _packer(block_size), hashlib.sha256
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        end = start + block_size
        # As hash_block, in place, since a decode does this for each block: 3 us to 2.
        message = pack(parent, block_size, *token_ids[start:end])
        # Most blocks have no extra keys, and need not be asked for them.
        if start == 0 or media:
            message += _encoded(extra_keys(request, start, end))
        parent = sha256(message).digest()
        hashes.append(parent)


def extra_keys(request: Request, start: int, end: int) -> list[ExtraKey]:
    """Return what the block of the tokens from `start` to `end` depends on beside tokens."""
    keys: list[ExtraKey] = []
    if start == 0:  # enough for what holds for a whole request: later hashes include the first
        if request.adapter is not None:
            keys.append(("adapter", request.adapter))
        if request.cache_salt is not None:
            keys.append(("cache_salt", request.cache_salt))
    for span in request.media:
        if span.start < end and start < span.start + span.length:
            keys.append(("media", span.digest, span.start - start))
    return keys
