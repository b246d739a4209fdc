"""Tile shapes, warps and pipeline stages of every kernel, by architecture, with the reasons.

Nothing is tuned at run time: a search costs seconds at the first request of each shape, makes
results depend on timing, and can't run while a graph is captured. The shapes follow from the
sizes of the machine, and the cross-compilation test holds each of them to no spilled register
and to the shared memory of its architecture:

============ ============== =============== ======================================================
architecture shared memory  registers       what decides
============ ============== =============== ======================================================
sm_80        163 KiB (99)   64 K            no wgmma: accumulators and operands share registers,
                                            so wide heads take fewer keys a tile than on sm_90.
                                            Tiles stay below 99 KiB for sm_86 and sm_89
sm_90        227 KiB        64 K            wgmma reads operands from shared memory: 64 rows or
                                            more feed it, and more stages hide the longer latency
gfx942       64 KiB         128 K           waves of 64 threads, so half the warps for the same
                                            threads; one tile in flight, since a second would take
                                            half of the shared memory
============ ============== =============== ======================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ARCHITECTURES = ("sm_80", "sm_90", "gfx942")
"""Architectures with tiles of their own. Others take those of the nearest, see `architecture`."""

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program may use."""

NUM_SEGMENTS = 16
"""Parts into which a decode row's keys are split.

16 parts of one sequence with 8 KV heads are 128 programs, about one for each of 108 to 132
multiprocessors; more parts only add to the reduction (arXiv 2511.11581 found 16 best as well).
"""


@dataclass(frozen=True)
class Tile:
    """What a launch is compiled with.

    Attributes:
        rows: Rows of the accumulator, BLOCK_M.
        columns: Columns of the scores or of the output, BLOCK_N.
        depth: Numbers of the contracted dimension in one step, BLOCK_K; 0 where a kernel has none.
        num_warps: Warps (waves) of a program.
        num_stages: Tiles of the inner loop in flight.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """What Triton's compiler takes beside the shapes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def architecture() -> str:
    """Return which of `ARCHITECTURES` fits the current device.

    Under Triton's interpreter there is no device, and the tiles of sm_90 are as good as any.
    """
    import triton

    if triton.knobs.runtime.interpret:
        return "sm_90"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    # 12.x (consumer Blackwell) has the shared memory and the instructions of 8.x, not of 9.0.
    return "sm_90" if 90 <= int(target.arch) < 120 else "sm_80"


def has_fp8_e4m3() -> bool:
    """Whether Triton converts to and from float8_e4m3fn there.

    sm_80 has no such instruction and gfx942 another format of the same name (e4m3fnuz). The
    kernels convert in integers where this is False.
    """
    import triton

    if triton.knobs.runtime.interpret:
        return True
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= 89


def num_multiprocessors(device: torch.device) -> int:
    """Return how many programs run at once, at one each; 132 where there is no device."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def element_block(num_elements: int) -> tuple[int, int]:
    """Return the columns and warps of a program that reads one row of `num_elements` at once.

    A row is kept in registers and read once. 8 numbers a thread are a 16-byte load of bfloat16;
    more than 16 warps find no registers for rows of 16,384.
    """
    block = max(16, 1 << (num_elements - 1).bit_length())
    return block, min(16, max(1, block // 512))


def prefill_attention(target: str, head_dim: int, item_size: int, cache_item_size: int) -> Tile:
    """Return the tile of attention with several query tokens.

    Args:
        target: One of `ARCHITECTURES`.
        head_dim: Padded to a power of two.
        item_size: Bytes of a number of the query.
        cache_item_size: Bytes of a number of the cache.
    """
    if item_size == 4:
        # Exact float32 products don't use tensor cores: small tiles, which is all registers hold.
        return Tile(16, 32 if head_dim <= 64 else 16, 0, 4, 1)
    if target == "gfx942":
        return Tile(64, 64 if head_dim <= 128 else 32, 0, 4, 1)
    if cache_item_size == 1 and target == "sm_80":
        # Numbers of 8 bits are widened in registers: with 64 rows of 256, 64 bytes spill.
        return Tile(64, 32, 0, 8, 2) if head_dim <= 128 else Tile(32, 32, 0, 8, 2)
    if head_dim <= 64:
        # 4 warps of sm_80 would spill 64 bytes.
        return Tile(128, 64, 0, 4, 3) if target == "sm_90" else Tile(128, 64, 0, 8, 3)
    if head_dim <= 128:
        return Tile(128, 64, 0, 8, 2) if target == "sm_90" else Tile(64, 32, 0, 4, 2)
    return Tile(64, 32, 0, 8, 2)


def decode_attention(target: str, head_dim: int, item_size: int, group: int) -> Tile:
    """Return the tile of attention with one query token a row.

    The rows are the query heads of one KV head, padded to the 16 that a matrix product needs.
    Keys are read once, so the tile only has to keep enough bytes in flight: 64 keys of 128 in
    bfloat16, K and V, 3 stages, are 96 KiB a multiprocessor.
    """
    rows = max(16, 1 << (group - 1).bit_length())
    if item_size == 4:
        return Tile(rows, 32 if head_dim <= 64 else 16, 0, 4, 1)
    if target == "gfx942":
        return Tile(rows, 64 if head_dim <= 128 else 32, 0, 2, 1)
    columns = 64 if head_dim <= 128 else 32
    return Tile(rows, columns, 0, 4, 3 if target == "sm_90" and head_dim <= 128 else 2)


def latent_attention(target: str, item_size: int) -> Tile:
    """Return the tile of latent attention: 16 heads, and latents of 576 numbers.

    The accumulator of 16 x 512 float32 is 64 registers for each of 128 threads, so warps are
    more than for other decodes; 32 latents are 36 KiB of shared memory.
    """
    if item_size == 4:
        return Tile(16, 16, 0, 8, 1)
    if target == "gfx942":
        return Tile(16, 16, 0, 4, 1)
    return Tile(16, 32, 0, 8, 2 if target == "sm_90" else 1)


def matmul(target: str, num_tokens: int, item_size: int, batch_invariant: bool = False) -> Tile:
    """Return the tile of ``x @ weight.T``, for dense, packed and grouped weights.

    Up to 16 tokens a product only reads its weights: 16 rows, narrow columns, so that a layer
    of 4,096 rows makes 128 programs, and deep tiles for long runs of memory. From there on the
    tile grows with what there is to reuse. Batch-invariant products take one tile for all.

    Args:
        target: One of `ARCHITECTURES`.
        num_tokens: Rows of `x`.
        item_size: Bytes of a number of `x`.
        batch_invariant: Whether a row's bits may not depend on the number of rows.
    """
    if item_size == 4:
        return Tile(16, 32, 32, 4, 1)
    stages = {"sm_80": 3, "sm_90": 4, "gfx942": 2}[target]
    if num_tokens <= 16 and not batch_invariant:
        return Tile(16, 32, 128, 4, stages)
    if num_tokens <= 64 or batch_invariant:
        return Tile(64, 64, 64, 4, stages)
    if target == "gfx942":
        return Tile(128, 128, 32, 8, stages)
    return Tile(128, 128, 64, 8, 3)
