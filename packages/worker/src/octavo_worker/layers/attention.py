"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import AttentionMetadata, paged_attention, rotary_embedding, write_kv_cache
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.norm import RMSNorm
from octavo_worker.layers.rotary import Rotary
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import WeightEntry, linear_entries, whole_entry


@dataclass(frozen=True)
class AttentionKind:
    """How one layer attends.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of a head.
        scale: Factor of the scores.
        window: Positions that a token sees, itself included; None for all before it.
        soft_cap: Bound of the scores; None for no bound.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @classmethod
    def of_layer(cls, spec: ModelSpec, index: int) -> AttentionKind:
        """Read it from a model's hyper-parameters."""
        return cls(
            num_heads=spec.num_attention_heads,
            num_kv_heads=spec.layers[index].num_kv_heads,
            head_dim=spec.head_dim,
            scale=(spec.query_pre_attn_scalar or spec.head_dim) ** -0.5,
            window=spec.layers[index].window,
            soft_cap=spec.attn_logit_softcapping,
        )

    @property
    def split_sizes(self) -> list[int]:
        """Width of all queries, keys and values."""
        kv_size = self.num_kv_heads * self.head_dim
        return [self.num_heads * self.head_dim, kv_size, kv_size]


class AttentionLayer(Protocol):
    """The part of a layer in which tokens see each other."""

    def forward(
        self, hidden: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend; ``[num_tokens, hidden_size]`` in and out."""
        ...


class Attention:
    """Projections, rotary positions, and attention to the tokens before.

    Args:
        kind: How the layer attends.
        qkv_proj: Projection to queries, keys and values.
        o_proj: Projection back.
        rotary: Rotary positions; None where positions come another way.
        query_norm: Norm of each query head, before it is rotated; None for none.
        key_norm: Norm of each key head.
        sinks: ``[num_heads]``, score of a position of value zero; None for none.
    """

    def __init__(
        self,
        kind: AttentionKind,
        qkv_proj: Linear,
        o_proj: Linear,
        rotary: Rotary | None = None,
        *,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.kind = kind
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.rotary = rotary
        self.sinks = sinks

    def forward(
        self, hidden: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend; ``[num_tokens, hidden_size]`` in and out."""
        qkv = torch.split(self.qkv_proj(hidden), self.kind.split_sizes, dim=-1)
        # [num_tokens, heads, head_dim] each
        query, key, value = (part.view(len(hidden), -1, self.kind.head_dim) for part in qkv)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = rotary_embedding(positions, query, key, self.rotary.cos_sin_cache)
        write_kv_cache(key, value, kv_cache.key, kv_cache.value, metadata.slot_mapping)
        attended = paged_attention(
            query,
            kv_cache.key,
            kv_cache.value,
            metadata,
            self.kind.scale,
            window=self.kind.window,
            soft_cap=self.kind.soft_cap,
            sinks=self.sinks,
        )
        return self.o_proj(attended.flatten(1))


class FamilyAttention(Attention):
    """Attention of the families that are built like Llama: what they add says their name.

    Args:
        spec: Hyper-parameters.
        weights: Loaded weights.
        prefix: Name of the attention in them.
        index: Of the layer.
        rotary: Rotary positions of this layer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        prefix: str,
        index: int,
        rotary: Rotary,
    ) -> None:
        has_norms, has_sinks = spec.family.qk_norm, spec.family.attention_sinks

        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensor_of(weights, f"{prefix}.{name}.weight"), spec.rms_norm_eps)

        super().__init__(
            AttentionKind.of_layer(spec, index),
            Linear.of(weights, f"{prefix}.qkv_proj"),
            Linear.of(weights, f"{prefix}.o_proj"),
            rotary,
            query_norm=norm("q_norm") if has_norms else None,
            key_norm=norm("k_norm") if has_norms else None,
            sinks=tensor_of(weights, f"{prefix}.sinks") if has_sinks else None,
        )

    @classmethod
    def weight_layout(
        cls, spec: ModelSpec, prefix: str, index: int, parts: Sequence[str] = ("q", "k", "v")
    ) -> list[WeightEntry]:
        """List the projections: q, k and v fused, and o; and what the family adds.

        Args:
            spec: Hyper-parameters.
            prefix: Name of the attention.
            index: Of the layer.
            parts: What the checkpoint has: ``q``, ``k`` and ``v`` apart, or ``qkv``.
        """
        sizes = AttentionKind.of_layer(spec, index).split_sizes
        is_fused = len(parts) < len(sizes)
        rows = [sum(sizes)] if is_fused else sizes
        fused = {f"{part}_proj": count for part, count in zip(parts, rows, strict=True)}
        qkv_bias = spec.attention_bias or spec.family.qkv_bias
        entries = [
            *linear_entries(
                *(prefix, "qkv_proj", fused, spec.hidden_size, qkv_bias),
                sections=sizes if is_fused else (),
            ),
            *linear_entries(
                prefix, "o_proj", {"o_proj": spec.hidden_size}, sizes[0], spec.attention_bias
            ),
        ]
        if spec.family.qk_norm:
            entries += [
                whole_entry(f"{prefix}.{name}.weight", spec.head_dim)
                for name in ("q_norm", "k_norm")
            ]
        if spec.family.attention_sinks:
            entries.append(whole_entry(f"{prefix}.sinks", spec.num_attention_heads))
        return entries
