"""From bytes to KV blocks: pure arithmetic, no device.

block_bytes     = layers × block_size × kv_heads × 2 × head_dim × dtype_bytes
num_blocks      = available bytes // block_bytes
max_concurrency = num_blocks × block_size / max_model_len

`plan_kv_cache` is what an engine does with bytes that its workers have measured.
`plan_memory` does the same for a device that need not be there, from estimates.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import msgspec

from octavo_core.activation_estimate import estimate_activations
from octavo_core.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo_core.errors import ConfigError, ModelError
from octavo_core.gguf import GGUFHeader
from octavo_core.kv_cache_layout import KVCacheLayout, lay_out_kv_cache
from octavo_core.model_spec import ModelSpec
from octavo_core.quantization import QUANTIZATIONS, Quantization
from octavo_core.weight_estimate import (
    Weights,
    estimate_weights,
    main_type,
    weights_of_gguf,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}

# A CPU's KV cache is the smaller of this and half of what is free.
DEFAULT_CPU_KV_CACHE = 4 << 30


class KVCachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the KV cache is laid out.

    Attributes:
        layout: Groups of layers and the sizes that follow from them.
        num_blocks: Blocks in the pool.
        max_model_len: Most tokens of a request.
        num_in_flight: Most tokens of a request in one step.
    """

    layout: KVCacheLayout
    num_blocks: int
    max_model_len: int
    num_in_flight: int = 1

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return self.layout.kv_bytes_per_token

    @property
    def block_bytes(self) -> int:
        """K and V of one block, over the layers of one group."""
        return self.layout.block_bytes

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.layout.block_size

    @property
    def blocks_per_request(self) -> int:
        """Blocks that one request of `max_model_len` holds at most."""
        return self.layout.blocks_per_request(self.max_model_len, self.num_in_flight)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that all blocks hold, in requests of `max_model_len` if layers have windows."""
        if all(group.window is None for group in self.layout.groups):
            return self.num_blocks * self.block_size
        return self.num_blocks * self.max_model_len // self.blocks_per_request

    @property
    def max_concurrency(self) -> float:
        """How many requests of ``max_model_len`` fit at once."""
        return self.kv_cache_tokens / self.max_model_len

    @property
    def longest_request(self) -> int:
        """Most tokens of a request, within `max_model_len`, that the blocks hold."""
        return self.layout.longest_request(self.num_blocks, self.max_model_len, self.num_in_flight)

    @property
    def fits(self) -> bool:
        """True if one request of `max_model_len` fits."""
        return self.blocks_per_request <= self.num_blocks


def plan_kv_cache(
    spec: ModelSpec,
    config: EngineConfig,
    available_bytes: int,
    dtype: str,
    device_memory: int | None = None,
) -> KVCachePlan:
    """Turn the memory that is left for the KV cache into blocks.

    Args:
        spec: Hyper-parameters.
        config: All settings. A ``max_model_len`` of ``auto`` takes the longest that fits.
        available_bytes: Bytes that the worker with the least can spare.
        dtype: Type of K and V.
        device_memory: All bytes of the device, if `available_bytes` is what is left of
            ``gpu_memory_utilization``; so that the advice can name a larger share.

    An encoder keeps nothing, and its plan has no blocks.

    Raises:
        ConfigError: ``max_model_len`` is longer than the model's context, or one request of
            that length does not fit. The message says what would.
        ModelError: No layer of the model has a KV cache.
    """
    stages = pipeline_stages(spec.num_hidden_layers, config.parallel.pipeline_parallel_size)
    layout = lay_out_kv_cache(
        spec.layers,
        block_size=config.cache.block_size,
        dtype_bytes=KV_DTYPE_BYTES[dtype],
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        # Nobody has more layers than the first, so what it can hold all others can.
        stage=stages[0],
    )
    if spec.is_encoder:
        length = resolve_max_model_len(spec, config)
        return KVCachePlan(layout=layout, num_blocks=0, max_model_len=length)
    if not layout.block_bytes:
        raise _no_kv_cache(spec)
    num_blocks = config.cache.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = max(available_bytes, 0) // layout.block_bytes
    plan = KVCachePlan(
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=resolve_max_model_len(spec, config),
        num_in_flight=config.scheduler.max_num_batched_tokens,
    )
    if config.model.max_model_len == "auto" and plan.longest_request > 1:
        return msgspec.structs.replace(plan, max_model_len=plan.longest_request)
    if not plan.fits:
        missing = plan.blocks_per_request * plan.block_bytes - max(available_bytes, 0)
        share = missing / device_memory if device_memory is not None else None
        raise _does_not_fit(plan, config, dtype, share)
    return plan


def resolve_max_model_len(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the most tokens that a request may have, as far as memory allows.

    ``auto`` is the model's context here; `plan_kv_cache` shortens it to what fits.

    Raises:
        ConfigError: More is asked for than the model was made for.
    """
    source = config.source_of("max_model_len")
    return _limit_length(spec, config.model.max_model_len, source)


def longest_model_len(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the most tokens that a request might have, before the memory is known.

    Unlike `resolve_max_model_len` this never refuses.
    """
    asked = config.model.max_model_len
    return asked if isinstance(asked, int) else _default_length(spec)


def _limit_length(spec: ModelSpec, asked: int | str | None, source: str) -> int:
    derived = spec.context_length
    if not isinstance(asked, int):
        return _default_length(spec)
    if asked > derived:
        raise ConfigError(
            f"max_model_len is {asked} (from {source}), but the model's context has {derived} "
            f"tokens; ask for at most that.",
            field="max_model_len",
        )
    return asked


def _default_length(spec: ModelSpec) -> int:
    return min(spec.context_length, spec.max_seq_length or spec.context_length)


def _no_kv_cache(spec: ModelSpec) -> ModelError:
    return ModelError(f"{spec.architecture} keeps no K and V, so there is nothing to plan.")


def _does_not_fit(
    plan: KVCachePlan, config: EngineConfig, dtype: str, missing_share: float | None
) -> ConfigError:
    """Say what one request needs, what there is, and each setting with the value that would do.

    Args:
        plan: The plan in which one request has no room.
        config: All settings.
        dtype: Type of K and V.
        missing_share: What is missing, as a share of the device's memory, if that is known.
    """
    needed_blocks = plan.blocks_per_request
    override = config.cache.num_gpu_blocks_override
    have = (
        f"num_gpu_blocks_override={override}"
        if override
        else f"{format_bytes(plan.num_blocks * plan.block_bytes)} of memory"
    )
    advice = []
    if plan.longest_request > 1:
        advice.append(f"--max-model-len {plan.longest_request} (or auto)")
    if override:
        advice.append(f"--num-gpu-blocks-override {needed_blocks}")
    else:
        advice += _memory_advice(plan, config, dtype, missing_share)
    asked = config.model.max_model_len
    length = f"auto, at most {plan.max_model_len}" if asked == "auto" else str(plan.max_model_len)
    return ConfigError(
        f"max_model_len is {length} "
        f"(from {config.source_of('max_model_len')}), and one request of {plan.max_model_len} "
        f"tokens needs {format_bytes(needed_blocks * plan.block_bytes)} of KV cache, but {have} "
        f"holds {plan.longest_request} tokens; use {' or '.join(advice)}.",
        field="max_model_len",
    )


def _memory_advice(
    plan: KVCachePlan, config: EngineConfig, dtype: str, missing_share: float | None
) -> list[str]:
    cache = config.cache
    advice = []
    if missing_share is not None and cache.kv_cache_memory is None:
        share = math.ceil((cache.gpu_memory_utilization + missing_share) * 100) / 100
        if share <= 1:
            advice.append(f"--gpu-memory-utilization {share:g}")
    advice.append(f"--kv-cache-memory {plan.blocks_per_request * plan.block_bytes}")
    if dtype == "float32" and plan.blocks_per_request <= 2 * plan.num_blocks:
        advice.append("--kv-cache-dtype bfloat16")
    return advice


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made for.

    Attributes:
        device: What to call the device.
        device_memory: Bytes of one device.
        is_host: The device is this machine's CPU, whose KV cache follows the CPU's rule: the
            smaller of 4 GiB and half of what is free beside the weights.
        non_kv_memory: Bytes on each device that are not KV cache, if they are known.
        kv_cache_memory: Bytes on each device for the KV cache, in place of what is left.
        quantization: A name of `QUANTIZATIONS`, ``none``, or None for the checkpoint's own.
    """

    device: str
    device_memory: int
    is_host: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_memory_utilization: float = CacheConfig().gpu_memory_utilization
    non_kv_memory: int | None = None
    kv_cache_memory: int | None = None
    max_model_len: int | Literal["auto"] | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    max_num_seqs: int = SchedulerConfig().max_num_seqs
    max_num_batched_tokens: int = SchedulerConfig().max_num_batched_tokens
    block_size: int = CacheConfig().block_size

    @property
    def is_packed_on_host(self) -> bool:
        """True where a CPU keeps the weights as they are and computes in float32."""
        return self.is_host and self.quantization != "none"


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of one device goes; of the fullest one, if there are several.

    Attributes:
        settings: What was planned for.
        dtype: Type of activations.
        weights_dtype: Type of weights that are not quantized.
        kv_cache_dtype: Type of K and V.
        quantization: How weights are stored, or None.
        num_parameters: Of the whole model.
        usable_bytes: What the engine may use of the device.
        weights_bytes: Of this device.
        weights_source: ``estimated`` from shapes, or ``file``.
        activation_bytes: Peak of a full step.
        activation_source: ``estimated``, or ``given`` as what is not weights of
            ``non_kv_memory``.
        left_bytes: What weights and activations leave of the usable bytes; negative if they
            don't fit. The least of all stages.
        available_bytes: What of that is for the KV cache; negative if weights don't fit.
        kv_cache: Blocks and what they hold.
    """

    settings: PlanSettings
    dtype: str
    weights_dtype: str
    kv_cache_dtype: str
    quantization: str | None
    num_parameters: int
    usable_bytes: int
    weights_bytes: int
    weights_source: str
    activation_bytes: int
    activation_source: str
    left_bytes: int
    available_bytes: int
    kv_cache: KVCachePlan

    @property
    def fits(self) -> bool:
        """True if one request of ``max_model_len`` can be served, with what was asked for."""
        return self.kv_cache.fits and self.has_kv_cache_memory

    @property
    def has_kv_cache_memory(self) -> bool:
        """False if ``kv_cache_memory`` asks for more than is left."""
        asked = self.settings.kv_cache_memory
        return asked is None or asked <= self.left_bytes

    @property
    def kv_cache_bytes(self) -> int:
        """All blocks."""
        return self.kv_cache.num_blocks * self.kv_cache.block_bytes

    @property
    def reserved_bytes(self) -> int:
        """What the engine leaves alone."""
        used = self.weights_bytes + self.activation_bytes + self.kv_cache_bytes
        return max(self.settings.device_memory - used, 0)


def plan_memory(
    spec: ModelSpec, settings: PlanSettings, gguf: GGUFHeader | None = None
) -> MemoryPlan:
    """Plan a device from estimates. A model that does not fit gets a plan that says so.

    Args:
        spec: Hyper-parameters.
        settings: Device, parallel sizes and limits.
        gguf: The model's file, if its weights are to be taken as it packs them.

    Raises:
        ConfigError: A setting is outside its limits for this model.
        ModelError: The checkpoint's dtype is unknown, or the model has no KV cache.
    """
    check_parallel(spec, settings)
    max_model_len = _limit_length(spec, settings.max_model_len, "--max-model-len")
    weights_dtype = _resolve_dtype(spec, settings)
    dtype = "float32" if settings.is_packed_on_host else weights_dtype
    kv_dtype = resolve_kv_cache_dtype(settings.kv_cache_dtype, dtype, settings.is_packed_on_host)
    quantization = _resolve_quantization(spec, settings)
    weights = _weights(spec, settings, DTYPE_BYTES[weights_dtype], quantization, gguf)
    stages = [
        _plan_stage(spec, settings, stage, weights, dtype, kv_dtype)
        for stage in pipeline_stages(spec.num_hidden_layers, settings.pipeline_parallel_size)
    ]
    stages = [stage for stage in stages if stage.layout.block_bytes]
    if not stages:
        raise _no_kv_cache(spec)
    # Block tables are the same everywhere, so the stage with the fewest blocks decides.
    fullest = min(stages, key=lambda stage: (stage.num_blocks, stage.available_bytes))
    least = min(stages, key=lambda stage: stage.left_bytes)
    if settings.kv_cache_memory is not None and settings.kv_cache_memory > least.left_bytes:
        fullest = least
    kv_cache = KVCachePlan(
        layout=fullest.layout,
        num_blocks=fullest.num_blocks,
        max_model_len=max_model_len,
        num_in_flight=settings.max_num_batched_tokens,
    )
    if settings.max_model_len == "auto" and kv_cache.longest_request > 1:
        kv_cache = msgspec.structs.replace(kv_cache, max_model_len=kv_cache.longest_request)
    packed = main_type(gguf) if gguf is not None and settings.quantization is None else None
    return MemoryPlan(
        settings=settings,
        dtype=dtype,
        weights_dtype=weights_dtype,
        kv_cache_dtype=kv_dtype,
        quantization=packed or (quantization.method if quantization is not None else None),
        num_parameters=weights.num_parameters,
        usable_bytes=fullest.usable_bytes,
        weights_bytes=fullest.weights_bytes,
        weights_source=weights.source,
        activation_bytes=fullest.activation_bytes,
        activation_source="estimated" if settings.non_kv_memory is None else "given",
        left_bytes=least.left_bytes,
        available_bytes=fullest.available_bytes,
        kv_cache=kv_cache,
    )


def resolve_kv_cache_dtype(wanted: str, dtype: str, is_packed: bool) -> str:
    """Choose the type of K and V.

    Args:
        wanted: ``auto``, or the name of a type.
        dtype: Type of the activations.
        is_packed: Whether the CPU kernels run, with weights packed for them. Their K and V
            are float16: half the memory, for a hundredth of a percent of perplexity.
    """
    if wanted != "auto":
        return wanted
    return "float16" if is_packed else dtype


def pipeline_stages(num_layers: int, num_stages: int) -> list[range]:
    """Deal layers out in order. What is left over goes to the first stages, for the last has
    the language-model head.
    """
    size, extra = divmod(num_layers, num_stages)
    stages, start = [], 0
    for index in range(num_stages):
        end = start + size + (1 if index < extra else 0)
        stages.append(range(start, end))
        start = end
    return stages


class _Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One device of one pipeline stage."""

    layout: KVCacheLayout
    usable_bytes: int
    weights_bytes: int
    activation_bytes: int
    left_bytes: int
    available_bytes: int

    @property
    def num_blocks(self) -> int:
        return max(self.available_bytes, 0) // self.layout.block_bytes


def _plan_stage(
    spec: ModelSpec,
    settings: PlanSettings,
    stage: range,
    weights: Weights,
    dtype: str,
    kv_dtype: str,
) -> _Stage:
    weights_bytes = weights.stage_bytes(stage)
    activations = estimate_activations(
        spec,
        dtype_bytes=DTYPE_BYTES[dtype],
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        tensor_parallel_size=settings.tensor_parallel_size,
    )
    if settings.non_kv_memory is not None:
        weights_bytes = min(weights_bytes, settings.non_kv_memory)
        activations = settings.non_kv_memory - weights_bytes
    usable = settings.device_memory
    if not settings.is_host:
        usable = math.ceil(settings.device_memory * settings.gpu_memory_utilization)
    left_bytes = available = usable - weights_bytes - activations
    if settings.kv_cache_memory is not None:
        # More than is left is no plan that fits; these are then the figures of what is there.
        available = min(available, settings.kv_cache_memory)
    elif settings.is_host:
        left = settings.device_memory - weights_bytes
        available = min(available, DEFAULT_CPU_KV_CACHE, left // 2)
    return _Stage(
        layout=lay_out_kv_cache(
            spec.layers,
            block_size=settings.block_size,
            dtype_bytes=KV_DTYPE_BYTES[kv_dtype],
            tensor_parallel_size=settings.tensor_parallel_size,
            stage=stage,
        ),
        usable_bytes=usable,
        weights_bytes=weights_bytes,
        activation_bytes=activations,
        left_bytes=left_bytes,
        available_bytes=available,
    )


def _weights(
    spec: ModelSpec,
    settings: PlanSettings,
    dtype_bytes: int,
    quantization: Quantization | None,
    gguf: GGUFHeader | None,
) -> Weights:
    if gguf is not None and settings.quantization is None:
        return weights_of_gguf(gguf, spec.num_hidden_layers, settings.tensor_parallel_size)
    return estimate_weights(spec, dtype_bytes, quantization, settings.tensor_parallel_size)


class ParallelSizes(Protocol):
    """Anything that says by how many devices a model is divided."""

    @property
    def tensor_parallel_size(self) -> int:
        """Devices that share each layer."""
        ...

    @property
    def pipeline_parallel_size(self) -> int:
        """Stages that follow each other."""
        ...


def check_parallel(spec: ModelSpec, settings: ParallelSizes) -> None:
    """Refuse parallel sizes that don't divide a model.

    Raises:
        ConfigError: The message names the size, and what it does not divide.
    """
    heads, layers = spec.num_attention_heads, spec.num_hidden_layers
    size = settings.tensor_parallel_size
    if heads % size:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the "
            f"model's {heads} attention heads; sizes that do are {fitting}.",
            field="tensor_parallel_size",
        )
    if settings.pipeline_parallel_size > layers:
        raise ConfigError(
            f"pipeline_parallel_size is {settings.pipeline_parallel_size}, but the model has only "
            f"{layers} layers.",
            field="pipeline_parallel_size",
        )


def _resolve_dtype(spec: ModelSpec, settings: PlanSettings) -> str:
    """Choose the type of weights that are not quantized, as a worker does.

    A CPU keeps the checkpoint's own, or unpacks to float32 with ``--quantization none``; a GPU
    takes a half type.
    """
    if spec.dtype is not None and spec.dtype not in (*DTYPE_BYTES, "float64"):
        raise ModelError(
            f"the model's config.json says dtype {spec.dtype!r}; known are "
            f"{', '.join(DTYPE_BYTES)}, float64.",
            field="dtype",
        )
    if settings.dtype != "auto":
        return settings.dtype
    if settings.is_packed_on_host and spec.dtype in DTYPE_BYTES:
        return spec.dtype
    if settings.is_host:
        return "float32"
    return "float16" if spec.dtype == "float16" else "bfloat16"


def _resolve_quantization(spec: ModelSpec, settings: PlanSettings) -> Quantization | None:
    if settings.quantization is None:
        return spec.quantization
    if settings.quantization == "none":
        return None
    return QUANTIZATIONS[settings.quantization]


def format_bytes(count: int) -> str:
    """Write a number of bytes for a person, for example ``1.50 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.2f} {unit}" if unit != "B" else f"{count} B"
        value /= 1024
    return f"{value:.2f} TiB"
