"""Triton kernels of causal attention over the paged KV cache.

Rows of a tile are (query token, query head of one KV head), so that a key is read once for all
heads that share it ("The Anatomy of a Triton Attention Kernel", arXiv 2511.11581). Softmax runs
along the keys with a running maximum (Milakov and Gimelshein 2018, arXiv 1805.02867); a decode
row is cut into segments of keys that are reduced together at the end (as in Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Both grids depend on the shapes of the
tensors only, never on lengths, so that a captured graph stays right for other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.triton import tiles
from octavo_kernels.triton.fp8 import FP8_BITS, INT8, decode_e4m3
from octavo_kernels.triton.launch import next_power_of_2, on_device_of, with_dense_rows
from octavo_kernels.triton.search import block_owner
from octavo_kernels.triton.write_kv_cache import as_kernels_see

# exp(x) = exp2(x * log2(e)), and exp2 is what a GPU computes.
LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
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
    batch_invariant: bool = False,
) -> Tensor:
    """Attend from each token to its request's tokens; see `octavo_kernels.paged_attention`.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        value_cache: ``[num_blocks, num_kv_heads, block_size, value_head_dim]``.
        metadata: How the tokens divide into requests.
        scale: Factor of the scores.
        window: A token sees this many tokens, itself included; none for all.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; none leaves them.
        sinks: ``[num_heads]``, a score that takes part in the softmax and has no value.
        key_scale: ``[num_blocks, num_kv_heads, block_size]`` float32, contiguous, to multiply
            the keys of an 8-bit cache with.
        value_scale: Like `key_scale`.
        batch_invariant: Reduce every token's keys in one order and with one tile, so that its
            bits are the same in a decode, in a prefill and in a chunk of any size, whatever
            runs beside it. Long decodes of few requests are slower, since keys aren't split.

    Returns:
        ``[num_tokens, num_heads, value_head_dim]``, of the type of `query`.
    """
    shape = (*query.shape[:2], value_cache.shape[-1])
    output = torch.empty(shape, dtype=query.dtype, device=query.device)
    if query.shape[0] == 0 or len(metadata.host_seq_lens) == 0:
        return output
    kind, key_cache, value_cache = as_kernels_see(key_cache, value_cache)
    call = _Call(
        with_dense_rows(query),
        key_cache,
        value_cache,
        metadata,
        output,
        scale,
        {"WINDOW": window or 0, "SOFT_CAP": soft_cap or 0.0, "KIND": kind},
        sinks,
        key_scale,
        value_scale,
    )
    with on_device_of(query):
        if call.splits() and not batch_invariant:
            _decode(call)
        else:
            _prefill(call)
    return output


@dataclass(frozen=True)
class _Call:
    """The arguments of `paged_attention`, and what both kernels take of them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    output: Tensor
    scale: float
    options: dict[str, Any]
    sinks: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None

    @property
    def num_reqs(self) -> int:
        """Rows of the batch, those that pad it included."""
        return self.metadata.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.key_cache.shape[1]

    @property
    def value_block(self) -> int:
        """Size of a value head, padded."""
        return max(16, next_power_of_2(self.value_cache.shape[3]))

    @property
    def key_block(self) -> int:
        """Size of a key head, padded: a matrix product takes no dimension below 16."""
        return max(16, next_power_of_2(self.key_cache.shape[3]))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What the kernels read, in their order."""
        metadata = self.metadata
        return (
            *(self.query, self.key_cache, self.value_cache, metadata.block_tables),
            *(metadata.query_start_loc, metadata.seq_lens),
            *(self.key_scale, self.value_scale, self.sinks),
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """Their strides, in the order of the kernels."""
        return (
            *(self.query.stride(0), self.query.stride(1)),
            *self.key_cache.stride()[:3],
            *self.value_cache.stride()[:3],
            self.metadata.block_tables.stride(0),
        )

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.key_cache.shape[3],
            "VALUE_DIM": self.value_cache.shape[3],
            "BLOCK_D": self.key_block,
            "BLOCK_V": self.value_block,
            "BLOCK_SIZE": self.key_cache.shape[2],
            **self.options,
        }

    def splits(self) -> bool:
        """Whether to cut keys into segments: one query token each, too few rows for a GPU.

        From two waves of programs on, segments only add their partial results to the traffic.
        """
        starts = self.metadata.host_query_start_loc
        if any(end - start > 1 for start, end in pairwise(starts)):
            return False
        return self.num_reqs * self.num_kv_heads < 2 * tiles.num_multiprocessors(self.query.device)


def _prefill(call: _Call) -> None:
    width = max(call.key_block, call.value_block)
    group = call.num_heads // call.num_kv_heads
    tile = tiles.prefill_attention(
        tiles.architecture(), width, call.query.itemsize, call.key_cache.itemsize
    )
    rows = max(tile.rows, next_power_of_2(group))
    # Each request adds at most one query block that is not full.
    num_blocks = call.query.shape[0] // (rows // group) + call.num_reqs
    _attend[(num_blocks, call.num_kv_heads)](
        *(*call.tensors, call.output, *call.strides),
        *(call.output.stride(0), call.output.stride(1), call.scale, call.num_reqs),
        **call.constants,
        BLOCK_M=rows,
        BLOCK_N=tile.columns,
        **tile.options,
    )


def _decode(call: _Call) -> None:
    segments, device = tiles.NUM_SEGMENTS, call.query.device
    width = max(call.key_block, call.value_block)
    group = call.num_heads // call.num_kv_heads
    tile = tiles.decode_attention(tiles.architecture(), width, call.query.itemsize, group)
    rows = (call.num_reqs, call.num_heads, segments)
    partial = torch.empty((*rows, call.value_block), dtype=torch.float32, device=device)
    # The maximum and the sum of each segment's softmax.
    state = torch.empty((2, *rows), dtype=torch.float32, device=device)
    _attend_segment[(call.num_reqs, call.num_kv_heads, segments)](
        *(*call.tensors, partial, state[0], state[1], *call.strides, call.scale),
        **call.constants,
        NUM_SEGMENTS=segments,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **tile.options,
    )
    reduce_segments[(call.num_reqs, call.num_heads)](
        *(partial, state[0], state[1], call.output, call.metadata.query_start_loc),
        *(call.output.stride(0), call.output.stride(1)),
        NUM_HEADS=call.num_heads,
        VALUE_DIM=call.value_cache.shape[3],
        BLOCK_V=call.value_block,
        NUM_SEGMENTS=segments,
        num_warps=4,
    )


@triton.jit
def _attend(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    key_scale,
    value_scale,
    sinks,
    output,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    table_stride,
    o_token_stride,
    o_head_stride,
    scale,
    num_reqs,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes one query block: BLOCK_Q tokens, all query heads of one KV head.

    The blocks of request ``r`` start at ``query_start_loc[r] // BLOCK_Q + r``, so the grid needs
    no list of blocks: a search in ``query_start_loc`` finds a program's request.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = block_owner(query_start_loc, query_block, num_reqs, BLOCK_Q)
    first_token = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - first_token
    start = (query_block - (first_token // BLOCK_Q + row)) * BLOCK_Q
    if start >= query_len:
        return
    seq_len = tl.load(seq_lens + row)
    context_len = seq_len - query_len

    index = tl.arange(0, BLOCK_M)
    token = start + index // GROUP  # [BLOCK_M], within the request
    head = kv_head * GROUP + index % GROUP
    # A group that is no power of two leaves rows over.
    in_rows = (token < query_len) & (index < BLOCK_Q * GROUP)
    at = tl.arange(0, BLOCK_D)
    q_at = (first_token + token).to(tl.int64) * q_token_stride + head * q_head_stride
    in_query = in_rows[:, None] & (at < HEAD_DIM)[None, :]
    q = tl.load(query + q_at[:, None] + at[None, :], mask=in_query, other=0.0)

    maximum, total, acc = _start(sinks, head, in_rows, 0, BLOCK_M, BLOCK_V)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(context_len + start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    end_key = tl.minimum(context_len + start + BLOCK_Q, seq_len)
    maximum, total, acc = _attend_range(
        q,
        maximum,
        total,
        acc,
        first_key,
        end_key,
        context_len + token,
        kv_head,
        block_tables + row.to(tl.int64) * table_stride,
        key_cache,
        value_cache,
        key_scale,
        value_scale,
        scale,
        k_block_stride,
        k_head_stride,
        k_slot_stride,
        v_block_stride,
        v_head_stride,
        v_slot_stride,
        NUM_KV_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        BLOCK_D,
        BLOCK_V,
        BLOCK_SIZE,
        WINDOW,
        SOFT_CAP,
        KIND,
        BLOCK_N,
    )
    attended = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = tl.arange(0, BLOCK_V)
    in_output = in_rows[:, None] & (at < VALUE_DIM)[None, :]
    o_at = (first_token + token).to(tl.int64) * o_token_stride + head * o_head_stride
    tl.store(
        output + o_at[:, None] + at[None, :], attended.to(output.dtype.element_ty), mask=in_output
    )


@triton.jit
def _attend_segment(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    key_scale,
    value_scale,
    sinks,
    partial,
    partial_maximum,
    partial_total,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    table_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program computes one segment of the keys of one decode row, for one KV head.

    ``partial`` is ``[num_reqs, num_heads, NUM_SEGMENTS, BLOCK_V]``, not yet divided by the sum.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) == token:
        return
    seq_len = tl.load(seq_lens + row)
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N
    # Segments are whole tiles; the last ones of a short row stay empty.
    tiles_each = tl.cdiv(tl.cdiv(seq_len, BLOCK_N) - first_tile, NUM_SEGMENTS)
    first_key = (first_tile + segment * tiles_each) * BLOCK_N
    end_key = tl.minimum(first_key + tiles_each * BLOCK_N, seq_len)

    index = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + index
    in_rows = index < GROUP
    at = tl.arange(0, BLOCK_D)
    in_query = in_rows[:, None] & (at < HEAD_DIM)[None, :]
    q_at = token.to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(query + q_at[:, None] + at[None, :], mask=in_query, other=0.0)

    maximum, total, acc = _start(sinks, head, in_rows, segment, BLOCK_M, BLOCK_V)
    maximum, total, acc = _attend_range(
        q,
        maximum,
        total,
        acc,
        first_key,
        end_key,
        index * 0 + (seq_len - 1),
        kv_head,
        block_tables + row.to(tl.int64) * table_stride,
        key_cache,
        value_cache,
        key_scale,
        value_scale,
        scale,
        k_block_stride,
        k_head_stride,
        k_slot_stride,
        v_block_stride,
        v_head_stride,
        v_slot_stride,
        NUM_KV_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        BLOCK_D,
        BLOCK_V,
        BLOCK_SIZE,
        WINDOW,
        SOFT_CAP,
        KIND,
        BLOCK_N,
    )
    state_at = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SEGMENTS + segment  # [BLOCK_M]
    at = tl.arange(0, BLOCK_V)
    tl.store(partial + state_at[:, None] * BLOCK_V + at[None, :], acc, mask=in_rows[:, None])
    tl.store(partial_maximum + state_at, maximum, mask=in_rows)
    tl.store(partial_total + state_at, total, mask=in_rows)


@triton.jit
def reduce_segments(
    partial,
    partial_maximum,
    partial_total,
    output,
    query_start_loc,
    o_token_stride,
    o_head_stride,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
):
    """One program joins the segments of one row and head.

    The token of row ``r`` is ``query_start_loc[r]`` if there is one, or ``r`` without that list.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = row
    if query_start_loc is not None:
        token = tl.load(query_start_loc + row)
        if tl.load(query_start_loc + row + 1) == token:
            return
    segment = tl.arange(0, NUM_SEGMENTS)
    at = tl.arange(0, BLOCK_V)
    state_at = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SEGMENTS + segment
    maximum = tl.load(partial_maximum + state_at)  # [NUM_SEGMENTS]
    total = tl.load(partial_total + state_at)
    largest = tl.max(maximum, 0)
    # A row without any key has no finite maximum; its segments weigh nothing.
    weight = tl.exp2(maximum - tl.where(largest == float("-inf"), 0.0, largest))
    acc = tl.load(partial + state_at[:, None] * BLOCK_V + at[None, :])
    divisor = tl.sum(weight * total, 0)
    attended = tl.sum(acc * weight[:, None], 0) / tl.where(divisor > 0.0, divisor, 1.0)
    o_at = token.to(tl.int64) * o_token_stride + head * o_head_stride
    tl.store(output + o_at + at, attended.to(output.dtype.element_ty), mask=at < VALUE_DIM)


@triton.jit
def _start(sinks, head, in_rows, segment, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the softmax state before the first key: a sink is a key that has been seen."""
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=in_rows, other=float("-inf")).to(tl.float32)
        # It counts once, in the first segment.
        maximum = tl.where(segment == 0, sink * LOG2_E, float("-inf"))
        total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    else:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    return maximum, total, acc


@triton.jit
def _attend_range(
    q,
    maximum,
    total,
    acc,
    first_key,
    end_key,
    position,
    kv_head,
    block_table,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    scale,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run over the keys ``[first_key, end_key)``, and return maximum, sum and values.

    Keys from `end_key` on are never loaded: they may be another request's, NaN and all.
    """
    key_at = tl.arange(0, BLOCK_D)
    value_at = tl.arange(0, BLOCK_V)
    factor = scale if SOFT_CAP > 0.0 else scale * LOG2_E
    key_of_head = key_cache + kv_head * k_head_stride
    value_of_head = value_cache + kv_head * v_head_stride
    for start in range(first_key, end_key, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        in_keys = key_position < end_key
        block = tl.load(block_table + key_position // BLOCK_SIZE, mask=in_keys, other=0)
        block = block.to(tl.int64)
        slot = key_position % BLOCK_SIZE
        k_at = block * k_block_stride + slot * k_slot_stride
        k_mask = in_keys[None, :]
        v_mask = in_keys[:, None]
        if HEAD_DIM != BLOCK_D:
            k_mask = k_mask & (key_at < HEAD_DIM)[:, None]
        if VALUE_DIM != BLOCK_V:
            v_mask = v_mask & (value_at < VALUE_DIM)[None, :]
        k = _load(key_of_head + k_at[None, :] + key_at[:, None], k_mask, q.dtype, KIND)

        scores = tl.dot(q, k, input_precision="ieee") * factor  # [BLOCK_M, BLOCK_N]
        if key_scale is not None:
            scale_at = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot
            scores = scores * tl.load(key_scale + scale_at, mask=in_keys, other=0.0)[None, :]
        if SOFT_CAP > 0.0:
            # cap * tanh(x / cap), without a tanh: an overflow to infinity gives the cap itself.
            capped = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / SOFT_CAP)) + 1.0)
            scores = capped * (SOFT_CAP * LOG2_E)
        visible = (key_position[None, :] <= position[:, None]) & in_keys[None, :]
        if WINDOW > 0:
            visible = visible & (position[:, None] - key_position[None, :] < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # Infinity less infinity would be NaN where a row has seen no key yet.
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - finite[:, None])
        correction = tl.exp2(maximum - finite)
        total = total * correction + tl.sum(weights, 1)
        maximum = new_maximum

        v_at = block * v_block_stride + slot * v_slot_stride
        v = _load(value_of_head + v_at[:, None] + value_at[None, :], v_mask, q.dtype, KIND)
        if value_scale is not None:
            weights = weights * tl.load(value_scale + scale_at, mask=in_keys, other=0.0)[None, :]
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return maximum, total, acc


@triton.jit
def _load(pointers, mask, KIND_OF_QUERY: tl.constexpr, KIND: tl.constexpr):
    """Load numbers of the cache as the query's type: exact, since every scale comes later."""
    if KIND == INT8:
        return tl.load(pointers, mask=mask, other=0).to(KIND_OF_QUERY)
    if KIND == FP8_BITS:
        return decode_e4m3(tl.load(pointers, mask=mask, other=0)).to(KIND_OF_QUERY)
    return tl.load(pointers, mask=mask, other=0.0).to(KIND_OF_QUERY)
