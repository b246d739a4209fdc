"""Causal attention of a flat mixed batch over the paged KV cache.

The paging is that of Kwon et al. 2023 (arXiv 2309.06180). Blocks are head-major,
``[num_blocks, num_kv_heads, block_size, head_dim]``, so that one head's tokens of a
block are one run of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata, DecodeGroup
from octavo_kernels.attention_problem import AttentionProblem, attend
from octavo_kernels.dispatch import use_cpu, use_triton
from octavo_kernels.kv_quantization import check_kv_cache, dequantize_kv

# Query tokens of one call in a prefill of the twin. Bounds the mask to 256 rows, and skips most
# of the upper triangle of a long prompt: piece i sees keys up to its own end only.
PREFILL_PIECE = 256


@dataclass(frozen=True)
class AttentionOptions:
    """What a kind of attention adds to the plain one.

    Attributes:
        scale: Factor of the scores.
        window: Positions that a token sees, itself included; None for all before it.
        soft_cap: Scores are bounded to it by ``soft_cap * tanh(score / soft_cap)``.
        sinks: ``[num_heads]`` float32, score of a position of value zero.
        key_scale: ``[num_blocks, num_kv_heads, block_size]`` float32 of 8-bit caches.
        value_scale: Like `key_scale`.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


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
    """Attend from each token to the tokens of its request up to itself.

    A request's last ``query_len`` positions are its query tokens; their own keys and
    values must be in the cache already. Requests of any kind may be mixed: whole
    prompts, pieces of prompts over cached context, and single tokens. What others left in
    the unused part of a block has no influence, even if it is NaN.

    On a CPU a token's result is the same bit for bit whatever the batch, the pieces in
    which its prompt was computed and the number of threads; on a GPU with `batch_invariant`.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``; ``num_heads`` is
            a multiple of ``num_kv_heads``.
        value_cache: ``[num_blocks, num_kv_heads, block_size, value_head_dim]``.
        metadata: How the tokens divide into requests.
        scale: Factor of the scores, usually ``head_dim ** -0.5``.
        window: Positions that a token sees, itself included; None for all before it.
            Blocks that lie wholly before all windows are not read.
        soft_cap: Bounds the scores to ``soft_cap * tanh(score / soft_cap)``, as in Gemma 2
            (arXiv 2408.00118).
        sinks: ``[num_heads]`` float32, for each head the score of one more position, whose
            value is zero: attention may go nowhere (Xiao et al. 2023, arXiv 2309.17453, in
            the learned form).
        key_scale: ``[num_blocks, num_kv_heads, block_size]`` float32, of an 8-bit cache
            that was written with scales.
        value_scale: Like `key_scale`.
        batch_invariant: Give a token the same bits on a GPU too. Long decodes of few requests
            are slower then, since their keys are not split.

    Returns:
        ``[num_tokens, num_heads, value_head_dim]``, in the type of `query`.

    Raises:
        ValueError: Shapes or types don't fit, or an option is out of its range.
    """
    check_kv_cache(key_cache, value_cache, key_scale, value_scale)
    check_attention(query, key_cache, window, soft_cap, sinks)
    if use_triton(query):
        from octavo_kernels import triton

        return triton.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata,
            scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            batch_invariant=batch_invariant,
        )
    options = AttentionOptions(scale, window, soft_cap, sinks, key_scale, value_scale)
    if use_cpu(query, key_cache) and fits_cpu_kernel(key_cache, value_cache):
        return attend_on_cpu(query, key_cache, value_cache, metadata, options)
    return paged_attention_reference(query, key_cache, value_cache, metadata, options)


def fits_cpu_kernel(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether heads and blocks are multiples of 8, as the CPU kernels read them."""
    return not (key_cache.shape[-1] % 8 or value_cache.shape[-1] % 8 or key_cache.shape[2] % 8)


def attend_on_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    """Do the same with the compiled kernels, in float32."""
    problem = AttentionProblem(
        query.float().contiguous(),
        key_cache,
        value_cache,
        metadata,
        options.scale,
        window=options.window,
        soft_cap=options.soft_cap,
        sinks=None if options.sinks is None else options.sinks.float().contiguous(),
        key_scale=options.key_scale,
        value_scale=options.value_scale,
    )
    attend[key_cache.dtype](problem.address)
    return problem.output.to(query.dtype)


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Check what `paged_attention` says of its arguments.

    Raises:
        ValueError: They don't fit.
    """
    num_heads, head_dim = query.shape[1:]
    if head_dim != key_cache.shape[-1] or num_heads % key_cache.shape[1]:
        raise ValueError(
            f"query has {num_heads} heads of {head_dim}, the cache {key_cache.shape[1]} of "
            f"{key_cache.shape[-1]}; the sizes must be equal and the heads a multiple"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1, or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be above 0, or None")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be [num_heads={num_heads}], not {list(sinks.shape)}")


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    """Do the same in plain torch, in float32."""
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    for group in metadata.decode_groups:
        _decode(output, query, key_cache, value_cache, group, options)
    for row in metadata.prefill_rows:
        _prefill(output, query, key_cache, value_cache, metadata, row, options)
    return output


def _decode(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: DecodeGroup,
    options: AttentionOptions,
) -> None:
    """Compute rows of one query token together, padded to the longest."""
    num_kv_heads, block_size = key_cache.shape[1:3]
    seen = group.mask  # [num_rows, 1, 1, num_positions]
    blocks = group.blocks
    if options.window is not None:
        lengths = seen.sum(-1, keepdim=True)
        positions = torch.arange(seen.shape[-1], device=seen.device)
        seen = seen & (positions >= lengths - options.window)
        # Blocks before the window may belong to others by now: the last one stands in.
        used = seen.view(len(blocks), -1, block_size).any(-1)
        last = (lengths.view(-1, 1) - 1) // block_size
        blocks = torch.where(used, blocks, blocks.gather(1, last))
    # The query heads of one KV head stand where the tokens of a sequence would, so that
    # K and V need no copy for each of them.
    # [num_rows, num_kv_heads, num_heads / num_kv_heads, head_dim]
    q = query[group.tokens].reshape(len(blocks), num_kv_heads, -1, query.shape[-1])
    k = _gather(key_cache, options.key_scale, blocks)
    v = _gather(value_cache, options.value_scale, blocks)
    # Zeroed, since a weight of zero times a NaN that someone left there is NaN.
    v = v.masked_fill(~seen.transpose(-1, -2), 0.0)
    sinks = None
    if options.sinks is not None:
        sinks = options.sinks.view(num_kv_heads, -1)
    output[group.tokens] = _attend(q, k, v, seen, sinks, options).flatten(1, 2).to(output.dtype)


def _prefill(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    row: int,
    options: AttentionOptions,
) -> None:
    """Compute one request with several query tokens."""
    start, end = metadata.host_query_start_loc[row], metadata.host_query_start_loc[row + 1]
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads
    for first in range(start, end, PREFILL_PIECE):
        last = min(first + PREFILL_PIECE, end)
        num_queries, num_keys = last - first, metadata.host_seq_lens[row] - (end - last)
        window = num_keys if options.window is None else options.window
        first_block = max(num_keys - num_queries + 1 - window, 0) // block_size
        last_block = -(-num_keys // block_size)
        blocks = metadata.block_tables[row : row + 1, first_block:last_block].long()
        ends = torch.arange(num_keys - num_queries + 1, num_keys + 1, device=query.device)
        positions = torch.arange(
            first_block * block_size, last_block * block_size, device=query.device
        )
        seen = (positions < ends.unsqueeze(1)) & (positions >= ends.unsqueeze(1) - window)
        v = _gather(value_cache, options.value_scale, blocks)
        v = v.masked_fill(~seen.any(0).unsqueeze(-1), 0.0)
        q = query[first:last].reshape(num_queries, num_kv_heads, group, -1)
        # Head by head, a token after the other: [1, num_kv_heads, group * num_queries, head_dim].
        q = q.permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0)
        k = _gather(key_cache, options.key_scale, blocks)
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.view(num_kv_heads, group).repeat_interleave(num_queries, 1)
        attended = _attend(q, k, v, seen.repeat(group, 1), sinks, options)
        attended = attended.view(num_kv_heads * group, num_queries, -1).transpose(0, 1)
        output[first:last] = attended.to(output.dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Attend with everything written out.

    Args:
        q: ``[num_rows, num_kv_heads, num_queries, head_dim]``.
        k: ``[num_rows, num_kv_heads, num_keys, head_dim]`` float32.
        v: ``[num_rows, num_kv_heads, num_keys, value_head_dim]`` float32, finite where
            nobody sees it.
        seen: Bool, broadcast to the scores, True where a key counts.
        sinks: ``[num_kv_heads, num_queries]`` float32.
        options: The kind of attention.
    """
    scores = torch.matmul(q.float(), k.transpose(-1, -2)) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return torch.matmul(scores.softmax(-1), v)
    sink = sinks.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights, v)


def _gather(cache: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    """Copy blocks together.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        scale: ``[num_blocks, num_kv_heads, block_size]`` or None.
        blocks: ``[num_rows, num_blocks]`` int64 block ids.

    Returns:
        ``[num_rows, num_kv_heads, num_blocks * block_size, head_dim]`` float32.
    """
    # Copied as bytes where they are: indexing doesn't know float8 everywhere.
    kind = torch.int8 if cache.dtype.itemsize == 1 else cache.dtype
    # [num_rows, num_kv_heads, num_blocks, block_size, head_dim]
    stored = cache.view(kind)[blocks].transpose(1, 2).view(cache.dtype)
    scales = None if scale is None else scale[blocks].transpose(1, 2)
    return dequantize_kv(stored, scales).flatten(2, 3)
