"""The identity of a full KV block.

A block's K and V depend on its own tokens, on all tokens before them, and on extra
keys such as a cache salt. So its hash covers the parent's hash, its token ids and
the extra keys. SHA-256, because whoever finds a collision reads another's cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from octavo_core.request import Request

ROOT_HASH = hashlib.sha256(b"octavo prefix cache 1").digest()

_encode = msgspec.msgpack.Encoder().encode


def hash_block(
    parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[tuple[str, str]] = ()
) -> bytes:
    """Hash one full block.

    Args:
        parent: Hash of the block before it, or `ROOT_HASH`.
        token_ids: The ``block_size`` tokens of the block.
        extra_keys: Pairs of tag and value. The tag keeps an adapter named "x" apart
            from a cache salt "x".

    Returns:
        32 bytes. Equal only for equal inputs: the parent's length is fixed, the
        number of tokens is written first, and the extra keys end the message.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("I", (len(token_ids), *token_ids)).tobytes())
    if extra_keys:
        digest.update(_encode(extra_keys))
    return digest.digest()


def extend_block_hashes(request: Request, block_size: int, num_blocks: int) -> None:
    """Make sure that ``request.block_hashes`` covers its first `num_blocks` full blocks."""
    hashes = request.block_hashes
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else ROOT_HASH
        start = index * block_size
        hashes.append(
            hash_block(
                parent,
                request.token_ids[start : start + block_size],
                _extra_keys(request, index),
            )
        )


def _extra_keys(request: Request, index: int) -> tuple[tuple[str, str], ...]:
    # The first block is enough for a salt: later hashes include the first one's.
    if index == 0 and request.cache_salt is not None:
        return (("cache_salt", request.cache_salt),)
    return ()
