"""The cache after a write, bit for bit, and nothing else touched."""

import pytest
import torch

from octavo_kernels.kv_quantization import quantize_kv
from octavo_kernels.triton import tiles, write_kv_cache

SLOTS = (19, 0, -1, 7, 8, 3, 23)
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def _bits(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def _cache(dtype, num_kv_heads, head_dim, block_size=4, num_blocks=6):
    # One block more on each side, which nobody may write to.
    shape = (num_blocks + 2, num_kv_heads, block_size, head_dim)
    whole = torch.full(shape, 7.0).to(dtype)
    return whole, whole[1:-1]


def _inputs(dtype, num_kv_heads, head_dim, value_dim):
    qkv = torch.randn(len(SLOTS), num_kv_heads * (head_dim + value_dim)).to(dtype)
    key = qkv[:, : num_kv_heads * head_dim].unflatten(1, (num_kv_heads, head_dim))
    value = qkv[:, num_kv_heads * head_dim :].unflatten(1, (num_kv_heads, value_dim))
    return key, value


def _check(whole, new, scales, scaled):
    expected = torch.full(whole.shape, 7.0).to(whole.dtype)
    expected_scales = torch.full(whole.shape[:3], 3.0)
    stored, new_scales = quantize_kv(new, whole.dtype, scaled)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            expected[1 + slot // 4, :, slot % 4] = stored[token]
            if scaled:
                expected_scales[1 + slot // 4, :, slot % 4] = new_scales[token]
    assert torch.equal(_bits(whole), _bits(expected))
    if scaled:
        assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("dims", [(3, 64, 64), (1, 6, 6), (5, 80, 48)], ids=str)
@pytest.mark.parametrize("new", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", [*PLAIN, *EIGHT_BITS[:2]], ids=str)
def test_each_token_goes_to_its_slot_and_nothing_else_changes(dtype, new, dims):
    heads, head_dim, value_dim = dims
    (keys, key_cache), (values, value_cache) = (
        _cache(dtype, heads, dim) for dim in (head_dim, value_dim)
    )
    key, value = _inputs(new, heads, head_dim, value_dim)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    write_kv_cache(key, value, key_cache, value_cache, slots)
    _check(keys, key, None, False)
    _check(values, value, None, False)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_scales_of_eight_bit_caches(dtype, native, monkeypatch):
    monkeypatch.setattr(tiles, "has_fp8_e4m3", lambda: native)
    (keys, key_cache), (values, value_cache) = (_cache(dtype, 3, 48) for _ in range(2))
    key, value = _inputs(torch.bfloat16, 3, 48, 48)
    key[1] = 0
    scales = [torch.full(keys.shape[:3], 3.0) for _ in range(2)]
    key_scale, value_scale = (scale[1:-1] for scale in scales)
    slots = torch.tensor(SLOTS, dtype=torch.int64)
    write_kv_cache(
        key, value, key_cache, value_cache, slots, key_scale=key_scale, value_scale=value_scale
    )
    _check(keys, key, scales[0], True)
    _check(values, value, scales[1], True)


def test_e4m3_in_integers_is_the_conversion_of_torch(monkeypatch):
    monkeypatch.setattr(tiles, "has_fp8_e4m3", lambda: False)
    # All e4m3 numbers, the middles between them, and what lies right beside those.
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = numbers[numbers.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    x = torch.cat([x, torch.tensor([1e-9, -1e-9, 0.0, -0.0, 500.0, -1e30])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(-1, 1, 128)
    caches = [torch.zeros(len(x), 1, 1, 128).to(torch.float8_e4m3fn) for _ in range(2)]
    write_kv_cache(x, x, *caches, torch.arange(len(x)))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(_bits(caches[0][:, 0]), _bits(expected))


def test_numbers_that_are_not_finite_read_back_as_not_finite():
    key = torch.ones(2, 1, 16)
    key[0, 0, 3], key[1, 0, 5] = float("nan"), float("inf")
    caches = [torch.zeros(1, 1, 4, 16, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(1, 1, 4) for _ in range(2)]
    slots = torch.tensor([1, 2])
    write_kv_cache(key, key, *caches, slots, key_scale=scales[0], value_scale=scales[1])
    read = caches[0].float() * scales[0].unsqueeze(-1)
    assert not read[0, 0, 1:3].isfinite().any()


def test_slots_beyond_the_cache_write_nothing():
    whole, cache = _cache(torch.float32, 1, 16)
    key = torch.randn(2, 1, 16)
    write_kv_cache(key, key, cache, cache, torch.tensor([24, 1 << 30]))
    assert (whole == 7).all()


def test_nothing_to_write():
    cache = torch.zeros(1, 1, 4, 16)
    none = torch.empty(0, 1, 16)
    write_kv_cache(none, none, cache, cache, torch.empty(0, dtype=torch.int32))
    assert (cache == 0).all()
