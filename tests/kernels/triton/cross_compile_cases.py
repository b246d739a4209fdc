"""What is cross-compiled: calls of the launchers with the shapes of common models.

Tensors are on the meta device or tiny where values are read on the host; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from octavo_kernels import AttentionMetadata, SamplingMetadata
from octavo_kernels import triton as kernels
from octavo_kernels.triton import GroupedWeight, tiles

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn


def cases(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name and the call of each case of a target."""
    yield from _attention_cases()
    yield from _latent_cases()
    yield from _cache_cases()
    yield from _elementwise_cases()
    yield from _sampling_cases()
    yield from _matmul_cases(target)


def _metadata(query_lens: list[int], seq_len: int, block_size: int = 16) -> AttentionMetadata:
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.full((len(query_lens),), seq_len, dtype=torch.int32),
        block_tables=torch.zeros(len(query_lens), 1024, dtype=torch.int32),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int32),
        host_query_start_loc=starts,
        host_seq_lens=[seq_len] * len(query_lens),
        block_size=block_size,
    )


# Query heads, KV heads, head size, kind of query, kind of cache, options.
ATTENTION = {
    "starter": (9, 3, 64, BF16, BF16, {}),
    "llama": (32, 8, 128, BF16, BF16, {}),
    "gemma": (8, 4, 256, BF16, BF16, {"window": 4096, "soft_cap": 50.0}),
    "phi": (32, 32, 96, BF16, BF16, {}),
    "gpt-oss": (64, 8, 64, BF16, BF16, {"window": 128, "sinks": torch.zeros(64, dtype=BF16)}),
    "fp8": (32, 8, 128, BF16, E4M3, {}),
    "fp8 wide": (8, 4, 256, BF16, E4M3, {}),
    "int8": (32, 8, 128, BF16, torch.int8, {}),
    "float32": (9, 3, 64, F32, F32, {}),
}


def _attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, (heads, kv_heads, dim, kind, cache_kind, options) in ATTENTION.items():
        for step, query_lens in {"prefill": [512, 1], "decode": [1, 1]}.items():
            if step == "decode" and name in ("phi", "fp8 wide"):
                continue  # nothing that the others have not

            def launch(
                heads: int = heads,
                kv_heads: int = kv_heads,
                dim: int = dim,
                kind: torch.dtype = kind,
                cache_kind: torch.dtype = cache_kind,
                options: dict[str, object] = options,
                query_lens: list[int] = query_lens,
            ) -> None:
                caches = [torch.zeros(2, kv_heads, 16, dim).to(cache_kind) for _ in range(2)]
                if cache_kind.itemsize == 1:
                    scale = torch.ones(2, kv_heads, 16)
                    options = {**options, "key_scale": scale, "value_scale": scale}
                query = torch.zeros(sum(query_lens), heads, dim, dtype=kind)
                kernels.paged_attention(query, *caches, _metadata(query_lens, 600), 0.1, **options)

            yield f"attention {name} {step}", launch
            if name == "starter":
                # Where a number is 1, Triton compiles it in as a constant.
                yield f"one request {step}", partial(launch, query_lens=query_lens[:1])


def _cache_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for kind in (BF16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):

        def launch(kind: torch.dtype = kind) -> None:
            new = torch.zeros(4, 8, 128, dtype=BF16)
            caches = [torch.zeros(2, 8, 16, 128).to(kind) for _ in range(2)]
            scales = {}
            if kind.itemsize == 1:
                scales = {name: torch.zeros(2, 8, 16) for name in ("key_scale", "value_scale")}
            kernels.write_kv_cache(new, new, *caches, torch.zeros(4, dtype=torch.int32), **scales)

        yield f"write {kind}", launch


def _latent_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for kind in (BF16, E4M3):

        def launch(kind: torch.dtype = kind) -> None:
            latents = torch.zeros(2, 64, 576).to(kind)
            query = torch.zeros(2, 128, 576, dtype=BF16)
            kernels.mla_decode(query, latents, _metadata([1, 1], 600, 64), 0.1, 512)

        yield f"latent attention {kind}", launch


def _elementwise_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for size in (576, 8192):  # the starter model's, and a large one
        x, weight = torch.zeros(4, size, dtype=BF16), torch.ones(size, dtype=BF16)
        yield f"fused_add {size}", partial(kernels.fused_add_rms_norm, x, x, weight, 1e-5)
    yield "rms_norm", partial(kernels.rms_norm, x, weight, 1e-5)
    yield "layer_norm", partial(kernels.layer_norm, x, weight, weight, 1e-5)
    yield "quantize_rows", partial(kernels.quantize_rows, x, torch.int8)
    gated = torch.zeros(4, 2 * 14336, dtype=BF16)
    yield "silu_and_mul", partial(kernels.silu_and_mul, gated)
    yield "gelu_and_mul", partial(kernels.gelu_and_mul, gated)
    yield "gelu_and_mul tanh", partial(kernels.gelu_and_mul, gated, approximate="tanh")
    positions = torch.zeros(4, dtype=torch.int64)
    for dim, rotary_dim, interleaved in ((128, 128, False), (128, 128, True), (80, 32, False)):
        query, key = (torch.zeros(4, heads, dim, dtype=BF16) for heads in (32, 8))
        cache = torch.zeros(64, rotary_dim)
        rotate = partial(kernels.rotary_embedding, positions, query, key, cache)
        yield f"rotary {dim} {rotary_dim} {interleaved}", partial(rotate, interleaved=interleaved)
    blocks = torch.zeros(4, 8, 16, 128, dtype=BF16)
    yield "copy_blocks", partial(kernels.copy_blocks, [blocks], torch.tensor([[0, 1]]))


def _sampling_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    logits = torch.zeros(2, 128256)
    rows, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    for name, count in (("sample", 2), ("one row", 1)):
        floats, integers = np.ones(count, np.float32), np.ones(count, np.int64)
        metadata = SamplingMetadata(
            floats, integers.astype(np.int32), floats, floats, integers, integers
        )
        yield name, partial(kernels.sample, logits[:count], metadata)
    yield "logprobs", partial(kernels.compute_logprobs, logits, rows, 5)
    bitmask = torch.zeros(2, 4008, dtype=torch.int32)
    yield "bitmask", partial(kernels.apply_bitmask, logits, bitmask, rows)
    tokens = torch.zeros(2, 4096, dtype=torch.int32)
    penalize = partial(kernels.apply_penalties, logits, tokens, rows, rows)
    yield "penalties", partial(penalize, ones, ones, ones)


def _matmul_cases(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    size, rows = 4096, 4096
    nibbles = torch.zeros(rows, size // 2, dtype=torch.uint8)
    by_32 = torch.zeros(rows, size // 32, dtype=F16)
    by_128 = torch.zeros(rows, size // 128, dtype=F16)
    zeros = torch.zeros(rows, size // 128, dtype=torch.uint8)
    eight = torch.zeros(rows, size, dtype=torch.int8)
    fp8 = torch.zeros(rows, size).to(E4M3)
    grouped = {
        "q4_0": GroupedWeight(nibbles, by_32, None, None, 32, 8),
        "q4_1": GroupedWeight(nibbles, by_32, None, by_32, 32),
        "q8_0": GroupedWeight(eight, by_32, None, None, 32),
        "gptq": GroupedWeight(nibbles, by_128, zeros, None, 128),
        "fp8": GroupedWeight(fp8, torch.zeros(rows, 1), None, None, size),
    }
    # One for each tile that `tiles.matmul` knows.
    for num_tokens in (1, 64, 512):
        x = torch.zeros(num_tokens, size, dtype=BF16)
        for name, weight in grouped.items():
            # The middle tile with the most numbers beside the codes.
            if num_tokens == 64 and name != "q4_1":
                continue
            yield f"{name} {num_tokens}", partial(kernels.grouped_matmul, x, weight)
        scales = torch.ones(rows)
        yield f"w8a8 {num_tokens}", partial(kernels.scaled_matmul, x, eight, scales)
        if target == "sm_90" and num_tokens != 64:
            yield f"fp8 w8a8 {num_tokens}", partial(kernels.scaled_matmul, x, fp8, scales)
        if num_tokens == 64:
            continue
        gate_up, down = (
            torch.zeros(2, 2048, 1024, dtype=BF16),
            torch.zeros(2, 1024, 1024, dtype=BF16),
        )
        ids = torch.zeros(num_tokens, 2, dtype=torch.int64)
        routed = torch.ones(num_tokens, 2)
        x = torch.zeros(num_tokens, 1024, dtype=BF16)
        arguments = x, gate_up, down, routed, ids, kernels.silu_and_mul
        yield f"experts {num_tokens}", partial(kernels.stacked_moe, *arguments)
        if num_tokens == 1:
            biases = {
                "gate_up_bias": torch.zeros(2, 2048, dtype=BF16),
                "down_bias": torch.zeros(2, 1024, dtype=BF16),
            }
            yield "experts with biases", partial(kernels.stacked_moe, *arguments, **biases)
    assert tiles.matmul(target, 512, 2).rows == 128
