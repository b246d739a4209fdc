"""The other way round: which one change would make a model fit.

Each answer is the result of a plan with that change, not of a formula of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from octavo_core.gguf import GGUFHeader
from octavo_core.memory_planner import KV_DTYPE_BYTES, MemoryPlan, PlanSettings, plan_memory
from octavo_core.model_spec import ModelSpec
from octavo_core.quantization import QUANTIZATIONS

# Tried in this order: what loses least first. 8-bit floats need no calibration.
_WEIGHT_TYPES = ("fp8", "int4")
_MAX_DEVICES = 64


class FitAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, changed, with which the model fits.

    Attributes:
        setting: Field of `PlanSettings`.
        value: What to set it to.
        flag: The same as on the command line.
        max_concurrency: Requests of ``max_model_len`` that then fit at once.
    """

    setting: str
    value: int | float | str
    flag: str
    max_concurrency: float


def advise(
    spec: ModelSpec, settings: PlanSettings, gguf: GGUFHeader | None = None
) -> list[FitAdvice]:
    """Find the smallest change of each setting that makes the model fit.

    Args:
        spec: Hyper-parameters.
        settings: What does not fit.
        gguf: The model's file, if it is one.

    Returns:
        One entry for each setting that can do it alone; none if the model fits already, or if
        no single change is enough.
    """
    plan = plan_memory(spec, settings, gguf)
    if plan.fits:
        return []
    longest = plan.kv_cache.longest_request  # one token leaves none for an answer
    tries = (
        ("max_model_len", [longest] if longest > 1 else []),
        ("gpu_memory_utilization", _utilizations(plan)),
        ("kv_cache_memory", _kv_cache_memories(plan)),
        ("kv_cache_dtype", ["fp8"] if KV_DTYPE_BYTES[plan.kv_cache_dtype] > 1 else []),
        ("dtype", ["bfloat16"] if plan.weights_dtype == "float32" else []),
        ("quantization", _quantizations(spec, plan)),
        ("max_num_batched_tokens", _token_budgets(plan)),
        ("tensor_parallel_size", _tensor_parallel_sizes(spec, settings)),
    )
    last_resorts = (
        ("max_num_seqs", _halves(settings.max_num_seqs, 1)),
        ("pipeline_parallel_size", _pipeline_parallel_sizes(spec, settings)),
    )
    for group in (tries, last_resorts):
        found = (_first_that_fits(spec, settings, gguf, name, values) for name, values in group)
        advice = [entry for entry in found if entry is not None]
        if advice:
            break
    return advice


def _first_that_fits(
    spec: ModelSpec,
    settings: PlanSettings,
    gguf: GGUFHeader | None,
    name: str,
    values: Iterable[int | float | str],
) -> FitAdvice | None:
    for value in values:
        plan = plan_memory(spec, msgspec.structs.replace(settings, **{name: value}), gguf)
        if plan.fits:
            return FitAdvice(
                setting=name,
                value=value,
                flag=f"--{name.replace('_', '-')} {value}",
                max_concurrency=plan.kv_cache.max_concurrency,
            )
    return None


def _missing_bytes(plan: MemoryPlan) -> int:
    """Bytes of KV cache that one request needs beyond what is there; may be negative."""
    cache = plan.kv_cache
    return cache.blocks_per_request * cache.block_bytes - plan.available_bytes


def _utilizations(plan: MemoryPlan) -> Iterator[float]:
    settings = plan.settings
    if settings.is_host or settings.kv_cache_memory is not None:
        return
    needed = (plan.usable_bytes + _missing_bytes(plan)) / settings.device_memory
    # In hundredths, rounded up; the second is for what rounding of the product may cost.
    first = math.ceil(needed * 100)
    yield from (hundredths / 100 for hundredths in (first, first + 1) if hundredths <= 100)


def _kv_cache_memories(plan: MemoryPlan) -> Iterator[int]:
    """Ask for as much as one request needs, where less was asked for or is the CPU's default;
    for as much as there is, where more was.
    """
    block_bytes = plan.kv_cache.block_bytes
    if not plan.has_kv_cache_memory:
        blocks = plan.left_bytes // block_bytes
        if blocks > 0:
            yield blocks * block_bytes
    elif plan.settings.is_host or plan.settings.kv_cache_memory is not None:
        yield plan.kv_cache.blocks_per_request * block_bytes


def _quantizations(spec: ModelSpec, plan: MemoryPlan) -> Iterator[str]:
    """Yield types that are smaller than the weights are now."""
    now = plan.weights_bytes
    for name in _WEIGHT_TYPES:
        size = QUANTIZATIONS[name].weight_bytes
        assert size is not None
        share = plan.settings.tensor_parallel_size * plan.settings.pipeline_parallel_size
        if size * plan.num_parameters / share < now:
            yield name


def _token_budgets(plan: MemoryPlan) -> Iterator[int]:
    return _halves(plan.settings.max_num_batched_tokens, 256)


def _halves(value: int, least: int) -> Iterator[int]:
    value //= 2
    while value >= least:
        yield value
        value //= 2


def _tensor_parallel_sizes(spec: ModelSpec, settings: PlanSettings) -> Iterator[int]:
    if settings.is_host:
        return
    size = 2
    while size <= _MAX_DEVICES:
        if size > settings.tensor_parallel_size and spec.num_attention_heads % size == 0:
            yield size
        size *= 2


def _pipeline_parallel_sizes(spec: ModelSpec, settings: PlanSettings) -> Iterator[int]:
    if settings.is_host:
        return
    size = 2
    while size <= min(_MAX_DEVICES, spec.num_hidden_layers):
        if size > settings.pipeline_parallel_size:
            yield size
        size *= 2
