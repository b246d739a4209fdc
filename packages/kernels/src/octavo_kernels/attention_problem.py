"""One call of the CPU kernels of attention, as the words in memory that they read.

`octavo_kernels.cpu.attention_plan` says what each word is; it is not imported here, since it
imports numba.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads

TILE, SEGMENT = 64, 256
TOKEN_BYTES, UNIT_BYTES = 32, 48
TILE_ROWS = 48
"""Query rows of a unit in a prefill: enough to pay for the float32 copies of keys and values,
few enough that their scores and results stay in a cache of 256 KiB beside them."""

SPLIT_BELOW = 16
"""Fewer tasks than this are cut into segments: two threads then wait for each other at the end
for a sixteenth of the time at most."""

NO_WINDOW = 1 << 40

PROBLEM_FORMAT = struct.Struct("<26q f4x f4x 2q")
PROBLEM_WORDS = PROBLEM_FORMAT.size // 8

plan_units = Kernel("attention_plan.plan", "q")
attend = {
    torch.float32: Kernel("attention.attend_f32", "q"),
    torch.bfloat16: Kernel("attention.attend_bf16", "q"),
    torch.float16: Kernel("attention.attend_f16", "q"),
    torch.int8: Kernel("attention.attend_int8", "q"),
    torch.float8_e4m3fn: Kernel("attention.attend_e4m3", "q"),
    torch.float8_e5m2: Kernel("attention.attend_e5m2", "q"),
}
"""The kernel for each type of cache; its argument is the address of a problem."""


@dataclass(frozen=True)
class AttentionPlan:
    """How the work of one step divides: the same for all layers of one kind of attention.

    Attributes:
        tokens: ``[num_words]`` int64, written by `plan_units`.
        units: Likewise.
        num_units: How many of them there are.
        max_rows: Query rows of the largest unit.
        is_split: Whether a unit is one segment.
    """

    tokens: Tensor
    units: Tensor
    num_units: int
    max_rows: int
    is_split: bool


class AttentionProblem:
    """The words of one call, and the memory that they point to.

    Args:
        query: ``[num_tokens, num_heads, head_dim]`` float32, contiguous.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous.
        value_cache: Like `key_cache`; its positions may lie further apart than they are
            long, as long as all are equally far from the next.
        metadata: How the tokens divide into requests.
        scale: Factor of the scores.
        window: Positions that a token sees.
        soft_cap: Bound of the scores.
        sinks: ``[num_heads]`` float32, contiguous.
        key_scale: ``[num_blocks, num_kv_heads, block_size]`` float32, contiguous.
        value_scale: Like `key_scale`.

    Attributes:
        address: Of the words: the argument of `attend`.
        output: ``[num_tokens, num_heads, value_head_dim]`` float32, filled by `attend`.
    """

    def __init__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> None:
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, block_size, value_dim = value_cache.shape[1:]
        plan = plan_attention(metadata, num_tokens, num_heads, num_kv_heads, window)
        self.output = torch.empty(num_tokens, num_heads, value_dim)
        state_bytes = plan.max_rows * (value_dim + 2) * 4
        scratch_bytes = thread_scratch_bytes(plan.max_rows, head_dim, value_dim)
        partial_bytes = plan.num_units * state_bytes if plan.is_split else 0
        num_threads = get_num_threads()
        scratch = torch.empty(num_threads * scratch_bytes + partial_bytes, dtype=torch.uint8)
        self.words = torch.empty(PROBLEM_WORDS, dtype=torch.int64)
        self.address = self.words.data_ptr()
        # Everything that the words point to lives as long as they do.
        self._owned = (query, plan, scratch, sinks)
        PROBLEM_FORMAT.pack_into(
            self.words.numpy().data,
            0,
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            self.output.data_ptr(),
            _address(key_scale),
            _address(value_scale),
            _address(sinks),
            metadata.query_start_loc.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.block_tables.data_ptr(),
            0,  # the rows of the block tables are the requests'
            plan.tokens.data_ptr(),
            plan.units.data_ptr(),
            scratch.data_ptr(),
            scratch.data_ptr() + num_threads * scratch_bytes,
            plan.num_units,
            len(metadata.host_seq_lens),
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            block_size,
            metadata.block_tables.stride(0),
            value_cache.stride(2),
            window or NO_WINDOW,
            plan.max_rows,
            scale,
            soft_cap or 0.0,
            plan.is_split,
            scratch_bytes,
        )


def plan_attention(
    metadata: AttentionMetadata,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
) -> AttentionPlan:
    """Divide a step's attention into units, once for all layers of its kind."""
    key = ("cpu attention", num_heads, num_kv_heads, window)
    found = metadata.plans.get(key)
    if isinstance(found, AttentionPlan):
        return found
    num_rows, longest = len(metadata.host_seq_lens), max(metadata.host_seq_lens, default=0)
    max_rows, is_split, most_units = divide(num_tokens, num_rows, longest, num_heads, num_kv_heads)
    tokens = torch.empty(num_tokens * TOKEN_BYTES // 8, dtype=torch.int64)
    units = torch.empty(most_units * UNIT_BYTES // 8, dtype=torch.int64)
    words = [0] * 26
    words[7:10] = (
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.block_tables.data_ptr(),
    )
    words[11:13] = (tokens.data_ptr(), units.data_ptr())
    words[16:19] = (num_rows, num_heads, num_kv_heads)
    words[21:23] = (metadata.block_size, metadata.block_tables.stride(0))
    words[24:26] = (window or NO_WINDOW, max_rows)
    problem = bytearray(PROBLEM_FORMAT.pack(*words, 0.0, 0.0, is_split, 0))
    view = torch.frombuffer(problem, dtype=torch.int64)
    plan_units.alone(view.data_ptr())
    plan = AttentionPlan(tokens, units, int(view[15]), int(view[25]), is_split)
    metadata.plans[key] = plan
    return plan


def thread_scratch_bytes(max_rows: int, head_dim: int, value_dim: int) -> int:
    """Bytes that each thread needs for itself."""
    floats = 2 * max_rows * (value_dim + 2) + max_rows * head_dim
    floats += (max_rows + 4) * TILE + TILE * (head_dim + value_dim)
    return -(-4 * floats // 64) * 64  # a cache line has one owner


class Division(NamedTuple):
    """How finely a step's attention is divided into units.

    Attributes:
        max_rows: Query rows of the largest unit.
        is_split: Whether a unit is one segment.
        most_units: More units than this there can't be.
    """

    max_rows: int
    is_split: bool
    most_units: int


def divide(
    num_tokens: int, num_rows: int, longest: int, num_heads: int, num_kv_heads: int
) -> Division:
    """Choose it from a step's tokens and requests, and the longest of these."""
    group = num_heads // num_kv_heads
    decode_only = num_tokens <= num_rows
    tokens_of_unit = max(TILE_ROWS // group, 1)
    most_tasks = (num_tokens // tokens_of_unit + num_rows) * num_kv_heads
    if decode_only:
        tokens_of_unit = min(tokens_of_unit, num_rows)
        most_tasks = num_rows * num_kv_heads
    is_split = most_tasks < SPLIT_BELOW and longest > SEGMENT
    most_units = most_tasks * (longest // SEGMENT + 1) if is_split else most_tasks
    return Division(tokens_of_unit * group, is_split, most_units)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
