"""Triton kernel that copies whole blocks of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.launch import next_power_of_2, on_device_of

# Words of a program: 8 of 8 bytes for each of 128 threads.
WORDS = 1024

_WORD_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def copy_blocks(caches: Sequence[Tensor], block_pairs: Tensor) -> None:
    """Copy blocks within each cache; see `octavo_kernels.copy_blocks`.

    Args:
        caches: Tensors of ``[num_blocks, ...]``, contiguous, all on one device.
        block_pairs: ``[num_pairs, 2]`` int64 on the host, source and destination.
    """
    if block_pairs.numel() == 0 or not caches:
        return
    pairs = block_pairs.to(caches[0].device, non_blocking=True)
    for cache in caches:
        _launch(cache, cache, pairs)


def swap_blocks(source: Tensor, destination: Tensor, block_pairs: Tensor) -> None:
    """Copy blocks between two caches of one device; see `octavo_kernels.swap_blocks`.

    Args:
        source: ``[num_source_blocks, ...]``, contiguous.
        destination: ``[num_destination_blocks, ...]``, contiguous.
        block_pairs: ``[num_pairs, 2]`` int64 on the host, source and destination.
    """
    if block_pairs.numel() > 0:
        _launch(source, destination, block_pairs.to(source.device, non_blocking=True))


def _launch(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    block_bytes = source[0].numel() * source.itemsize
    word = next(size for size in _WORD_TYPES if block_bytes % size == 0)
    num_words = block_bytes // word
    if num_words == 0:
        return
    block = min(WORDS, next_power_of_2(num_words))
    words = [cache.view(len(cache), -1).view(_WORD_TYPES[word]) for cache in (source, destination)]
    with on_device_of(source):
        _copy[(len(pairs), -(-num_words // block))](
            *words, pairs, num_words, BLOCK=block, num_warps=max(1, block // 256)
        )


@triton.jit
def _copy(source, destination, pairs, num_words, BLOCK: tl.constexpr):
    """One program copies one part of one block."""
    pair = tl.program_id(0).to(tl.int64)
    from_block = tl.load(pairs + 2 * pair)
    to_block = tl.load(pairs + 2 * pair + 1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    words = tl.load(source + from_block * num_words + at, mask=inside)
    tl.store(destination + to_block * num_words + at, words, mask=inside)
