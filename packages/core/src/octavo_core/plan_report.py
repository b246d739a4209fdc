"""A memory plan as a table for a person, or as JSON for a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo_core.fit_advice import FitAdvice
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.memory_planner import MemoryPlan, format_bytes
from octavo_core.model_spec import ModelSpec

_BAR_WIDTH = 60


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its plan, and what would make it fit."""

    name: str
    spec: ModelSpec
    plan: MemoryPlan
    advice: Sequence[FitAdvice]
    notes: Sequence[str] = ()


def report_json(planned: PlannedModel) -> str:
    """Return the plan as one JSON object. Sizes are bytes, of the fullest device."""
    plan, cache, spec = planned.plan, planned.plan.kv_cache, planned.spec
    settings = plan.settings
    content: dict[str, Any] = {
        "model": planned.name,
        "architecture": spec.architecture,
        "num_parameters": plan.num_parameters,
        "dtype": plan.dtype,
        "weights_dtype": plan.weights_dtype,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "quantization": plan.quantization,
        "device": settings.device,
        "device_memory_bytes": settings.device_memory,
        "usable_bytes": plan.usable_bytes,
        "gpu_memory_utilization": None if settings.is_host else settings.gpu_memory_utilization,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "weights_bytes": plan.weights_bytes,
        "weights_source": plan.weights_source,
        "activation_bytes": plan.activation_bytes,
        "activation_source": plan.activation_source,
        "available_kv_cache_bytes": plan.available_bytes,
        "kv_cache_bytes": plan.kv_cache_bytes,
        "reserved_bytes": plan.reserved_bytes,
        "kv_bytes_per_token": cache.kv_bytes_per_token,
        "block_size": cache.block_size,
        "block_bytes": cache.block_bytes,
        "num_gpu_blocks": cache.num_blocks,
        "kv_cache_tokens": cache.kv_cache_tokens,
        "max_model_len": cache.max_model_len,
        "blocks_per_request": cache.blocks_per_request,
        "max_concurrency": round(cache.max_concurrency, 4),
        "kv_cache_groups": [
            {"num_layers": len(group.layers), "window": group.window}
            for group in cache.layout.groups
        ],
        "fits": plan.fits,
        "reason": None if plan.fits else why_not(plan),
        "advice": planned.advice,
        "notes": planned.notes,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def report_table(planned: PlannedModel, *, ascii_only: bool = False) -> str:
    """Return the plan as lines of text.

    Args:
        planned: What to show.
        ascii_only: Draw the bar with characters that every terminal has.
    """
    rows = [
        ("model", planned.name),
        ("", _model_line(planned)),
        ("device", _device_line(planned.plan)),
        *_memory_rows(planned.plan, ascii_only),
        *_cache_rows(planned.plan),
    ]
    lines = [f"{name:<14}{text}".rstrip() for name, text in rows]
    lines += ["", *_verdict(planned)]
    lines += [f"Note: {note}" for note in planned.notes]
    text = "\n".join(lines)
    return text.replace("×", "x") if ascii_only else text


def why_not(plan: MemoryPlan) -> str:
    """Say in one sentence what is missing."""
    cache = plan.kv_cache
    used = plan.weights_bytes + plan.activation_bytes
    if plan.available_bytes <= 0:
        return (
            f"Weights and activations take {format_bytes(used)}, and {plan.settings.device} has "
            f"{format_bytes(plan.usable_bytes)} to use."
        )
    if not plan.has_kv_cache_memory:
        assert plan.settings.kv_cache_memory is not None
        return (
            f"--kv-cache-memory asks for {format_bytes(plan.settings.kv_cache_memory)}, and beside "
            f"weights and activations of {format_bytes(used)} only {format_bytes(plan.left_bytes)} "
            f"are left of the {format_bytes(plan.usable_bytes)} to use."
        )
    needed = cache.blocks_per_request * cache.block_bytes
    return (
        f"One request of {cache.max_model_len:,} tokens needs {format_bytes(needed)} of KV cache, "
        f"and {format_bytes(plan.available_bytes)} are left."
    )


def _model_line(planned: PlannedModel) -> str:
    spec, plan = planned.spec, planned.plan
    weights = plan.quantization or plan.weights_dtype
    return (
        f"{spec.architecture}, {_in_words(plan.num_parameters)} parameters, "
        f"{spec.num_hidden_layers} layers, weights in {weights}"
    )


def _in_words(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _device_line(plan: MemoryPlan) -> str:
    settings = plan.settings
    count = settings.tensor_parallel_size * settings.pipeline_parallel_size
    many = f"{count} × " if count > 1 else ""
    size = format_bytes(settings.device_memory)
    name = settings.device if settings.device == size else f"{settings.device}, {size}"
    share = "" if settings.is_host else f" × {settings.gpu_memory_utilization:g}"
    parts = []
    if settings.tensor_parallel_size > 1:
        parts.append(f"tensor parallel {settings.tensor_parallel_size}")
    if settings.pipeline_parallel_size > 1:
        parts.append(f"pipeline parallel {settings.pipeline_parallel_size}")
    split = f" ({', '.join(parts)}; figures are of the fullest device)" if parts else ""
    return f"{many}{name}{share}{split}"


def _memory_rows(plan: MemoryPlan, ascii_only: bool) -> list[tuple[str, str]]:
    parts = (
        ("weights", plan.weights_bytes, plan.weights_source),
        ("activations", plan.activation_bytes, plan.activation_source),
        ("KV cache", plan.kv_cache_bytes, ""),
        ("left alone", plan.reserved_bytes, ""),
    )
    marks = "#=+." if ascii_only else "█▓▒·"
    device = plan.settings.device_memory
    total = max(device, sum(size for _, size, _ in parts))
    bar = "[" + _bar([size for _, size, _ in parts], total, marks) + "]"
    if total > device:
        bar += f" {total / device:.0%} of the device"
    rows = [("", ""), ("memory", bar)]
    for (name, size, source), mark in zip(parts, marks, strict=True):
        origin = f"  {_ORIGINS[source]}" if source else ""
        rows.append((f"  {name}", f"{mark} {format_bytes(size):>12} {size / device:>5.0%}{origin}"))
    return rows


_ORIGINS = {
    "estimated": "estimated from shapes",
    "file": "as the file packs them",
    "given": "given by --non-kv-memory, less the weights",
}


def _bar(sizes: Sequence[int], total: int, marks: str) -> str:
    """Draw shares of `total`; edges are rounded, so that the whole has its width."""
    bar, seen = "", 0
    for size, mark in zip(sizes, marks, strict=True):
        seen += size
        bar += mark * (round(seen / total * _BAR_WIDTH) - len(bar))
    return bar.ljust(_BAR_WIDTH)


def _cache_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    cache = plan.kv_cache
    rows = [
        ("", ""),
        (
            "KV cache",
            f"{plan.kv_cache_dtype}, {format_bytes(cache.kv_bytes_per_token)} a token, "
            f"{format_bytes(cache.block_bytes)} a block of {cache.block_size} tokens",
        ),
    ]
    groups = cache.layout.groups
    if len(groups) > 1 or groups[0].window is not None:
        rows.append(("", _groups_line(groups)))
    rows.append(("  holds", f"{cache.num_blocks:,} blocks, {cache.kv_cache_tokens:,} tokens"))
    rows.append(
        ("  at once", f"{cache.max_concurrency:.2f} requests of {cache.max_model_len:,} tokens")
    )
    return rows


def _groups_line(groups: Sequence[KVCacheGroup]) -> str:
    counts: dict[int | None, int] = {}
    for group in groups:
        counts[group.window] = counts.get(group.window, 0) + len(group.layers)
    kinds = [
        f"{count} layers with {'full attention' if window is None else f'a window of {window:,}'}"
        for window, count in counts.items()
    ]
    return f"{' and '.join(kinds)}, in {len(groups)} group{'s' if len(groups) > 1 else ''}"


def _no_advice(plan: MemoryPlan) -> str:
    if plan.settings.non_kv_memory is None:
        return "No single setting changes that."
    # Measured for these settings; with others, weights and activations would be fewer.
    return (
        "No single setting is known to change that: how much of --non-kv-memory quantization, "
        "more devices or fewer tokens a step would save is not known here. Without it they are "
        "estimated."
    )


def _verdict(planned: PlannedModel) -> list[str]:
    if planned.plan.fits:
        return ["It fits."]
    lines = [f"It does not fit. {why_not(planned.plan)}"]
    if not planned.advice:
        return [*lines, _no_advice(planned.plan)]
    width = max(len(advice.flag) for advice in planned.advice)
    lines.append("Each of these alone would do:")
    lines += [
        f"  {advice.flag:<{width}}  {advice.max_concurrency:.2f} requests at once"
        for advice in planned.advice
    ]
    return lines
