"""Where the KV cache lies, measured in a process that does nothing else."""

import subprocess
import sys

import msgspec
import pytest
import torch

from octavo_core.model_spec import read_model_spec
from octavo_worker import kv_caches
from octavo_worker.kv_caches import allocate_kv_caches, allocate_kv_pool

MIB = 1 << 20

# A heap with a hole of 750 MiB, as a model leaves it that is replaced by another one: calloc
# takes memory from there, and has to clear it.
_MEASURE = """
import sys, numpy as np, psutil, torch
from octavo_core.model_spec import read_model_spec
from octavo_worker.kv_caches import allocate_kv_caches

np.empty(31 << 20, np.uint8)  # from here on glibc takes arrays of this size from its heap
weights = [np.empty(25 << 20, np.uint8) for _ in range(30)]
above = np.empty(25 << 20, np.uint8)
del weights
resident = psutil.Process().memory_info
before = resident().rss
caches = allocate_kv_caches(
    read_model_spec(sys.argv[1]), 200_000, 16, torch.float32, torch.device("cpu")
)
unused = resident().rss
for cache in caches:
    cache.key[:2000] = 1
    cache.value[:2000] = 1
print(unused - before, resident().rss - unused, sum(c.nbytes for kv in caches for c in kv))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other ways")
def test_the_cache_takes_no_memory_before_it_is_used(tiny_folder):
    command = [sys.executable, "-c", _MEASURE, str(tiny_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    unused, used, whole = map(int, done.stdout.split())
    assert whole == 200_000 * 16 * 512
    assert unused < 50 * MIB
    # One block in a hundred is used; at the edges that may be a huge page more of each tensor.
    assert whole // 100 - MIB < used < whole // 100 + 4 * 2 * 2 * MIB + 10 * MIB


def test_the_cache_is_zero_and_may_be_written(tiny_folder):
    spec = read_model_spec(tiny_folder)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        caches = allocate_kv_caches(spec, 7, 16, dtype, torch.device("cpu"))
        assert len(caches) == spec.num_hidden_layers
        for cache in caches:
            for tensor in cache:
                assert tensor.shape == (7, spec.num_key_value_heads, 16, spec.head_dim)
                assert tensor.dtype == dtype
                assert not tensor.float().any()
                tensor[3] = torch.ones_like(tensor[3])
                assert tensor.float().sum() == tensor[3].numel()


_MEASURE_POOL = """
import sys, psutil, torch
from octavo_core.model_spec import read_model_spec
from octavo_worker.kv_caches import allocate_kv_pool

resident = psutil.Process().memory_info
spec = read_model_spec(sys.argv[1])
caches, step = allocate_kv_pool(spec, 200_000, 16, torch.float32)
before = resident().rss
for cache in caches:
    for tensor in cache:
        tensor[: 1000 * step : step] = 1
print(resident().rss - before, 1000 * sum(tensor[0].nbytes for kv in caches for tensor in kv))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other ways")
def test_a_pool_grows_in_one_place(tiny_folder):
    command = [sys.executable, "-c", _MEASURE_POOL, str(tiny_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    taken, used = map(int, done.stdout.split())
    assert used == 1000 * 16 * 512
    # At both ends a huge page, whatever the number of layers.
    assert used - MIB < taken < used + 2 * 2 * MIB + 3 * MIB


def test_what_a_pool_keeps_of_a_block_is_its_own(tiny_folder):
    spec = read_model_spec(tiny_folder)
    caches, step = allocate_kv_pool(spec, 7, 16, torch.float32)
    tensors = [tensor for cache in caches for tensor in cache]
    shape = (spec.num_key_value_heads, 16, spec.head_dim)
    for number, tensor in enumerate(tensors):
        assert not tensor[::step].any()
        for block in range(7):
            tensor[block * step] = torch.full(shape, 10.0 * number + block)
    for number, tensor in enumerate(tensors):
        assert tensor.shape[1:] == shape
        expected = 10.0 * number + torch.arange(7.0).view(7, 1, 1, 1).expand(7, *shape)
        assert torch.equal(tensor[::step], expected)


@pytest.mark.parametrize("wide_values", [True, False])
def test_where_blocks_can_not_lie_together_each_layer_has_its_own(
    tiny_folder, monkeypatch, wide_values
):
    spec = read_model_spec(tiny_folder)
    if wide_values:
        spec = msgspec.structs.replace(spec, head_dim_v=2 * spec.head_dim)
    else:  # more slots than the kernels can count
        monkeypatch.setattr(kv_caches, "_MAX_SLOTS", 7 * 16 * 4)
    caches, step = allocate_kv_pool(spec, 7, 16, torch.float32)
    assert step == 1
    assert {len(tensor) for cache in caches for tensor in cache} == {7}
