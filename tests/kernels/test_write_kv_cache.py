"""Writing the KV cache in all its types, alone and together with the rotation."""

import math

import pytest
import torch

from octavo_kernels import rotary_embedding, rotary_write_kv_cache, write_kv_cache
from octavo_kernels.kv_quantization import dequantize_kv
from octavo_kernels.write_kv_cache import write_kv_cache_reference


def _caches(num_blocks=5, num_kv_heads=3, block_size=4, head_dim=6):
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return torch.full(shape, 7.0), torch.full(shape, 8.0)


def test_each_token_goes_to_its_slot_and_nothing_else_changes():
    key_cache, value_cache = _caches()
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    qkv = torch.randn(5, 36)
    key, value = qkv[:, :18].view(5, 3, 6), qkv[:, 18:].view(5, 3, 6)
    slots = [19, 0, -1, 7, 8]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected_key[slot // 4, :, slot % 4] = key[token]
            expected_value[slot // 4, :, slot % 4] = value[token]
    write_kv_cache(key, value, key_cache, value_cache, torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(key_cache, expected_key)
    assert torch.equal(value_cache, expected_value)


def test_nothing_to_write():
    key_cache, value_cache = _caches()
    before = key_cache.clone()
    none = torch.empty(0, 3, 6)
    write_kv_cache(none, none, key_cache, value_cache, torch.empty(0, dtype=torch.int32))
    one = torch.randn(1, 3, 6)
    write_kv_cache(one, one, key_cache, value_cache, torch.tensor([-1], dtype=torch.int32))
    assert torch.equal(key_cache, before)


def test_the_cache_may_have_another_type():
    key_cache, value_cache = (cache.bfloat16() for cache in _caches())
    key = torch.randn(1, 3, 6)
    write_kv_cache(key, key, key_cache, value_cache, torch.tensor([6], dtype=torch.int32))
    assert torch.equal(key_cache[1, :, 2], key[0].bfloat16())


ALL_DTYPES = [
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.float8_e4m3fn, False),
    (torch.float8_e5m2, False),
    (torch.float8_e4m3fn, True),
    (torch.float8_e5m2, True),
    (torch.int8, True),
]


def _empty_caches(dtype, scaled, head_dim=24, value_dim=16):
    key_cache = torch.zeros(7, 3, 8, head_dim, dtype=dtype)
    value_cache = torch.zeros(7, 3, 8, value_dim, dtype=dtype)
    scales = [torch.zeros(7, 3, 8), torch.zeros(7, 3, 8)] if scaled else [None, None]
    return key_cache, value_cache, *scales


def _assert_equal(found, expected):
    """Bit for bit but for the payload of a NaN."""
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            if one.dtype.itemsize == 1:
                one, other = one.view(torch.int8), other.view(torch.int8)
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def _numbers(num_tokens, heads, dim):
    """Numbers of every size, among them those that a type can't hold."""
    x = torch.randn(num_tokens, heads, dim) * torch.logspace(-9, 6, num_tokens)[:, None, None]
    x[0, 0] = 0
    if num_tokens > 4:
        x[1, 0, 3], x[2, 1, 5], x[3, 2, 0] = math.nan, math.inf, -math.inf
        x[4] = torch.linspace(-500, 500, heads * dim).view(heads, dim)
    return x


@pytest.mark.parametrize(("dtype", "scaled"), ALL_DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 41])
def test_kernel_and_twin_write_the_same_bytes(dtype, scaled, num_tokens):
    wide = _numbers(num_tokens, 3, 40)
    key, value = wide[..., :24].contiguous(), wide[..., 24:].contiguous()
    slots = torch.randperm(56)[:num_tokens].to(torch.int32)
    slots[num_tokens // 2] = -1
    found, expected = _empty_caches(dtype, scaled), _empty_caches(dtype, scaled)
    for write, caches in ((write_kv_cache, found), (write_kv_cache_reference, expected)):
        write(key, value, *caches[:2], slots, key_scale=caches[2], value_scale=caches[3])
    _assert_equal(found, expected)


@pytest.mark.parametrize(("dtype", "scaled"), ALL_DTYPES, ids=str)
def test_what_was_written_reads_back(dtype, scaled):
    key_cache, value_cache, key_scale, value_scale = _empty_caches(dtype, scaled)
    key, value = torch.randn(20, 3, 24), torch.randn(20, 3, 16) * 5
    slots = torch.arange(20)
    write_kv_cache(
        key, value, key_cache, value_cache, slots, key_scale=key_scale, value_scale=value_scale
    )
    # Half of the last bit of the type, of numbers up to the largest of a head.
    relative = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.int8: 2**-7}
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        read = dequantize_kv(cache, scale).transpose(1, 2).reshape(56, 3, -1)[:20]
        error = (read - new).abs() / new.abs().amax(-1, keepdim=True)
        assert error.max() <= relative.get(dtype, 2**-8)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_is_rounded_to_the_nearest_even(dtype):
    """All numbers of the type, all that lie halfway between two, and their neighbours."""
    codes = torch.arange(0, 127 if dtype == torch.float8_e4m3fn else 124, dtype=torch.uint8)
    exact = codes.view(dtype).float()
    halfway = (exact[1:] + exact[:-1]) / 2
    above, below = halfway.nextafter(torch.tensor(1e9)), halfway.nextafter(torch.tensor(-1.0))
    numbers = torch.cat((exact, halfway, above, below))
    numbers = torch.cat((numbers, -numbers, torch.tensor([math.nan])))
    numbers = torch.cat((numbers, torch.zeros(-len(numbers) % 8))).view(1, 1, -1)
    cache = torch.zeros(1, 1, 1, numbers.shape[-1], dtype=dtype)
    write_kv_cache(numbers, numbers, cache, cache.clone(), torch.tensor([0]))
    assert torch.equal(
        cache.view(torch.uint8).flatten(), numbers.to(dtype).view(torch.uint8).flatten()
    )


def test_caches_that_do_not_belong_together_are_refused():
    key_cache, value_cache, key_scale, _ = _empty_caches(torch.int8, True)
    key, slots = torch.randn(1, 3, 24), torch.tensor([0])
    with pytest.raises(ValueError, match="int8 needs key_scale"):
        write_kv_cache(key, key, key_cache, value_cache, slots)
    with pytest.raises(ValueError, match="both key_scale and value_scale"):
        write_kv_cache(key, key, key_cache, value_cache, slots, key_scale=key_scale)
    with pytest.raises(ValueError, match="both must be one of"):
        write_kv_cache(key, key, key_cache.double(), value_cache, slots)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 16, 24])
@pytest.mark.parametrize(("dtype", "scaled"), ALL_DTYPES[:2] + ALL_DTYPES[-1:], ids=str)
def test_the_fused_write_equals_the_two_steps(dtype, scaled, rotary_dim, interleaved):
    num_tokens = 37
    qkv = torch.randn(num_tokens, 6 * 24 + 3 * 24 + 3 * 16)
    query, key = qkv[:, :144].view(-1, 6, 24), qkv[:, 144:216].view(-1, 3, 24)
    value = qkv[:, 216:].view(-1, 3, 16)
    angles = torch.rand(50, rotary_dim // 2) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(56)[:num_tokens].to(torch.int32)
    found, expected = _empty_caches(dtype, scaled), _empty_caches(dtype, scaled)
    rotated = rotary_write_kv_cache(
        positions, query, key, value, cos_sin, *found[:2], slots,
        interleaved=interleaved, key_scale=found[2], value_scale=found[3],
    )  # fmt: skip
    turned, key = rotary_embedding(positions, query, key, cos_sin, interleaved=interleaved)
    write_kv_cache(key, value, *expected[:2], slots, key_scale=expected[2], value_scale=expected[3])
    assert torch.equal(rotated, turned)
    _assert_equal(found, expected)
