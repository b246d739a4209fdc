"""Copies of whole blocks between caches."""

from __future__ import annotations

from octavo_kernels.cpu.jit import jit
from octavo_kernels.cpu.simd import load_f32x8, load_i64, load_u8, store_f32x8, store_i8
from octavo_kernels.cpu.team import next_chunk

PIECE = 1 << 15
"""Bytes that a thread copies at a time."""


@jit
def copy_pairs(
    thread: int, source: int, target: int, block_bytes: int, pairs: int, num_pairs: int
) -> None:
    """Copy blocks from one address to another, by pairs of int64 block ids."""
    pieces = (block_bytes + PIECE - 1) // PIECE
    chunk = next_chunk(thread)
    while chunk < num_pairs * pieces:
        pair, first = pairs + chunk // pieces * 16, chunk % pieces * PIECE
        from_at = source + load_i64(pair) * block_bytes + first
        to_at = target + load_i64(pair + 8) * block_bytes + first
        count = min(PIECE, block_bytes - first)
        whole = count // 32 * 32
        for i in range(0, whole, 32):
            store_f32x8(to_at + i, load_f32x8(from_at + i))
        for i in range(whole, count):
            store_i8(to_at + i, load_u8(from_at + i))
        chunk = next_chunk(thread)
