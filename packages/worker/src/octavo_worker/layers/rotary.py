"""Angles of rotary position embedding, for each kind of rope."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.model_spec import ModelSpec

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


class Rotary(NamedTuple):
    """Rotary positions of a layer.

    Attributes:
        cos_sin_cache: ``[max_position, rotary_dim]`` float32: ``rotary_dim / 2`` cosines,
            then the sines, as `octavo_kernels.rotary_embedding` reads them.
    """

    cos_sin_cache: Tensor


def build_rotaries(spec: ModelSpec, max_position: int, device: torch.device) -> list[Rotary]:
    """Tabulate the angles that each layer rotates by; equal ones once.

    Returns:
        One for each layer.

    Raises:
        ModelError: The kind of rope is not supported, or one of its values is missing.
    """
    rotary = Rotary(build_cos_sin_cache(spec, max_position, device))
    local = rotary
    if spec.rope_local_parameters:
        local = Rotary(build_cos_sin_cache(spec, max_position, device, is_local=True))
    kinds = spec.layer_kinds or ("full",) * spec.num_hidden_layers
    return [local if kind == "sliding" else rotary for kind in kinds]


def build_cos_sin_cache(
    spec: ModelSpec, max_position: int, device: torch.device, *, is_local: bool = False
) -> Tensor:
    """Tabulate cosines and sines, as `octavo_kernels.rotary_embedding` reads them.

    Where a kind of rope depends on the length (``dynamic``, ``longrope``), `max_position` is
    the length: a token's angles must not change with what else is in the batch, or with how
    long its request will be.

    Args:
        spec: Hyper-parameters.
        max_position: Positions that there can be.
        device: Where the result is to be.
        is_local: Whether it is for layers with a window, where those have a rope of their own.

    Returns:
        ``[max_position, rotary_dim]`` float32: ``rotary_dim / 2`` cosines, then the sines.

    Raises:
        ModelError: The kind of rope is not supported, or one of its values is missing.
    """
    rope = _Rope(spec, max_position, is_local)
    angles = torch.outer(torch.arange(max_position).float(), rope.frequencies())
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (cos_sin * rope.attention_factor()).to(device)


class _Rope:
    """One kind of rope, with its parameters."""

    def __init__(self, spec: ModelSpec, max_position: int, is_local: bool) -> None:
        self._parameters = spec.rope_local_parameters if is_local else spec.rope_parameters
        self._theta: float = self._parameters.get("rope_theta", spec.rope_theta)
        self._kind = self._parameters.get("rope_type", "default")
        self._context = spec.max_position_embeddings
        self._max_position = max_position
        if self._kind not in ROPE_TYPES:
            raise ModelError(
                f"rope_type {self._kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}.",
                field="rope_type",
            )
        self._dim = _rotary_dim(spec, self._parameters)

    def frequencies(self) -> Tensor:
        """Return ``[rotary_dim / 2]`` float32, radians for each position."""
        if self._kind == "linear":
            return self._plain() / self._number("factor")
        if self._kind == "dynamic":
            return self._dynamic()
        if self._kind == "llama3":
            return self._llama3()
        if self._kind == "yarn":
            return self._yarn()
        if self._kind == "longrope":
            return self._longrope()
        return self._plain()

    def attention_factor(self) -> float:
        """Return the factor of cosines and sines, whose square is one of the scores."""
        if self._kind not in ("yarn", "longrope"):
            return 1.0
        given = self._parameters.get("attention_factor")
        if given is not None:
            return float(given)
        factor = self._factor()
        if self._kind == "longrope":
            context = self._number("original_max_position_embeddings")
            return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
        scale, all_dim = self._parameters.get("mscale"), self._parameters.get("mscale_all_dim")
        if scale and all_dim:
            return yarn_scale(factor, scale) / yarn_scale(factor, all_dim)
        return yarn_scale(factor)

    def _plain(self, theta: float | None = None) -> Tensor:
        exponents = torch.arange(0, self._dim, 2).float() / self._dim
        return 1.0 / (theta or self._theta) ** exponents

    def _dynamic(self) -> Tensor:
        """Raise the base with the length beyond the model's context (NTK-aware scaling)."""
        length = max(self._max_position, self._context)
        factor = self._number("factor")
        stretch = factor * length / self._context - (factor - 1)
        return self._plain(self._theta * stretch ** (self._dim / (self._dim - 2)))

    def _llama3(self) -> Tensor:
        """Slow long waves down by ``factor``, leave short ones, and blend in between.

        As in Meta's reference code for Llama 3.1 (llama-models, ``apply_scaling``).
        """
        frequencies = self._plain()
        factor = self._number("factor")
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        context = self._number("original_max_position_embeddings")
        turns = context * frequencies / (2 * math.pi)  # of each component over the old context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * frequencies / factor + blend * frequencies

    def _yarn(self) -> Tensor:
        """Interpolate slow components, leave fast ones, and blend by number of component.

        Peng et al. 2023 (arXiv 2309.00071), section 3.2.
        """
        context = self._number("original_max_position_embeddings")

        def component(turns: float) -> float:
            """Index of the component that turns so often over the old context."""
            return (
                self._dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self._theta))
            )

        low = component(self._parameters.get("beta_fast") or 32.0)
        high = component(self._parameters.get("beta_slow") or 1.0)
        if self._parameters.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self._dim - 1)
        width = high - low if high != low else 0.001
        slow = ((torch.arange(self._dim // 2).float() - low) / width).clamp(0, 1)
        frequencies = self._plain()
        return slow * frequencies / self._factor() + (1 - slow) * frequencies

    def _longrope(self) -> Tensor:
        """Slow each component down by its own factor (Ding et al. 2024, arXiv 2402.13753)."""
        context = self._number("original_max_position_embeddings")
        name = "long_factor" if self._max_position > context else "short_factor"
        factors = self._parameters.get(name)
        count = self._dim // 2
        if (
            not isinstance(factors, list)
            or len(factors) != count
            or not all(isinstance(factor, int | float) and factor > 0 for factor in factors)
        ):
            raise ModelError(
                f"rope_type 'longrope' needs a {name} with {count} positive numbers.", field=name
            )
        return self._plain() / torch.tensor(factors, dtype=torch.float32)

    def _factor(self) -> float:
        if self._parameters.get("factor") is not None:
            return self._number("factor")
        return self._context / self._number("original_max_position_embeddings")

    def _number(self, name: str) -> float:
        value = self._parameters.get(name)
        if not isinstance(value, int | float) or value <= 0:
            raise ModelError(
                f"rope_type {self._kind!r} needs a positive {name}, not {value!r}.", field=name
            )
        return float(value)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return what YaRN multiplies cosines and sines with (its equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rotary_dim(spec: ModelSpec, parameters: Mapping[str, Any]) -> int:
    """Return how many numbers of a head are rotated."""
    if spec.kv_lora_rank is not None:
        return spec.qk_rope_head_dim
    share = parameters.get("partial_rotary_factor", 1.0)
    dim = int(spec.head_dim * share)
    if dim < 2 or dim % 2 or dim > spec.head_dim:
        raise ModelError(
            f"partial_rotary_factor={share} of head_dim={spec.head_dim} gives {dim} numbers to "
            "rotate; rotary embedding needs pairs.",
            field="partial_rotary_factor",
        )
    return dim
