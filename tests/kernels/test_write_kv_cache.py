import torch

from octavo_kernels import write_kv_cache


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
