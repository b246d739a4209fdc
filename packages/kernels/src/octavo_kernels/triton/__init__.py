"""The operations as Triton kernels, for NVIDIA and AMD GPUs.

Importing this package needs triton, which comes with torch's GPU builds. The functions take
tensors of one device and check nothing: `octavo_kernels`' own functions check, and call these
for tensors of a GPU.
"""

from octavo_kernels.triton.paged_attention import paged_attention
from octavo_kernels.triton.write_kv_cache import write_kv_cache

__all__ = [
    "paged_attention",
    "write_kv_cache",
]
