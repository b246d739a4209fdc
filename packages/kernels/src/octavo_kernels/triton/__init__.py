"""The operations as Triton kernels, for NVIDIA and AMD GPUs.

Importing this package needs triton, which comes with torch's GPU builds. The functions take
tensors of one device and check nothing: `octavo_kernels`' own functions check, and call these
for tensors of a GPU.
"""

from octavo_kernels.triton.apply_bitmask import apply_bitmask
from octavo_kernels.triton.apply_penalties import apply_penalties
from octavo_kernels.triton.compute_logprobs import compute_logprobs
from octavo_kernels.triton.copy_blocks import copy_blocks, swap_blocks
from octavo_kernels.triton.gated_activation import gelu_and_mul, silu_and_mul
from octavo_kernels.triton.grouped_matmul import grouped_matmul
from octavo_kernels.triton.grouped_weight import GROUPED_KINDS, GroupedWeight, group_weight
from octavo_kernels.triton.layer_norm import layer_norm
from octavo_kernels.triton.mla_decode import mla_decode
from octavo_kernels.triton.paged_attention import paged_attention
from octavo_kernels.triton.quantized_matmul import quantized_matmul
from octavo_kernels.triton.rms_norm import fused_add_rms_norm, rms_norm
from octavo_kernels.triton.rotary_embedding import rotary_embedding
from octavo_kernels.triton.sample import sample
from octavo_kernels.triton.scaled_matmul import quantize_rows, scaled_matmul
from octavo_kernels.triton.stacked_moe import stacked_moe
from octavo_kernels.triton.write_kv_cache import write_kv_cache

__all__ = [
    "GROUPED_KINDS",
    "GroupedWeight",
    "apply_bitmask",
    "apply_penalties",
    "compute_logprobs",
    "copy_blocks",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "group_weight",
    "grouped_matmul",
    "layer_norm",
    "mla_decode",
    "paged_attention",
    "quantize_rows",
    "quantized_matmul",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "scaled_matmul",
    "silu_and_mul",
    "stacked_moe",
    "swap_blocks",
    "write_kv_cache",
]
