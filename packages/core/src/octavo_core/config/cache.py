"""Settings: the paged KV cache."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo_core.config.field_types import BYTES, PositiveInt


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens in a KV block.")] = 16
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV blocks of prompts that start alike.")
    ] = True
    kv_cache_memory: Annotated[
        PositiveInt | None,
        Meta(
            description="Bytes for the KV cache, for example 2GiB; on a CPU the default is the "
            "smaller of 4GiB and half the free memory.",
            extra=BYTES,
        ),
    ] = None
    swap_space: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of host memory for KV blocks that are evicted from the device.",
            extra=BYTES,
        ),
    ] = 0
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Type of K and V; auto is float16 on a CPU, and dtype on a GPU or where "
            "quantization is none."
        ),
    ] = "auto"
    num_gpu_blocks_override: Annotated[
        PositiveInt | None, Meta(description="Exact number of KV blocks, whatever memory there is.")
    ] = None
    kv_events_endpoint: Annotated[
        str | None,
        Meta(
            description="ZMQ address (ipc:// or tcp://127.0.0.1:PORT) on which routers hear which "
            "KV blocks come and go."
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of the device's memory the engine may use.")
    ] = 0.92
