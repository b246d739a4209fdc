"""Operations of LLM inference over a paged KV cache: one function each, on CPU and GPU."""

from octavo_kernels.apply_bitmask import apply_bitmask
from octavo_kernels.apply_penalties import apply_penalties
from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.compile_kernels import compile_kernels, operation_kernels, serving_kernels
from octavo_kernels.compute_logprobs import Logprobs, compute_logprobs
from octavo_kernels.copy_blocks import copy_blocks, swap_blocks
from octavo_kernels.decoder import Decoder, DecoderLayer
from octavo_kernels.decoder_step import BatchTables, DecoderStep, fits_step
from octavo_kernels.dequantize import DEQUANTIZABLE_TYPES, dequantize
from octavo_kernels.embed_tokens import embed_tokens
from octavo_kernels.filter_logits import filter_logits
from octavo_kernels.fused_add_rms_norm import fused_add_rms_norm
from octavo_kernels.fused_moe import Experts, fused_moe
from octavo_kernels.gelu_and_mul import gelu_and_mul
from octavo_kernels.huge_page_memory import HUGE_PAGE, HugePageMemory, map_memory, populate_memory
from octavo_kernels.layer_norm import layer_norm
from octavo_kernels.mask_logits import TokenEntries, mask_logits
from octavo_kernels.mla_decode import mla_decode
from octavo_kernels.pack_weight import (
    pack_awq_weight,
    pack_dense_weight,
    pack_fp8_weight,
    pack_gptq_weight,
    pack_weight,
)
from octavo_kernels.packed_weight import WEIGHT_KINDS, PackedWeight, concatenate_weights
from octavo_kernels.paged_attention import paged_attention
from octavo_kernels.quantize_weight import quantize_weight
from octavo_kernels.quantized_matmul import quantized_matmul
from octavo_kernels.rms_norm import rms_norm
from octavo_kernels.rotary_embedding import rotary_embedding
from octavo_kernels.rotary_write_kv_cache import rotary_write_kv_cache
from octavo_kernels.sample import SamplingMetadata, sample
from octavo_kernels.sample_noise import sample_noise
from octavo_kernels.select_experts import select_experts
from octavo_kernels.silu_and_mul import silu_and_mul
from octavo_kernels.stacked_moe import run_experts, stacked_moe
from octavo_kernels.unpack_weight import unpack_weight
from octavo_kernels.write_kv_cache import write_kv_cache

__version__ = "0.1.0"

__all__ = [
    "DEQUANTIZABLE_TYPES",
    "HUGE_PAGE",
    "WEIGHT_KINDS",
    "AttentionMetadata",
    "BatchTables",
    "Decoder",
    "DecoderLayer",
    "DecoderStep",
    "Experts",
    "HugePageMemory",
    "Logprobs",
    "PackedWeight",
    "SamplingMetadata",
    "TokenEntries",
    "apply_bitmask",
    "apply_penalties",
    "compile_kernels",
    "compute_logprobs",
    "concatenate_weights",
    "copy_blocks",
    "dequantize",
    "embed_tokens",
    "filter_logits",
    "fits_step",
    "fused_add_rms_norm",
    "fused_moe",
    "gelu_and_mul",
    "layer_norm",
    "map_memory",
    "mask_logits",
    "mla_decode",
    "operation_kernels",
    "pack_awq_weight",
    "pack_dense_weight",
    "pack_fp8_weight",
    "pack_gptq_weight",
    "pack_weight",
    "paged_attention",
    "populate_memory",
    "quantize_weight",
    "quantized_matmul",
    "rms_norm",
    "rotary_embedding",
    "rotary_write_kv_cache",
    "run_experts",
    "sample",
    "sample_noise",
    "select_experts",
    "serving_kernels",
    "silu_and_mul",
    "stacked_moe",
    "swap_blocks",
    "unpack_weight",
    "write_kv_cache",
]
