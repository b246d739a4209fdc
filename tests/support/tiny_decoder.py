"""A decoder of two small layers over random weights, its caches and batches for it."""

import torch

from octavo_kernels import (
    AttentionMetadata,
    Decoder,
    DecoderLayer,
    concatenate_weights,
    pack_dense_weight,
    quantize_weight,
)

NUM_LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 2, 96, 160, 6, 2, 16
BLOCK_SIZE, NUM_BLOCKS = 8, 40


def make_weight(kind, rows, inputs):
    weight = torch.randn(rows, inputs) * inputs**-0.5
    if kind in ("f32", "bf16"):
        return pack_dense_weight(weight if kind == "f32" else weight.bfloat16())
    return quantize_weight(weight, kind)


def _layer(kinds, window=None, bias=False, head_norms=False, after_norms=False, sinks=False):
    """Make a layer; `kinds` are those of queries and keys, values, output, gate and up, down.

    A layer with a window has angles of its own.
    """
    query, value, output, gate, down = kinds
    sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    q, k = (make_weight(query, size, HIDDEN) for size in sizes[:2])
    v = make_weight(value, sizes[2], HIDDEN)
    qkv = [concatenate_weights([q, k, v])] if query == value else [concatenate_weights([q, k]), v]
    return DecoderLayer(
        input_norm=torch.rand(HIDDEN) + 0.5,
        qkv=qkv,
        qkv_bias=[torch.randn(part.shape[0]) for part in qkv] if bias else None,
        output=make_weight(output, HIDDEN, HEADS * HEAD_DIM),
        output_bias=torch.randn(HIDDEN) if bias else None,
        ffn_norm=torch.rand(HIDDEN) + 0.5,
        gate_up=[make_weight(gate, 2 * FFN, HIDDEN)],
        down=make_weight(down, HIDDEN, FFN),
        query_norm=torch.rand(HEAD_DIM) + 0.5 if head_norms else None,
        key_norm=torch.rand(HEAD_DIM) + 0.5 if head_norms else None,
        after_attention_norm=torch.rand(HIDDEN) + 0.5 if after_norms else None,
        after_ffn_norm=torch.rand(HIDDEN) + 0.5 if after_norms else None,
        gate_up_bias=[torch.randn(2 * FFN)] if bias else None,
        down_bias=torch.randn(HIDDEN) if bias else None,
        window=window,
        sinks=torch.randn(HEADS) if sinks else None,
        cos_sin_cache=_cos_sin(300, HEAD_DIM, 10.0) if window else None,
    )


def _cos_sin(positions, dim, theta=100.0):
    angles = torch.outer(torch.arange(positions).float(), theta ** -torch.linspace(0, 1, dim // 2))
    return torch.cat((angles.cos(), angles.sin()), -1)


def make_decoder(
    kinds=("q4_0",) * 5,
    activation="silu",
    rotary_dim=HEAD_DIM,
    soft_cap=None,
    windows=(None, None),
    **options,
):
    return Decoder(
        [_layer(kinds, window, **options) for window in windows],
        torch.rand(HIDDEN) + 0.5,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        1e-5,
        _cos_sin(300, rotary_dim),
        activation,
        soft_cap,
    )


def make_caches(dtype=torch.float32):
    # What is not written must not matter.
    shape = (NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return [
        (torch.full(shape, 7.0, dtype=dtype), torch.full(shape, 7.0, dtype=dtype))
        for _ in range(NUM_LAYERS)
    ]


def make_batch(requests):
    """Make metadata and positions of (tokens before, new tokens) of each request."""
    starts, lengths, tables, slots, positions, used = [0], [], [], [], [], 1
    for before, new in requests:
        blocks = list(range(used, used + -(-(before + new) // BLOCK_SIZE)))
        used += len(blocks)
        tables.append(blocks)
        starts.append(starts[-1] + new)
        lengths.append(before + new)
        for position in range(before, before + new):
            positions.append(position)
            slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    width = max(len(table) for table in tables)
    table = torch.zeros(len(tables), width, dtype=torch.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = torch.tensor(blocks)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=table,
        slot_mapping=torch.tensor(slots),
        host_query_start_loc=starts,
        host_seq_lens=lengths,
        block_size=BLOCK_SIZE,
    )
    return metadata, torch.tensor(positions, dtype=torch.int32)
