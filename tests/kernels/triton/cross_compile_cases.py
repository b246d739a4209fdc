"""What is cross-compiled: calls of the launchers with the shapes of common models.

Tensors are on the meta device or tiny where values are read on the host; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from octavo_kernels import AttentionMetadata
from octavo_kernels import triton as kernels

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def cases(target: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name and the call of each case of a target."""
    yield from _attention_cases()
    yield from _cache_cases()


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
    "float16": (32, 8, 128, F16, F16, {}),
    "gemma": (8, 4, 256, BF16, BF16, {"window": 4096, "soft_cap": 50.0}),
    "phi": (32, 32, 96, BF16, BF16, {}),
    "gpt-oss": (64, 8, 64, BF16, BF16, {"window": 128, "sinks": torch.zeros(64, dtype=BF16)}),
    "fp8": (32, 8, 128, BF16, torch.float8_e4m3fn, {}),
    "fp8 wide": (8, 4, 256, BF16, torch.float8_e4m3fn, {}),
    "fp8 e5m2": (32, 8, 128, BF16, torch.float8_e5m2, {}),
    "int8": (32, 8, 128, BF16, torch.int8, {}),
    "float32": (9, 3, 64, F32, F32, {}),
}


def _attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, (heads, kv_heads, dim, kind, cache_kind, options) in ATTENTION.items():
        for step, query_lens in {"prefill": [512, 1], "decode": [1, 1]}.items():

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
