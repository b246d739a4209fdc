"""Triton kernels of causal attention over the paged KV cache.

Rows of a tile are (query token, query head of one KV head), so that a key is read once for all
heads that share it ("The Anatomy of a Triton Attention Kernel", arXiv 2511.11581). Softmax runs
along the keys with a running maximum (Milakov and Gimelshein 2018, arXiv 1805.02867); a decode
row is cut into segments of keys that are reduced together at the end (as in Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Both grids depend on the shapes of the
tensors only, never on lengths, so that a captured graph stays right for other lengths.
"""

from __future__ import annotations

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
    query = with_dense_rows(query)
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    kind, key_cache, value_cache = as_kernels_see(key_cache, value_cache)
    tensors = (query, key_cache, value_cache, metadata.block_tables, metadata.query_start_loc)
    arguments = (*tensors, metadata.seq_lens, key_scale, value_scale, sinks)
    strides = (
        *(query.stride(0), query.stride(1)),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        metadata.block_tables.stride(0),
    )
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": query.shape[2],
        "VALUE_DIM": value_cache.shape[3],
        # A matrix product takes no dimension below 16.
        "BLOCK_D": max(16, next_power_of_2(query.shape[2])),
        "BLOCK_V": max(16, next_power_of_2(value_cache.shape[3])),
        "BLOCK_SIZE": key_cache.shape[2],
        "WINDOW": window or 0,
        "SOFT_CAP": soft_cap or 0.0,
        "KIND": kind,
    }
    with on_device_of(query):
        if _splits(metadata, num_kv_heads, query.device) and not batch_invariant:
            _decode(output, arguments, strides, scale, constants)
        else:
            _prefill(output, arguments, strides, scale, constants)
    return output


def _splits(metadata: AttentionMetadata, num_kv_heads: int, device: torch.device) -> bool:
    """Whether to cut keys into segments: one query token each, and too few rows for a GPU.

    From two waves of programs on, segments only add their partial results to the traffic.
    """
    num_reqs = len(metadata.host_seq_lens)
    starts = metadata.host_query_start_loc
    if any(starts[row + 1] - starts[row] > 1 for row in range(num_reqs)):
        return False
    return num_reqs * num_kv_heads < 2 * tiles.num_multiprocessors(device)


def _prefill(output, arguments, strides, scale, constants) -> None:
    query, key_cache = arguments[:2]
    num_reqs = arguments[5].shape[0]
    tile = tiles.prefill_attention(
        tiles.architecture(), _width(constants), query.itemsize, key_cache.itemsize
    )
    group = constants["NUM_HEADS"] // constants["NUM_KV_HEADS"]
    rows = max(tile.rows, next_power_of_2(group))
    # Each request adds at most one query block that is not full.
    num_blocks = query.shape[0] // (rows // group) + num_reqs
    _attend[(num_blocks, constants["NUM_KV_HEADS"])](
        *arguments,
        output,
        *strides,
        *(output.stride(0), output.stride(1)),
        scale,
        num_reqs,
        **constants,
        BLOCK_M=rows,
        BLOCK_N=tile.columns,
        **tile.options,
    )


def _width(constants) -> int:
    """Return the wider of the padded sizes of keys and values."""
    return max(constants["BLOCK_D"], constants["BLOCK_V"])


def _decode(output, arguments, strides, scale, constants) -> None:
    query = arguments[0]
    num_reqs, num_heads, num_kv_heads = (
        arguments[5].shape[0],
        constants["NUM_HEADS"],
        constants["NUM_KV_HEADS"],
    )
    segments, block_v = tiles.NUM_SEGMENTS, constants["BLOCK_V"]
    partial = torch.empty(
        (num_reqs, num_heads, segments, block_v), dtype=torch.float32, device=query.device
    )
    # The maximum and the sum of each segment's softmax.
    state = torch.empty(
        (2, num_reqs, num_heads, segments), dtype=torch.float32, device=query.device
    )
    tile = tiles.decode_attention(
        tiles.architecture(), _width(constants), query.itemsize, num_heads // num_kv_heads
    )
    _attend_segment[(num_reqs, num_kv_heads, segments)](
        *arguments,
        *(partial, state[0], state[1]),
        *strides,
        scale,
        **constants,
        NUM_SEGMENTS=segments,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **tile.options,
    )
    reduce_segments[(num_reqs, num_heads)](
        *(partial, state[0], state[1], output, arguments[4]),
        *(output.stride(0), output.stride(1)),
        NUM_HEADS=num_heads,
        VALUE_DIM=constants["VALUE_DIM"],
        BLOCK_V=block_v,
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
