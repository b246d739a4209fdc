"""What a step asks of one device, counted from a model's shapes."""

from __future__ import annotations

import msgspec

from octavo_core.memory_planner import DTYPE_BYTES, KV_DTYPE_BYTES, MemoryPlan
from octavo_core.model_spec import ModelSpec
from octavo_core.quantization import QUANTIZATIONS
from octavo_core.weight_estimate import estimate_weights, layer_parameters


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and operations of a step on one of the devices that share the model.

    Attributes:
        weights_bytes: Read by a step, whatever it holds, output layer included.
        expert_bytes: Of these, what a mixture's experts take: a step of few tokens reads
            only the experts that they choose.
        expert_share: Share of the experts that one token chooses.
        token_flops: Operations of one token in the layers.
        sample_flops: Operations of one row of logits.
        kv_bytes_per_token: K and V of one token.
        pair_flops: Operations of one (query, key) pair.
        num_exchanges: Times in a step that the devices add up their parts.
    """

    weights_bytes: float
    token_flops: float
    sample_flops: float
    kv_bytes_per_token: float
    pair_flops: float
    expert_bytes: float = 0.0
    expert_share: float = 1.0
    num_exchanges: int = 0


def model_work(spec: ModelSpec, plan: MemoryPlan) -> ModelWork:
    """Count what a model asks for, stored as `plan` has it.

    Layers with a window are taken to read all of their context, which is too much for long
    requests.
    """
    tp = plan.settings.tensor_parallel_size
    quantization = spec.quantization
    if plan.settings.quantization is not None:
        quantization = QUANTIZATIONS.get(plan.settings.quantization)
    dtype_bytes = DTYPE_BYTES[plan.weights_dtype]
    weights = estimate_weights(spec, dtype_bytes, quantization, tp)
    counts = [layer_parameters(spec, index, tp) for index in range(spec.num_hidden_layers)]
    experts = sum(count.experts for count in counts)
    linear = sum(count.linear for count in counts)
    packed: float = dtype_bytes
    if quantization is not None and quantization.weight_bytes is not None:
        packed = quantization.weight_bytes
    share = spec.num_experts_per_tok / spec.num_experts if spec.num_experts else 1.0
    heads = -(-spec.num_attention_heads // tp)
    head_dims = spec.head_dim + (spec.head_dim_v or spec.head_dim)
    return ModelWork(
        weights_bytes=sum(weights.layer_bytes) + weights.head_bytes + weights.tied_bytes,
        expert_bytes=experts * packed,
        expert_share=share,
        token_flops=2 * (linear + experts * share),
        sample_flops=2 * spec.hidden_size * -(-spec.vocab_size // tp),
        kv_bytes_per_token=spec.kv_bytes_per_token(KV_DTYPE_BYTES[plan.kv_cache_dtype], tp),
        pair_flops=2 * heads * head_dims * spec.num_hidden_layers,
        num_exchanges=2 * spec.num_hidden_layers if tp > 1 else 0,
    )
