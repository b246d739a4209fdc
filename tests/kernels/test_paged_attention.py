"""Paged attention against a softmax written out in float64, request by request."""

import math

import pytest
import torch

from octavo_kernels import AttentionMetadata, paged_attention
from octavo_kernels.attention_metadata import MAX_GATHERED_POSITIONS

BLOCK = 8
# Float32 dot products of 16 terms and softmax sums of some hundreds: 1e-5 is generous, a wrong
# mask or head changes values by 1e-2 and more.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def _batch(lens, num_heads, num_kv_heads, head_dim=16, block_size=BLOCK):
    """Build random caches and a batch of (query length, sequence length) pairs."""
    blocks_of = [-(-seq_len // block_size) for _, seq_len in lens]
    num_blocks = sum(blocks_of) + 3
    shuffled = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lens), max(blocks_of, default=0) + 1), 10**6, dtype=torch.int32)
    for row, count in enumerate(blocks_of):
        tables[row, :count] = torch.tensor([shuffled.pop() for _ in range(count)])
    starts = [0]
    for query_len, _ in lens:
        starts.append(starts[-1] + query_len)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    seq_lens = [seq_len for _, seq_len in lens]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.full((starts[-1],), -1, dtype=torch.int32),
        host_query_start_loc=starts,
        host_seq_lens=seq_lens,
        block_size=block_size,
    )
    query = torch.randn(starts[-1], num_heads * 2, head_dim)[:, ::2]  # not contiguous
    return query, torch.randn(shape), torch.randn(shape), metadata


def _reference(query, key_cache, value_cache, metadata, scale):
    output = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // key_cache.shape[1]
    starts = metadata.host_query_start_loc
    for row, seq_len in enumerate(metadata.host_seq_lens):
        query_len = starts[row + 1] - starts[row]
        for index in range(query_len):
            length = seq_len - query_len + index + 1
            at = torch.arange(length)
            blocks = metadata.block_tables[row].long()[at // metadata.block_size]
            for head in range(query.shape[1]):
                keys = key_cache[blocks, head // group, at % metadata.block_size].double()
                values = value_cache[blocks, head // group, at % metadata.block_size].double()
                scores = keys @ query[starts[row] + index, head].double() * scale
                output[starts[row] + index, head] = scores.softmax(0) @ values
    return output


LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)
CASES = {
    "one token": [(1, 1)],
    "decode": [(1, length) for length in LENGTHS],
    "prefill": [(length, length) for length in LENGTHS],
    "chunks over context": [(3, length + 3) for length in LENGTHS],
    "mixed": [(1, 9), (5, 5), (1, 1), (4, 20), (1, 16), (2, 2)],
    "rows without tokens": [(0, 4), (1, 5), (0, 1), (3, 3), (0, 9)],
    "lengths far apart": [(1, 2), (1, 300), (1, 40), (1, 280)],
    "nothing": [],
}


@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("lens", CASES.values(), ids=CASES)
def test_matches_the_written_out_softmax(lens, heads):
    query, key_cache, value_cache, metadata = _batch(lens, *heads)
    scale = 1 / math.sqrt(16)
    result = paged_attention(query, key_cache, value_cache, metadata, scale)
    expected = _reference(query, key_cache, value_cache, metadata, scale)
    torch.testing.assert_close(result.double(), expected, **TOLERANCE)


def test_a_prompt_longer_than_a_piece():
    query, key_cache, value_cache, metadata = _batch([(600, 611)], 2, 1)
    result = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    some = [0, 254, 255, 256, 511, 512, 599]
    for index in some:
        one = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([12 + index], dtype=torch.int32),
            block_tables=metadata.block_tables,
            slot_mapping=metadata.slot_mapping[:1],
            host_query_start_loc=[0, 1],
            host_seq_lens=[12 + index],
            block_size=BLOCK,
        )
        expected = _reference(query[index : index + 1], key_cache, value_cache, one, 0.25)
        torch.testing.assert_close(result[index : index + 1].double(), expected, **TOLERANCE)


def test_other_requests_numbers_never_come_near():
    query, key_cache, value_cache, metadata = _batch([(1, 9), (1, 120), (4, 30)], 3, 3)
    before = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    of_the_long = metadata.block_tables[1, : 120 // BLOCK].long()
    key_cache[of_the_long] = math.nan
    value_cache[of_the_long] = math.nan
    after = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    others = [0, *range(2, 6)]
    assert torch.equal(after[others], before[others])
    assert after[1].isnan().all()


def test_decode_groups_bound_padding_and_memory():
    lens = [(1, 1)] * 3 + [(1, 5000)] * 40 + [(1, 3000)] * 2
    _, _, _, metadata = _batch(lens, 1, 1, head_dim=2, block_size=128)
    groups = metadata.decode_groups
    assert sorted(torch.cat([group.tokens for group in groups]).tolist()) == list(range(45))
    for group in groups:
        gathered = group.blocks.numel() * metadata.block_size
        assert gathered <= MAX_GATHERED_POSITIONS + len(group.tokens) * metadata.block_size
        lengths = metadata.seq_lens[group.tokens]
        assert lengths.max() <= max(2 * lengths.min(), 256)


def test_half_types_stay():
    query, key_cache, value_cache, metadata = _batch([(1, 9), (5, 12)], 4, 2)
    result = paged_attention(
        query.bfloat16(), key_cache.bfloat16(), value_cache.bfloat16(), metadata, 0.25
    )
    assert result.dtype == torch.bfloat16
    expected = _reference(query, key_cache, value_cache, metadata, 0.25)
    # bfloat16 keeps 8 bits: inputs, scores and output each lose 2**-9 of values near one.
    torch.testing.assert_close(result.double(), expected, rtol=0.03, atol=0.03)
