"""The torch twins of the operations: any device, no compiler, and what tests compare with.

``OCTAVO_KERNELS=reference`` in the environment has the operations themselves use them.
"""

from octavo_kernels.apply_bitmask import apply_bitmask_reference
from octavo_kernels.apply_penalties import apply_penalties_reference
from octavo_kernels.compute_logprobs import compute_logprobs_reference
from octavo_kernels.copy_blocks import swap_blocks_reference
from octavo_kernels.embed_tokens import embed_tokens_reference
from octavo_kernels.fused_add_rms_norm import fused_add_rms_norm_reference
from octavo_kernels.fused_moe import fused_moe_reference
from octavo_kernels.gelu_and_mul import gelu_and_mul_reference
from octavo_kernels.layer_norm import layer_norm_reference
from octavo_kernels.mla_decode import mla_decode_reference
from octavo_kernels.paged_attention import paged_attention_reference
from octavo_kernels.quantized_matmul import quantized_matmul_reference
from octavo_kernels.rms_norm import rms_norm_reference
from octavo_kernels.rotary_embedding import rotary_embedding_reference
from octavo_kernels.rotary_write_kv_cache import rotary_write_kv_cache_reference
from octavo_kernels.sample import sample_reference
from octavo_kernels.silu_and_mul import silu_and_mul_reference
from octavo_kernels.stacked_moe import stacked_moe_reference
from octavo_kernels.write_kv_cache import write_kv_cache_reference

__all__ = [
    "apply_bitmask_reference",
    "apply_penalties_reference",
    "compute_logprobs_reference",
    "embed_tokens_reference",
    "fused_add_rms_norm_reference",
    "fused_moe_reference",
    "gelu_and_mul_reference",
    "layer_norm_reference",
    "mla_decode_reference",
    "paged_attention_reference",
    "quantized_matmul_reference",
    "rms_norm_reference",
    "rotary_embedding_reference",
    "rotary_write_kv_cache_reference",
    "sample_reference",
    "silu_and_mul_reference",
    "stacked_moe_reference",
    "swap_blocks_reference",
    "write_kv_cache_reference",
]
