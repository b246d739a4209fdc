"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_kernels import AttentionMetadata, mla_decode, rotary_embedding, write_kv_cache
from octavo_worker.layers.kv_cache import KVCache
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.norm import RMSNorm
from octavo_worker.layers.rotary import Rotary, yarn_scale
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.layers.weight_entry import WeightEntry, linear_entries, whole_entry

_EPS = 1e-6  # of the norms of latents, whatever that of the others


class LatentAttention:
    """Attention whose keys and values are one short latent a token, for all heads.

    In the absorbed form: queries are brought to the latents' space, and what is attended is
    brought to the heads' from there, so that no key or value is ever written out.

    Args:
        spec: Hyper-parameters.
        weights: Loaded weights.
        prefix: Name of the attention in them.
        rotary: Rotary positions.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str, rotary: Rotary
    ) -> None:
        self._num_heads = spec.num_attention_heads
        self._rank = _rank(spec)
        self._query_sizes = [spec.qk_nope_head_dim, spec.qk_rope_head_dim]
        self._latent_sizes = [self._rank, spec.qk_rope_head_dim]
        self._scale = _scale(spec)
        self._rotary, self._is_interleaved = rotary, spec.rope_interleave
        self._q_a_proj, self._q_a_norm = None, None
        if spec.q_lora_rank is not None:
            self._q_a_proj = Linear.of(weights, f"{prefix}.q_a_proj")
            self._q_a_norm = RMSNorm(tensor_of(weights, f"{prefix}.q_a_layernorm.weight"), _EPS)
        self._q_proj = Linear.of(weights, f"{prefix}.{_query_name(spec)}")
        self._kv_a_proj = Linear.of(weights, f"{prefix}.kv_a_proj_with_mqa")
        self._kv_a_norm = RMSNorm(tensor_of(weights, f"{prefix}.kv_a_layernorm.weight"), _EPS)
        up = tensor_of(weights, f"{prefix}.kv_b_proj.weight").view(self._num_heads, -1, self._rank)
        # [num_heads, qk_nope_head_dim, rank] and [num_heads, head_dim_v, rank]
        self._key_up, self._value_up = up.split_with_sizes(
            [spec.qk_nope_head_dim, up.shape[1] - spec.qk_nope_head_dim], dim=1
        )
        self._o_proj = Linear.of(weights, f"{prefix}.o_proj")

    @classmethod
    def weight_layout(cls, spec: ModelSpec, prefix: str) -> list[WeightEntry]:
        """List the projections and the norms of latents."""
        hidden, rank = spec.hidden_size, _rank(spec)
        heads, value_dim = spec.num_attention_heads, spec.head_dim_v or spec.head_dim
        query = _query_name(spec)
        entries = []
        if spec.q_lora_rank is not None:
            entries += _projection(prefix, "q_a_proj", spec.q_lora_rank, hidden, spec)
            entries.append(whole_entry(f"{prefix}.q_a_layernorm.weight", spec.q_lora_rank))
        query_rows = {query: heads * spec.head_dim}
        entries += linear_entries(prefix, query, query_rows, spec.q_lora_rank or hidden)
        latent = rank + spec.qk_rope_head_dim
        return [
            *entries,
            *_projection(prefix, "kv_a_proj_with_mqa", latent, hidden, spec),
            whole_entry(f"{prefix}.kv_a_layernorm.weight", rank),
            whole_entry(
                f"{prefix}.kv_b_proj.weight", heads * (spec.qk_nope_head_dim + value_dim), rank
            ),
            *_projection(prefix, "o_proj", hidden, heads * value_dim, spec),
        ]

    def forward(
        self, hidden: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend; ``[num_tokens, hidden_size]`` in and out."""
        query = self._q_proj(self._compress_query(hidden))
        plain, rotated = torch.split(
            query.view(len(hidden), self._num_heads, -1), self._query_sizes, dim=-1
        )
        latent, key = torch.split(self._kv_a_proj(hidden), self._latent_sizes, dim=-1)
        rotated, key = rotary_embedding(
            positions,
            rotated.contiguous(),
            key.unsqueeze(1).contiguous(),
            self._rotary.cos_sin_cache,
            interleaved=self._is_interleaved,
        )
        latent = torch.cat((self._kv_a_norm(latent).unsqueeze(1), key), dim=-1)
        # [num_tokens, 1, rank + qk_rope_head_dim]; the value is a part of the key.
        write_kv_cache(latent, latent, kv_cache.key, kv_cache.value, metadata.slot_mapping)
        absorbed = torch.einsum("thn,hnr->thr", plain, self._key_up)
        attended = mla_decode(
            torch.cat((absorbed, rotated), dim=-1),
            kv_cache.key.squeeze(1),
            metadata,
            self._scale,
            self._rank,
        )  # [num_tokens, num_heads, rank]
        values = torch.einsum("thr,hvr->thv", attended, self._value_up)
        return self._o_proj(values.flatten(1))

    def _compress_query(self, hidden: Tensor) -> Tensor:
        if self._q_a_proj is None or self._q_a_norm is None:
            return hidden
        return self._q_a_norm(self._q_a_proj(hidden))


def _projection(
    prefix: str, name: str, rows: int, columns: int, spec: ModelSpec
) -> list[WeightEntry]:
    return linear_entries(prefix, name, {name: rows}, columns, spec.attention_bias)


def _query_name(spec: ModelSpec) -> str:
    return "q_proj" if spec.q_lora_rank is None else "q_b_proj"


def _rank(spec: ModelSpec) -> int:
    assert spec.kv_lora_rank is not None
    return spec.kv_lora_rank


def _scale(spec: ModelSpec) -> float:
    """Return the factor of the scores; a stretched context raises it (DeepSeek's own YaRN)."""
    scale: float = spec.head_dim**-0.5
    rope = spec.rope_parameters
    weight = rope.get("mscale_all_dim")
    if "rope_type" in rope and weight:
        scale *= yarn_scale(rope.get("factor", 1.0), weight) ** 2
    return scale
