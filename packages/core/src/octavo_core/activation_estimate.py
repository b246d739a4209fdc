"""How many bytes a full step takes beside weights and KV cache, from shapes alone."""

from __future__ import annotations

from octavo_core.model_spec import ModelSpec


def estimate_activations(
    spec: ModelSpec,
    *,
    dtype_bytes: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
) -> int:
    """Estimate the peak of a step on one device.

    A layer is widest at attention (its input, the residual, q, k and v, their rotated copies
    and the output) or at the feed-forward (input, residual, gate and up, their product; in a
    mixture once for each chosen expert). Logits are float32, with one masked copy, for each
    running request.

    A device's own context, its graphs and what libraries keep are not counted.
    """
    tp = tensor_parallel_size
    heads = -(-spec.num_attention_heads // tp) + -(-spec.num_key_value_heads // tp)
    attention = 4 * heads * max(spec.head_dim, spec.head_dim_v or 0)
    widest = max(attention, _feed_forward_numbers(spec, tp))
    per_token = (2 * spec.hidden_size + widest) * dtype_bytes
    logits = 2 * 4 * max_num_seqs * spec.vocab_size
    return max_num_batched_tokens * per_token + logits


def _feed_forward_numbers(spec: ModelSpec, tp: int) -> int:
    dense = 3 * -(-spec.intermediate_size // tp)
    if not spec.moe_layers:
        return dense
    experts = spec.num_experts_per_tok * (
        3 * -(-spec.moe_intermediate_size // tp) + spec.hidden_size
    )
    shared = 3 * -(-spec.shared_expert_intermediate_size // tp)
    is_all_experts = len(spec.moe_layers) == spec.num_hidden_layers
    return experts + shared if is_all_experts else max(dense, experts + shared)
