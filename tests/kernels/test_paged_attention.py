"""Paged attention against a softmax written out in float64, request by request."""

import math
import os
import subprocess
import sys

import pytest
import torch

from octavo_kernels import mla_decode, paged_attention, write_kv_cache
from octavo_kernels.attention_metadata import MAX_GATHERED_POSITIONS
from octavo_kernels.attention_problem import plan_attention
from octavo_kernels.cpu.threads import get_num_threads, set_num_threads
from octavo_kernels.kv_quantization import dequantize_kv
from support.attention_batch import make_block_tables, make_metadata, written_out

BLOCK = 8
# Float32 dot products of 16 terms and softmax sums of some hundreds: 1e-5 is generous, a wrong
# mask or head changes values by 1e-2 and more.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def _batch(lens, num_heads, num_kv_heads, head_dim=16, block_size=BLOCK):
    """Build random caches and a batch of (query length, sequence length) pairs."""
    tables, num_blocks = make_block_tables([seq_len for _, seq_len in lens], block_size)
    metadata = make_metadata(lens, tables, block_size)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    num_tokens = metadata.host_query_start_loc[-1]
    query = torch.randn(num_tokens, num_heads * 2, head_dim)[:, ::2]  # not contiguous
    return query, torch.randn(shape), torch.randn(shape), metadata


@pytest.fixture(params=["kernel", "twin"])
def _implementation(request, monkeypatch):
    """Run a test with the compiled kernels, and again with their twins."""
    if request.param == "twin":
        monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    return request.param


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


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("lens", CASES.values(), ids=CASES)
def test_matches_the_written_out_softmax(lens, heads):
    query, key_cache, value_cache, metadata = _batch(lens, *heads)
    scale = 1 / math.sqrt(16)
    result = paged_attention(query, key_cache, value_cache, metadata, scale)
    expected = written_out(query, key_cache, value_cache, metadata, scale)
    torch.testing.assert_close(result.double(), expected, **TOLERANCE)


@pytest.mark.usefixtures("_implementation")
def test_a_prompt_longer_than_a_piece():
    query, key_cache, value_cache, metadata = _batch([(600, 611)], 2, 1)
    result = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    some = [0, 254, 255, 256, 511, 512, 599]
    for index in some:
        one = make_metadata([(1, 12 + index)], metadata.block_tables, BLOCK)
        expected = written_out(query[index : index + 1], key_cache, value_cache, one, 0.25)
        torch.testing.assert_close(result[index : index + 1].double(), expected, **TOLERANCE)


@pytest.mark.usefixtures("_implementation")
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


@pytest.mark.usefixtures("_implementation")
def test_half_types_stay():
    query, key_cache, value_cache, metadata = _batch([(1, 9), (5, 12)], 4, 2)
    result = paged_attention(
        query.bfloat16(), key_cache.bfloat16(), value_cache.bfloat16(), metadata, 0.25
    )
    assert result.dtype == torch.bfloat16
    expected = written_out(query, key_cache, value_cache, metadata, 0.25)
    # bfloat16 keeps 8 bits: inputs, scores and output each lose 2**-9 of values near one.
    torch.testing.assert_close(result.double(), expected, rtol=0.03, atol=0.03)


# Options, types and sizes.

MIXED = [(1, 70), (5, 5), (1, 1), (19, 150), (0, 3), (1, 300), (2, 64)]
OPTIONS = {
    "window": {"window": 33},
    "window of one": {"window": 1},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 100, "soft_cap": 4.0, "sinks": True},
}


def _options(options, num_heads):
    return options | ({"sinks": torch.randn(num_heads)} if options.get("sinks") else {})


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize("heads", [(6, 2), (10, 1)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, heads):
    query, key_cache, value_cache, metadata = _batch(MIXED, *heads)
    options = _options(options, heads[0])
    result = paged_attention(query, key_cache, value_cache, metadata, 0.4, **options)
    expected = written_out(query, key_cache, value_cache, metadata, 0.4, **options)
    torch.testing.assert_close(result.double(), expected, **TOLERANCE)


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize(
    ("dtype", "scaled"),
    [
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float8_e4m3fn, False),
        (torch.float8_e5m2, False),
        (torch.float8_e4m3fn, True),
        (torch.int8, True),
    ],
    ids=str,
)
def test_types_of_the_cache(dtype, scaled):
    query, key_cache, value_cache, metadata = _batch(MIXED, 6, 2, head_dim=32)
    num_blocks = len(key_cache)
    caches = [torch.zeros(key_cache.shape, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(num_blocks, 2, BLOCK) if scaled else None for _ in range(2)]
    key, value = (c.transpose(1, 2).reshape(-1, 2, 32) for c in (key_cache, value_cache))
    names = dict(zip(("key_scale", "value_scale"), scales, strict=True))
    write_kv_cache(key, value, *caches, torch.arange(num_blocks * BLOCK), **names)
    result = paged_attention(query, *caches, metadata, 0.2, **names)
    # Against what is in the cache, so that only the arithmetic of float32 is left.
    stored = [dequantize_kv(c, s) for c, s in zip(caches, scales, strict=True)]
    expected = written_out(query, *stored, metadata, 0.2)
    torch.testing.assert_close(result.double(), expected, **TOLERANCE)


@pytest.mark.parametrize("head_dim", [8, 32, 40, 80, 96, 128, 192, 256])
def test_head_sizes(head_dim):
    query, key_cache, value_cache, metadata = _batch(MIXED, 4, 2, head_dim=head_dim)
    scale = head_dim**-0.5
    result = paged_attention(query, key_cache, value_cache, metadata, scale)
    expected = written_out(query, key_cache, value_cache, metadata, scale)
    torch.testing.assert_close(result.double(), expected, **TOLERANCE)


@pytest.mark.parametrize("block_size", [8, 16, 24, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 7])
def test_block_sizes_and_groups(block_size, group):
    query, key_cache, value_cache, metadata = _batch(
        MIXED, 2 * group, 2, head_dim=16, block_size=block_size
    )
    result = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    expected = written_out(query, key_cache, value_cache, metadata, 0.25)
    torch.testing.assert_close(result.double(), expected, **TOLERANCE)


def test_sizes_that_the_kernels_do_not_take():
    query, key_cache, value_cache, metadata = _batch(MIXED, 4, 2, head_dim=6, block_size=5)
    result = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    expected = written_out(query, key_cache, value_cache, metadata, 0.25)
    torch.testing.assert_close(result.double(), expected, **TOLERANCE)


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize(("num_heads", "rank", "rope"), [(4, 32, 8), (16, 64, 16), (3, 40, 16)])
def test_latent_attention(num_heads, rank, rope):
    query, latents, _, metadata = _batch(MIXED, num_heads, 1, head_dim=rank + rope)
    result = mla_decode(query, latents[:, 0], metadata, 0.3, rank)
    expected = written_out(query, latents, latents[..., :rank], metadata, 0.3)
    torch.testing.assert_close(result.double(), expected, **TOLERANCE)


# What others left behind.


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize("options", [{}, {"window": 13}], ids=str)
def test_nan_in_the_unused_part_of_a_block_does_not_leak(options):
    lens = [(1, 5), (1, 70), (3, 11), (40, 77), (1, 300)]
    query, key_cache, value_cache, metadata = _batch(lens, 6, 2)
    before = paged_attention(query, key_cache, value_cache, metadata, 0.25, **options)
    owned = torch.zeros(len(key_cache), BLOCK, dtype=torch.bool)
    for row, (query_len, seq_len) in enumerate(lens):
        window = options.get("window", seq_len)
        at = torch.arange(max(seq_len - query_len + 1 - window, 0), seq_len)
        owned[metadata.block_tables[row].long()[at // BLOCK], at % BLOCK] = True
    for cache in (key_cache, value_cache):
        cache.transpose(1, 2)[~owned] = math.nan
    after = paged_attention(query, key_cache, value_cache, metadata, 0.25, **options)
    assert torch.equal(after, before)


@pytest.mark.usefixtures("_implementation")
def test_blocks_before_the_window_are_not_read():
    """They may have been given away, and their entries in the table with them."""
    lens = [(1, 70), (4, 90)]
    query, key_cache, value_cache, metadata = _batch(lens, 2, 2)
    before = paged_attention(query, key_cache, value_cache, metadata, 0.25, window=10)
    metadata.block_tables[0, : 60 // BLOCK] = 10**6
    metadata.block_tables[1, : (90 - 3 - 10) // BLOCK] = 10**6
    after = paged_attention(query, key_cache, value_cache, metadata, 0.25, window=10)
    assert torch.equal(after, before)


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_request_s_own_nan_is_not_hidden(which):
    query, key_cache, value_cache, metadata = _batch([(1, 9), (1, 120)], 2, 1)
    cache = key_cache if which == "key" else value_cache
    cache[metadata.block_tables[1, 3].long(), :, 5] = math.nan
    result = paged_attention(query, key_cache, value_cache, metadata, 0.25)
    assert result[1].isnan().all()
    assert result[0].isfinite().all()


# The same bits in every batch.


@pytest.fixture
def _threads():
    before = get_num_threads()
    yield
    set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window": 90, "soft_cap": 3.0, "sinks": True}], ids=["plain", "all"]
)
def test_a_token_is_the_same_bit_for_bit_in_every_batch(options, dtype):
    num_heads, num_kv_heads, seq_len = 6, 2, 613
    options = _options(options, num_heads)
    query, key_cache, value_cache, whole = _batch([(seq_len, seq_len)], num_heads, num_kv_heads)
    caches = [cache.to(dtype) for cache in (key_cache, value_cache)]
    table = whole.block_tables

    def attend(q, metadata):
        return paged_attention(q, *caches, metadata, 0.25, **options)

    expected = attend(query, whole)
    for pieces in ([1], [7], [64], [256], [511], [13, 1, 200]):
        start = turn = 0
        while start < seq_len:
            end = min(start + pieces[turn % len(pieces)], seq_len)
            found = attend(query[start:end], make_metadata([(end - start, end)], table, BLOCK))
            assert torch.equal(found, expected[start:end]), (pieces, start)
            # A few of the pieces of one token tell what all do.
            start, turn = (
                end if pieces != [1] or end % 64 > 60 else min(end + 20, seq_len),
                turn + 1,
            )
    for num_rows in (1, 2, 7, 64):
        ends = torch.randint(1, seq_len + 1, (num_rows,)).tolist()
        metadata = make_metadata([(1, end) for end in ends], table.expand(num_rows, -1), BLOCK)
        for num_threads in (1, 2):
            set_num_threads(num_threads)
            found = attend(query[[end - 1 for end in ends]], metadata)
            assert torch.equal(found, expected[[end - 1 for end in ends]]), (num_rows, num_threads)
    mixed = [(1, 600), (50, 613), (1, 3), (200, 400)]
    rows = torch.cat([torch.arange(end - count, end) for count, end in mixed])
    found = attend(query[rows], make_metadata(mixed, table.expand(4, -1), BLOCK))
    assert torch.equal(found, expected[rows])


LOWERED = """
import sys, torch
from octavo_kernels import paged_attention
from support.attention_batch import make_block_tables, make_metadata
torch.manual_seed(0)
lens = [(1, 70), (5, 5), (40, 150), (1, 300)]
tables, num_blocks = make_block_tables([seq_len for _, seq_len in lens], 8)
metadata = make_metadata(lens, tables, 8)
for dim in (32, 72, 128):
    caches = [torch.randn(num_blocks, 2, 8, dim).half() for _ in range(2)]
    result = paged_attention(torch.randn(47, 8, dim), *caches, metadata, 0.3, soft_cap=3.0)
    sys.stdout.buffer.write(result.numpy().tobytes())
"""


def test_a_cpu_with_narrow_registers_gets_the_same_bits():
    outputs = []
    for lowering in ("", "avx2"):
        environment = {**os.environ, "OCTAVO_CPU_LOWERING": lowering}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", LOWERED]
        outputs.append(subprocess.run(command, env=environment, capture_output=True, check=True))
    assert outputs[0].stdout == outputs[1].stdout
    assert len(outputs[0].stdout) == 4 * 47 * 8 * (32 + 72 + 128)


# Requests that begin with the same blocks.


def _share_prefixes(generator, lens, block_size):
    """Deal blocks out so that requests begin like earlier ones, where these have whole blocks."""

    def below(end):
        return int(torch.randint(end, (1,), generator=generator))

    most = max(-(-seq_len // block_size) for _, seq_len in lens)
    num_blocks = len(lens) * most + 1
    unused = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(lens), most), 10**6, dtype=torch.int32)
    for row, (query_len, seq_len) in enumerate(lens):
        shared = 0
        if row and below(4):
            other = below(row)
            context = min(seq_len - query_len, lens[other][1]) // block_size
            shared = below(context + 1) if below(2) else context
            tables[row, :shared] = tables[other, :shared]
        for index in range(shared, -(-seq_len // block_size)):
            tables[row, index] = unused.pop()
    return tables, num_blocks


def _unshare(tables, lens, block_size, caches):
    """Give each request blocks of its own, with what the shared ones hold."""
    own = torch.full_like(tables, 10**6)
    sources = []
    for row, (_, seq_len) in enumerate(lens):
        count = -(-seq_len // block_size)
        own[row, :count] = torch.arange(len(sources), len(sources) + count)
        sources += tables[row, :count].tolist()
    return own, [None if cache is None else cache[sources].contiguous() for cache in caches]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("seed", range(24))
def test_sharing_blocks_changes_no_bit(seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    block_size, group = one_of(8, 16, 24, 128), one_of(1, 3, 4)
    longest = one_of(200, 700)
    lens = []
    for _ in range(one_of(2, 5, 20, 40)):
        seq_len = int(torch.randint(longest // 2, longest, (1,), generator=generator))
        lens.append((one_of(1, 1, 1, 1, 0, 33), seq_len))
    tables, num_blocks = _share_prefixes(generator, lens, block_size)
    shape = (num_blocks, 2, block_size, 32)
    options = {}
    if one_of(False, True):
        options = {"window": one_of(50, 300), "soft_cap": 4.0, "sinks": torch.randn(2 * group)}
    scales = [None, None]
    if one_of(False, True):
        caches = [torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(2)]
        scales = [torch.rand(shape[:3]) / 100 for _ in range(2)]
    else:
        dtype = one_of(torch.float32, torch.float16)
        caches = [torch.randn(shape).to(dtype) for _ in range(2)]
    query = torch.randn(sum(count for count, _ in lens), 2 * group, 32)

    def attend(block_tables, key_cache, value_cache, key_scale, value_scale):
        return paged_attention(
            query,
            key_cache,
            value_cache,
            make_metadata(lens, block_tables, block_size),
            0.2,
            key_scale=key_scale,
            value_scale=value_scale,
            **options,
        )

    own_tables, own_caches = _unshare(tables, lens, block_size, [*caches, *scales])
    set_num_threads(1)
    expected = attend(own_tables, *own_caches)
    for num_threads in (1, 2):
        set_num_threads(num_threads)
        assert torch.equal(attend(tables, *caches, *scales), expected)


@pytest.mark.parametrize(
    ("shared", "window", "is_shared"),
    [(64, None, True), (56, None, False), (256, 60, False), (256, 200, True)],
)
def test_requests_that_share_a_tile_in_sight_are_computed_together(shared, window, is_shared):
    num_rows, num_kv_heads = 32, 3
    tables, _ = make_block_tables([320] * num_rows, BLOCK)
    metadata = make_metadata([(1, 320)] * num_rows, tables, BLOCK)
    tables[:, : shared // BLOCK] = tables[7, : shared // BLOCK]
    plan = plan_attention(metadata, num_rows, 9, num_kv_heads, window)
    assert (plan.num_units < num_rows * num_kv_heads) == is_shared
    assert (plan.max_rows > 9 // num_kv_heads) == is_shared


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"window": 0}, "window=0 must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be above 0"),
        ({"sinks": torch.zeros(3)}, "num_heads=4"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(arguments, text):
    query, key_cache, value_cache, metadata = _batch([(1, 3)], 4, 2)
    with pytest.raises(ValueError, match=text):
        paged_attention(query, key_cache, value_cache, metadata, 1.0, **arguments)


def test_heads_that_do_not_fit_are_refused():
    query, key_cache, value_cache, metadata = _batch([(1, 3)], 4, 2)
    with pytest.raises(ValueError, match="the sizes must be equal"):
        paged_attention(query[:, :3], key_cache, value_cache, metadata, 1.0)
    with pytest.raises(ValueError, match="latents of 16"):
        mla_decode(query[..., :8], key_cache[:, 0], metadata, 1.0, 4)
    with pytest.raises(ValueError, match="kv_lora_rank=17"):
        mla_decode(query, key_cache[:, 0], metadata, 1.0, 17)
