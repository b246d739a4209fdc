"""Paged attention in Triton against a softmax written out in float64, request by request."""

import math
import sys

import pytest
import torch

from octavo_kernels import AttentionMetadata
from octavo_kernels.kv_quantization import dequantize_kv, quantize_kv
from octavo_kernels.triton import paged_attention, tiles
from support.paged_batch import CASES, make_batch, reference
from support.triton_interpreter import dot_row_by_row

# The module; the package has the function under this name.
attention = sys.modules["octavo_kernels.triton.paged_attention"]

# Float32 sums of some hundreds of products: 1e-5 is generous, while a wrong mask, head or block
# changes values by 1e-2 and more. bfloat16 keeps 8 bits, float16 11: the weights of the softmax
# and the result are each rounded by half of the last.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def few_segments(monkeypatch):
    """Cut decode rows into 2 segments: a program takes the interpreter some milliseconds."""
    monkeypatch.setattr(tiles, "NUM_SEGMENTS", 2)


def check(batch, scale=0.2, tolerance=None, **options):
    query, key_cache, value_cache, metadata = batch
    result = paged_attention(query, key_cache, value_cache, metadata, scale, **options)
    assert result.dtype == query.dtype
    options.pop("batch_invariant", None)
    expected = reference(query, key_cache, value_cache, metadata, scale, **options)
    limit = tolerance or TOLERANCE[query.dtype]
    torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("lens", CASES.values(), ids=CASES)
def test_matches_the_written_out_softmax(lens):
    check(make_batch(lens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype):
    check(make_batch(CASES["mixed"], dtype=dtype))
    check(make_batch([(1, 9), (1, 70)], dtype=dtype))


# Query heads of one KV head: 1 to 16, of which 3, 5, 6, 7 and 9 are no powers of two.
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
def test_every_ratio_of_heads(group):
    heads = (2 * group, 2)
    check(make_batch([(1, 40), (7, 30), (17, 17)], heads=heads, dims=(16, 16)))
    check(make_batch([(1, 40), (1, 7)], heads=heads, dims=(16, 16)))


@pytest.mark.parametrize(
    "dims", [(8, 8), (32, 32), (80, 80), (96, 96), (112, 112), (192, 128), (256, 256)], ids=str
)
def test_every_head_size(dims):
    check(make_batch([(1, 20), (5, 9)], dims=dims))
    check(make_batch([(1, 20), (1, 37)], dims=dims))


@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
def test_every_block_size(block_size):
    check(make_batch([(1, 20), (5, 9)], block_size=block_size))
    check(make_batch([(1, 20), (1, 129)], block_size=block_size))


OPTIONS = {
    "window": {"window": 7},
    "window of one": {"window": 1},
    "wide window": {"window": 33},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, -math.inf])},
    "all": {"window": 20, "soft_cap": 2.0, "sinks": torch.tensor([0.5, -2.0, 3.0, 9.0])},
}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, batch_invariant):
    options = {**options, "batch_invariant": batch_invariant}
    check(make_batch([(1, 9), (20, 50), (1, 1), (33, 33)]), **options)
    check(make_batch([(1, 9), (1, 200), (1, 1)]), **options)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bit_caches(kind, native, scaled, monkeypatch):
    if kind == torch.int8 and not scaled:
        pytest.skip("int8 always has scales")
    monkeypatch.setattr(tiles, "has_fp8_e4m3", lambda: native)
    for lens in ([(1, 9), (20, 50), (1, 1)], [(1, 9), (1, 70)]):
        query, *caches, metadata = make_batch(lens)
        stored = [quantize_kv(cache, kind, scaled) for cache in caches]
        scales = {"key_scale": stored[0][1], "value_scale": stored[1][1]}
        result = paged_attention(query, stored[0][0], stored[1][0], metadata, 0.2, **scales)
        read = [dequantize_kv(*pair) for pair in stored]
        expected = reference(query, *read, metadata, 0.2)
        torch.testing.assert_close(result.double(), expected, rtol=2e-5, atol=2e-5)


def test_thousands_of_blocks(monkeypatch):
    monkeypatch.setattr(tiles, "NUM_SEGMENTS", 16)
    check(make_batch([(1, 4500)], heads=(1, 1), dims=(16, 16), block_size=1))
    check(make_batch([(2, 4500)], heads=(1, 1), dims=(16, 16), block_size=1))


def test_many_decode_rows_are_not_split(monkeypatch):
    monkeypatch.setattr(tiles, "num_multiprocessors", lambda device: 4)
    monkeypatch.setattr(attention, "_decode", None)
    check(make_batch([(1, 1 + row % 40) for row in range(8)], heads=(1, 1), dims=(16, 16)))


def test_other_requests_numbers_never_come_near():
    query, key_cache, value_cache, metadata = make_batch([(1, 9), (1, 120), (4, 30)])
    before = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    of_the_long = metadata.block_tables[1, :8].long()
    key_cache[of_the_long] = math.nan
    value_cache[of_the_long] = math.nan
    after = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    others = [0, *range(2, 6)]
    assert torch.equal(after[others], before[others])
    assert after[1].isnan().all()


def test_batch_invariant_bits(monkeypatch):
    """A token's bits are the same alone, in a batch, in a prefill and in chunks of any size.

    As a matrix product on a GPU, and unlike numpy's, one that treats all rows alike is needed.
    """
    dot_row_by_row(monkeypatch)
    length = 45
    query, key_cache, value_cache, metadata = make_batch([(length, length), (1, 30), (9, 31)])

    def attend(pairs):
        """Attend from (row, first, end) positions; the queries come from the whole batch."""
        starts = torch.tensor([0, *(end - first for _, first, end in pairs)]).cumsum(0).int()
        first_of = [metadata.host_query_start_loc[row] for row, _, _ in pairs]
        context = [metadata.host_seq_lens[row] - metadata.query_len(row) for row, _, _ in pairs]
        some = [
            query[at - skip + first : at - skip + end]
            for (_, first, end), at, skip in zip(pairs, first_of, context, strict=True)
        ]
        seq_lens = [end for _, _, end in pairs]
        part = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=metadata.block_tables[[row for row, _, _ in pairs]],
            slot_mapping=metadata.slot_mapping,
            host_query_start_loc=starts.tolist(),
            host_seq_lens=seq_lens,
            block_size=metadata.block_size,
        )
        args = (torch.cat(some), key_cache, value_cache, part, 0.25)
        return paged_attention(*args, batch_invariant=True)

    whole = attend([(0, 0, length)])
    for pieces in ([(0, 7), (7, 8), (8, 45)], [(0, 44), (44, 45)]):
        for first, end in pieces:
            crowd = [(1, 29, 30), (0, first, end), (2, 22, 31)]
            assert torch.equal(attend([(0, first, end)]), whole[first:end])
            assert torch.equal(attend(crowd)[1 : 1 + end - first], whole[first:end])
