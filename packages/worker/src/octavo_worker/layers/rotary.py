"""Angles of rotary position embedding, for each kind of rope that is supported."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.model_spec import ModelSpec

ROPE_TYPES = ("default", "linear", "llama3")


def build_cos_sin_cache(spec: ModelSpec, max_position: int, device: torch.device) -> Tensor:
    """Tabulate cosines and sines, as `octavo_kernels.rotary_embedding` reads them.

    Returns:
        ``[max_position, head_dim]`` float32: ``head_dim / 2`` cosines, then the sines.

    Raises:
        ModelError: The kind of rope is not supported, or one of its values is missing.
    """
    exponents = torch.arange(0, spec.head_dim, 2).float() / spec.head_dim
    frequencies = _scale(spec, 1.0 / spec.rope_theta**exponents)  # [head_dim / 2]
    angles = torch.outer(torch.arange(max_position).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _scale(spec: ModelSpec, frequencies: Tensor) -> Tensor:
    parameters = spec.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}.",
            field="rope_type",
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']} is not supported for "
            f"{spec.architecture}.",
            field="partial_rotary_factor",
        )
    if kind == "linear":
        return frequencies / _number(parameters, "factor")
    if kind == "llama3":
        return _scale_llama3(parameters, frequencies)
    return frequencies


def _scale_llama3(parameters: dict[str, Any], frequencies: Tensor) -> Tensor:
    """Slow long waves down by ``factor``, leave short ones, and blend in between.

    As in Meta's reference code for Llama 3.1 (llama-models, ``apply_scaling``).
    """
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    context = _number(parameters, "original_max_position_embeddings")
    turns = context * frequencies / (2 * math.pi)  # of each component over the old context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _number(parameters: dict[str, Any], name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise ModelError(
            f"rope_type {parameters['rope_type']!r} needs a positive {name}, not {value!r}.",
            field=name,
        )
    return float(value)
