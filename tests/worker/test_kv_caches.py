"""Where the KV cache lies, measured in a process that does nothing else."""

import subprocess
import sys

import pytest
import torch

from octavo_core.model_spec import read_model_spec
from octavo_worker.kv_caches import allocate_kv_caches

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
