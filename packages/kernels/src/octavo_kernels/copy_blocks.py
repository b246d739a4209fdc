"""Copy whole blocks within the KV caches of a device, or between two devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.dispatch import use_cpu

copy_pairs = Kernel("block_copy.copy_pairs", "qqqqq")


def copy_blocks(caches: Sequence[Tensor], block_pairs: Tensor) -> None:
    """Copy blocks of each cache to other blocks of the same cache, in place.

    Args:
        caches: Tensors of ``[num_blocks, ...]``, contiguous: keys, values and scales of any
            number of layers.
        block_pairs: ``[num_pairs, 2]`` int64 on the host, source and destination ids. No
            block may be a destination twice, or be both source and destination.

    Raises:
        ValueError: A pair names a block that a cache doesn't have.
    """
    for cache in caches:
        swap_blocks(cache, cache, block_pairs)


def swap_blocks(source: Tensor, destination: Tensor, block_pairs: Tensor) -> None:
    """Copy blocks of one cache to blocks of another, on the same device or on two.

    Args:
        source: ``[num_source_blocks, ...]``, contiguous.
        destination: ``[num_destination_blocks, ...]``, contiguous, of the same type and with
            blocks of the same shape. If it is in page-locked host memory or `source` is, the
            copy may still run when this returns; later work on the device waits for it.
        block_pairs: ``[num_pairs, 2]`` int64 on the host, source and destination ids. No
            block may be a destination twice.

    Raises:
        ValueError: The blocks differ in shape or type, or a pair names a block that is not
            there.
    """
    _check(source, destination, block_pairs)
    if use_cpu(source, destination) and block_pairs.numel():
        block_bytes = source.stride(0) * source.element_size()
        block_pairs = block_pairs.contiguous()
        copy_pairs(
            source.data_ptr(),
            destination.data_ptr(),
            block_bytes,
            block_pairs.data_ptr(),
            len(block_pairs),
        )
        return
    swap_blocks_reference(source, destination, block_pairs)


def swap_blocks_reference(source: Tensor, destination: Tensor, block_pairs: Tensor) -> None:
    """Do the same in plain torch, one copy for each run of consecutive pairs."""
    for from_block, to_block, count in consecutive_runs(block_pairs):
        destination[to_block : to_block + count].copy_(
            source[from_block : from_block + count], non_blocking=True
        )


def consecutive_runs(block_pairs: Tensor) -> list[tuple[int, int, int]]:
    """Join pairs whose source and destination both follow those of the pair before.

    Returns:
        First source block, first destination block and number of blocks of each run. Blocks
        are handed out in order, so a swapped request is often one run, and one copy in place
        of one for each block.
    """
    runs: list[tuple[int, int, int]] = []
    for from_block, to_block in block_pairs.tolist():
        if runs:
            first_from, first_to, count = runs[-1]
            if from_block == first_from + count and to_block == first_to + count:
                runs[-1] = (first_from, first_to, count + 1)
                continue
        runs.append((from_block, to_block, 1))
    return runs


def _check(source: Tensor, destination: Tensor, block_pairs: Tensor) -> None:
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise ValueError(
            f"blocks of {source.dtype} {list(source.shape[1:])} can't be copied to "
            f"{destination.dtype} {list(destination.shape[1:])}"
        )
    if block_pairs.numel() == 0:
        return
    if block_pairs.dim() != 2 or block_pairs.shape[1] != 2 or block_pairs.dtype != torch.int64:
        raise ValueError(
            f"block_pairs must be int64 of [num_pairs, 2], not {block_pairs.dtype} of "
            f"{list(block_pairs.shape)}"
        )
    lowest, highest = block_pairs.amin(0).tolist(), block_pairs.amax(0).tolist()
    for name, cache, low, high in zip(
        ("source", "destination"), (source, destination), lowest, highest, strict=True
    ):
        if low < 0 or high >= len(cache):
            raise ValueError(f"{name} has blocks 0 to {len(cache) - 1}, not {low} to {high}")
