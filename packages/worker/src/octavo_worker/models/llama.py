"""Llama (Touvron et al. 2023, arXiv 2302.13971; grouped-query attention as in arXiv 2307.09288)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from octavo_core.errors import ModelError
from octavo_core.model_spec import ModelSpec
from octavo_kernels import (
    AttentionMetadata,
    Decoder,
    DecoderLayer,
    fused_add_rms_norm,
    paged_attention,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    write_kv_cache,
)
from octavo_worker.layers.embedding import Embedding
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.one_call import fits_one_call
from octavo_worker.layers.rotary import build_cos_sin_cache
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.models.model import KVCache, WeightEntry, WeightPart

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class LlamaForCausalLM:
    """Embedding, decoder layers, final norm and language-model head.

    Where the weights are packed, the layers and the final norm are one call of the CPU
    kernels; the results are those of the layers one by one, bit for bit.

    Args:
        spec: Hyper-parameters.
        weights: The tensors of `weight_layout`, by name.
        max_model_len: Positions to prepare rotary angles for.
        device: Where the weights are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._eps = spec.rms_norm_eps
        self._embedding = Embedding.of(weights, EMBEDDING)
        self._layers = [
            LlamaDecoderLayer(spec, weights, f"model.layers.{index}")
            for index in range(spec.num_hidden_layers)
        ]
        # A stage of a pipeline that is not the last has neither.
        self._norm = tensor_of(weights, NORM) if NORM in weights else None
        self._lm_head = Linear(weights[LM_HEAD]) if LM_HEAD in weights else None
        self._cos_sin_cache = build_cos_sin_cache(spec, max_model_len, device)
        self._decoder = self._join_layers(spec) if fits_one_call(spec, weights) else None

    @classmethod
    def weight_layout(cls, spec: ModelSpec) -> list[WeightEntry]:
        """List the tensors of the model; projections that share an input are fused.

        Raises:
            ModelError: The spec asks for another activation, or for a sliding window.
        """
        _check_supported(spec)
        embedding_shape = (spec.vocab_size, spec.hidden_size)
        embedding = WeightPart(EMBEDDING, embedding_shape)
        entries = [WeightEntry(EMBEDDING, (embedding,), is_vocabulary=True)]
        for index in range(spec.num_hidden_layers):
            entries += LlamaDecoderLayer.weight_layout(spec, f"model.layers.{index}")
        entries.append(_whole(NORM, spec.hidden_size))
        head = WeightPart(LM_HEAD, embedding_shape)
        tied_to = EMBEDDING if spec.tie_word_embeddings else None
        entries.append(WeightEntry(LM_HEAD, (head,), tied_to, is_vocabulary=True))
        return entries

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Compute the last hidden states of a flat batch, and fill the KV cache.

        Args:
            input_ids: ``[num_tokens]`` int32.
            positions: ``[num_tokens]`` int32.
            kv_caches: One for each layer.
            metadata: How the tokens divide into requests.

        Returns:
            ``[num_tokens, hidden_size]``, after the final norm.
        """
        hidden = self._embedding(input_ids)
        if self._decoder is not None:
            return self._decoder.forward(
                hidden, positions, kv_caches, metadata, self._layers[0].scale
            )
        residual = torch.zeros_like(hidden)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden, residual = layer.forward(
                hidden, residual, positions, self._cos_sin_cache, kv_cache, metadata
            )
        hidden = hidden + residual
        return hidden if self._norm is None else rms_norm(hidden, self._norm, self._eps)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32 from ``[num_rows, hidden_size]``."""
        assert self._lm_head is not None
        return self._lm_head(hidden_states).float()

    def _join_layers(self, spec: ModelSpec) -> Decoder:
        assert self._norm is not None
        return Decoder(
            [layer.packed() for layer in self._layers],
            self._norm,
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
            spec.rms_norm_eps,
            self._cos_sin_cache,
        )


class LlamaDecoderLayer:
    """Self-attention and a gated feed-forward, each behind a norm and added to the residual."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str) -> None:
        self._eps = spec.rms_norm_eps
        self._input_norm = tensor_of(weights, f"{prefix}.input_layernorm.weight")
        self._attention = LlamaAttention(spec, weights, f"{prefix}.self_attn")
        self._post_attention_norm = tensor_of(weights, f"{prefix}.post_attention_layernorm.weight")
        self._mlp = LlamaMLP(weights, f"{prefix}.mlp")

    @classmethod
    def weight_layout(cls, spec: ModelSpec, prefix: str) -> list[WeightEntry]:
        """List the layer's tensors."""
        return [
            _whole(f"{prefix}.input_layernorm.weight", spec.hidden_size),
            *LlamaAttention.weight_layout(spec, f"{prefix}.self_attn"),
            _whole(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
            *LlamaMLP.weight_layout(spec, f"{prefix}.mlp"),
        ]

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return the feed-forward's output, not yet added, and the residual stream."""
        hidden, residual = fused_add_rms_norm(hidden, residual, self._input_norm, self._eps)
        hidden = self._attention.forward(hidden, positions, cos_sin_cache, kv_cache, metadata)
        hidden, residual = fused_add_rms_norm(
            hidden, residual, self._post_attention_norm, self._eps
        )
        return self._mlp.forward(hidden), residual

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self._attention.scale

    def packed(self) -> DecoderLayer:
        """Return the layer's weights for `Decoder`."""
        qkv, output = self._attention.qkv_proj, self._attention.o_proj
        return DecoderLayer(
            input_norm=self._input_norm,
            qkv=qkv.parts,
            qkv_bias=qkv.part_biases,
            output=output.whole,
            output_bias=output.bias,
            ffn_norm=self._post_attention_norm,
            gate_up=self._mlp.gate_up_proj.parts,
            down=self._mlp.down_proj.whole,
        )


class LlamaAttention:
    """Grouped-query attention with rotary positions over the paged KV cache."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], prefix: str) -> None:
        self._head_dim = spec.head_dim
        q_size, kv_size = _attention_sizes(spec)
        self._split_sizes = [q_size, kv_size, kv_size]
        self.scale: float = spec.head_dim**-0.5
        self.qkv_proj = Linear.of(weights, f"{prefix}.qkv_proj")
        self.o_proj = Linear.of(weights, f"{prefix}.o_proj")

    @classmethod
    def weight_layout(cls, spec: ModelSpec, prefix: str) -> list[WeightEntry]:
        """List the projections: q, k and v fused, and o."""
        q_size, kv_size = _attention_sizes(spec)
        fused = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return [
            *_linear(prefix, "qkv_proj", fused, spec.hidden_size, spec.attention_bias),
            *_linear(prefix, "o_proj", {"o_proj": spec.hidden_size}, q_size, spec.attention_bias),
        ]

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Attend; ``[num_tokens, hidden_size]`` in and out."""
        heads = (len(hidden), -1, self._head_dim)
        qkv = torch.split(self.qkv_proj(hidden), self._split_sizes, dim=-1)
        query, key, value = (part.view(heads) for part in qkv)
        query, key = rotary_embedding(positions, query, key, cos_sin_cache)
        write_kv_cache(key, value, kv_cache.key, kv_cache.value, metadata.slot_mapping)
        attended = paged_attention(query, kv_cache.key, kv_cache.value, metadata, self.scale)
        return self.o_proj(attended.flatten(1))


class LlamaMLP:
    """The gated feed-forward."""

    def __init__(self, weights: Mapping[str, Weight], prefix: str) -> None:
        self.gate_up_proj = Linear.of(weights, f"{prefix}.gate_up_proj")
        self.down_proj = Linear.of(weights, f"{prefix}.down_proj")

    @classmethod
    def weight_layout(cls, spec: ModelSpec, prefix: str) -> list[WeightEntry]:
        """List the projections: gate and up fused, and down."""
        hidden, intermediate = spec.hidden_size, spec.intermediate_size
        fused = {"gate_proj": intermediate, "up_proj": intermediate}
        return [
            *_linear(prefix, "gate_up_proj", fused, hidden, spec.mlp_bias),
            *_linear(prefix, "down_proj", {"down_proj": hidden}, intermediate, spec.mlp_bias),
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute; ``[num_tokens, hidden_size]`` in and out."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))


def _attention_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Return the width of all query heads, and of all key (or value) heads."""
    return spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim


def _whole(name: str, *shape: int) -> WeightEntry:
    return WeightEntry(name, (WeightPart(name, shape),))


def _linear(
    prefix: str, name: str, parts: Mapping[str, int], in_features: int, bias: bool
) -> list[WeightEntry]:
    """List a projection's weight, and its bias if it has one.

    Args:
        prefix: What the projection belongs to.
        name: The model's name for it.
        parts: The checkpoint's projections that are fused in it, with their out_features.
        in_features: Width of the input.
        bias: Whether there is one.
    """

    def entry(kind: str, *columns: int) -> WeightEntry:
        tensors = (
            WeightPart(f"{prefix}.{part}.{kind}", (rows, *columns)) for part, rows in parts.items()
        )
        return WeightEntry(f"{prefix}.{name}.{kind}", tuple(tensors))

    return [entry("weight", in_features), *([entry("bias")] if bias else [])]


def _check_supported(spec: ModelSpec) -> None:
    if spec.hidden_act != "silu":
        raise ModelError(
            f"hidden_act {spec.hidden_act!r} is not supported for {spec.architecture}; "
            f"supported: silu.",
            field="hidden_act",
        )
    window = spec.sliding_window
    if window is not None and window < spec.max_position_embeddings:
        raise ModelError(
            f"sliding_window={window} is not supported for {spec.architecture} yet.",
            field="sliding_window",
        )
    if spec.head_dim % 2:
        raise ModelError(
            f"head_dim={spec.head_dim} is odd; rotary embedding needs pairs.", field="head_dim"
        )
