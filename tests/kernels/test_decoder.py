"""A whole decoder in one call: bit for bit what its operations give one by one."""

import pytest
import torch

from octavo_kernels import (
    AttentionMetadata,
    Decoder,
    DecoderLayer,
    concatenate_weights,
    embed_tokens,
    pack_dense_weight,
    pack_weight,
    quantize_weight,
    unpack_weight,
)
from octavo_kernels.cpu import threads
from support.weights import GGUF_BLOCKS, gguf_weight

NUM_LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 2, 96, 160, 6, 2, 16
BLOCK_SIZE, NUM_BLOCKS = 8, 40


def _weight(kind, rows, inputs):
    weight = torch.randn(rows, inputs) * inputs**-0.5
    if kind in ("f32", "bf16"):
        return pack_dense_weight(weight if kind == "f32" else weight.bfloat16())
    return quantize_weight(weight, kind)


def _layer(kinds, bias=False, head_norms=False):
    """Make a layer; `kinds` are those of queries and keys, values, output, gate and up, down."""
    query, value, output, gate, down = kinds
    sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    q, k = (_weight(query, size, HIDDEN) for size in sizes[:2])
    v = _weight(value, sizes[2], HIDDEN)
    qkv = [concatenate_weights([q, k, v])] if query == value else [concatenate_weights([q, k]), v]
    return DecoderLayer(
        input_norm=torch.rand(HIDDEN) + 0.5,
        qkv=qkv,
        qkv_bias=[torch.randn(part.shape[0]) for part in qkv] if bias else None,
        output=_weight(output, HIDDEN, HEADS * HEAD_DIM),
        output_bias=torch.randn(HIDDEN) if bias else None,
        ffn_norm=torch.rand(HIDDEN) + 0.5,
        gate_up=[_weight(gate, 2 * FFN, HIDDEN)],
        down=_weight(down, HIDDEN, FFN),
        query_norm=torch.rand(HEAD_DIM) + 0.5 if head_norms else None,
        key_norm=torch.rand(HEAD_DIM) + 0.5 if head_norms else None,
    )


def _cos_sin(positions, dim):
    angles = torch.outer(torch.arange(positions).float(), 100.0 ** -torch.linspace(0, 1, dim // 2))
    return torch.cat((angles.cos(), angles.sin()), -1)


def _decoder(kinds=("q4_0",) * 5, activation="silu", rotary_dim=HEAD_DIM, **options):
    return Decoder(
        [_layer(kinds, **options) for _ in range(NUM_LAYERS)],
        torch.rand(HIDDEN) + 0.5,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        1e-5,
        _cos_sin(300, rotary_dim),
        activation,
    )


def _caches(dtype=torch.float32):
    # What is not written must not matter.
    shape = (NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return [
        (torch.full(shape, 7.0, dtype=dtype), torch.full(shape, 7.0, dtype=dtype))
        for _ in range(NUM_LAYERS)
    ]


def _batch(requests):
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


def _both(decoder, requests, dtype=torch.float32):
    """Run both ways; return their results and caches."""
    metadata, positions = _batch(requests)
    hidden = torch.randn(len(positions), HIDDEN)
    ours, theirs = _caches(dtype), _caches(dtype)
    scale = HEAD_DIM**-0.5
    expected = decoder.forward_reference(hidden, positions, theirs, metadata, scale)
    result = decoder.forward(hidden.clone(), positions, ours, metadata, scale)
    return result, expected, ours, theirs


def _assert_same(result, expected, ours, theirs):
    assert result.isfinite().all()
    assert torch.equal(result, expected)
    for (k, v), (other_k, other_v) in zip(ours, theirs, strict=True):
        assert torch.equal(k, other_k)
        assert torch.equal(v, other_v)


REQUESTS = {
    "one": [(0, 1)],
    "four": [(0, 1)] * 4,
    "five": [(0, 1)] * 5,
    "prompt": [(0, 70)],
    "mixed": [(0, 1), (0, 19), (0, 3), (0, 40), (0, 1)],
}


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_one_call_equals_its_operations(requests):
    _assert_same(*_both(_decoder(), requests))


@pytest.mark.parametrize(
    "kinds",
    [
        ("q8_0",) * 5,
        ("f32",) * 5,
        ("bf16", "bf16", "q4_0", "w8a8", "f32"),
        ("q4_0", "q8_0", "bf16", "q4_0", "q8_0"),
        ("q4_0", "f32", "q4_0", "q4_0", "q4_0"),
    ],
    ids=" ".join,
)
def test_kinds_of_weights_may_be_mixed(kinds):
    for requests in (REQUESTS["one"], REQUESTS["mixed"]):
        _assert_same(*_both(_decoder(kinds), requests))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_the_cache(dtype):
    _assert_same(*_both(_decoder(), REQUESTS["mixed"], dtype))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations(activation):
    _assert_same(*_both(_decoder(activation=activation), REQUESTS["mixed"]))


def test_biases_and_norms_of_heads():
    decoder = _decoder(bias=True, head_norms=True)
    for requests in (REQUESTS["one"], REQUESTS["mixed"]):
        _assert_same(*_both(decoder, requests))


def test_a_token_is_the_same_in_pieces_in_every_batch_and_on_any_number_of_threads():
    decoder, scale = _decoder(), HEAD_DIM**-0.5
    hidden = torch.randn(45, HIDDEN)
    metadata, positions = _batch([(0, 45)])
    whole = decoder.forward(hidden.clone(), positions, _caches(), metadata, scale)
    try:
        for num_threads in (1, 2, 3):
            threads.set_num_threads(num_threads)
            caches, start = _caches(), 0
            for count in (1, 7, 1, 20, 16):
                metadata, positions = _batch([(start, count)])
                piece = hidden[start : start + count].clone()
                result = decoder.forward(piece, positions, caches, metadata, scale)
                assert torch.equal(result, whole[start : start + count])
                start += count
    finally:
        threads.set_num_threads(threads.default_num_threads())
    metadata, positions = _batch([(0, 3), (0, 45), (0, 1)])
    batch = torch.cat((torch.randn(3, HIDDEN), hidden, torch.randn(1, HIDDEN)))
    result = decoder.forward(batch, positions, _caches(), metadata, scale)
    assert torch.equal(result[3:48], whole)


def test_what_one_call_cannot_do_is_refused():
    with pytest.raises(ValueError, match="activation is 'relu'; it must be one of silu, gelu"):
        _decoder(activation="relu")
    with pytest.raises(ValueError, match=r"rotary_dim is 8; .* must be a multiple of 16"):
        _decoder(rotary_dim=8)


@pytest.mark.parametrize("kind", [*GGUF_BLOCKS, "w8a8", "f32", "bf16", "f16"])
def test_embeddings_are_rows_of_the_unpacked_weight(kind):
    if kind in GGUF_BLOCKS:
        weight = pack_weight(gguf_weight(kind, (43, 512))[0], kind, (43, 512))
    elif kind == "w8a8":
        weight = quantize_weight(torch.randn(43, 512), kind)
    else:
        types = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        weight = pack_dense_weight(torch.randn(43, 512).to(types[kind]))
    ids = torch.tensor([0, 42, 7, 8, 42, *range(40)])
    assert torch.equal(embed_tokens(ids, weight), unpack_weight(weight)[ids])
