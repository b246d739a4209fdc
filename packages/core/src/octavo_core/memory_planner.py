"""From bytes to KV blocks: pure arithmetic, no device.

block_bytes     = layers × block_size × kv_heads × 2 × head_dim × dtype_bytes
num_blocks      = available bytes // block_bytes
max_concurrency = num_blocks × block_size / max_model_len
"""

from __future__ import annotations

import msgspec

from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError
from octavo_core.model_spec import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVCachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the KV cache is laid out.

    Attributes:
        kv_bytes_per_token: K and V of one token over all layers.
        block_bytes: K and V of one block over all layers.
        kv_cache_tokens: Tokens that all blocks hold.
        max_concurrency: How many requests of ``max_model_len`` fit at once.
    """

    kv_bytes_per_token: int
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of ``max_model_len`` fit at once."""
        return self.kv_cache_tokens / self.max_model_len


def plan_kv_cache(
    spec: ModelSpec, config: EngineConfig, available_bytes: int, dtype: str
) -> KVCachePlan:
    """Turn the memory that is left for the KV cache into blocks.

    Args:
        available_bytes: Bytes that the worker with the least can spare.
        dtype: Type of K and V.

    Raises:
        ConfigError: ``max_model_len`` is longer than the model's context, or one request of
            that length does not fit. The message says what would.
    """
    max_model_len = resolve_max_model_len(spec, config)
    bytes_per_token = spec.kv_bytes_per_token(DTYPE_BYTES[dtype])
    block_size = config.cache.block_size
    block_bytes = bytes_per_token * block_size
    num_blocks = config.cache.num_gpu_blocks_override or available_bytes // block_bytes
    plan = KVCachePlan(
        kv_bytes_per_token=bytes_per_token,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )
    if plan.kv_cache_tokens < max_model_len:
        raise _does_not_fit(plan, config)
    return plan


def resolve_max_model_len(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the most tokens that a request may have.

    Raises:
        ConfigError: More is asked for than the model was made for.
    """
    asked, derived = config.model.max_model_len, spec.max_position_embeddings
    if asked is None:
        return derived
    if asked > derived:
        raise ConfigError(
            f"max_model_len is {asked} (from {config.source_of('max_model_len')}), but the model's "
            f"context has {derived} tokens; ask for at most that.",
            field="max_model_len",
        )
    return asked


def _does_not_fit(plan: KVCachePlan, config: EngineConfig) -> ConfigError:
    needed_blocks = -(-plan.max_model_len // plan.block_size)
    source = (
        f"num_gpu_blocks_override={plan.num_blocks}"
        if config.cache.num_gpu_blocks_override
        else f"{format_bytes(plan.num_blocks * plan.block_bytes)} of memory"
    )
    advice = [f"--kv-cache-memory {needed_blocks * plan.block_bytes}"]
    if plan.num_blocks:
        advice.insert(0, f"--max-model-len {plan.kv_cache_tokens}")
    return ConfigError(
        f"max_model_len is {plan.max_model_len} "
        f"(from {config.source_of('max_model_len')}), and one request of that length needs "
        f"{format_bytes(needed_blocks * plan.block_bytes)} of KV cache, but {source} holds "
        f"{plan.kv_cache_tokens} tokens; use {' or '.join(advice)}.",
        field="max_model_len",
    )


def format_bytes(count: int) -> str:
    """Write a number of bytes for a person, for example ``1.50 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.2f} {unit}" if unit != "B" else f"{count} B"
        value /= 1024
    return f"{value:.2f} TiB"
