"""config.json of well-known models, in the spelling that their owners published.

Each with its number of parameters, which is what transformers counts when it builds the model,
and with the bytes of K and V that one token takes in a 2-byte type over all layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    config: dict[str, Any]
    num_parameters: int
    kv_bytes_per_token: int


def _config(architecture: str, model_type: str, **entries: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **entries}


LLAMA_3_8B = _config(
    "LlamaForCausalLM",
    "llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
QWEN_25_7B = _config(
    "Qwen2ForCausalLM",
    "qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    max_position_embeddings=32768,
    max_window_layers=28,
    num_attention_heads=28,
    num_hidden_layers=28,
    num_key_value_heads=4,
    sliding_window=131072,
    tie_word_embeddings=False,
    use_sliding_window=False,
    vocab_size=152064,
    torch_dtype="bfloat16",
)
QWEN_3_06B = _config(
    "Qwen3ForCausalLM",
    "qwen3",
    head_dim=128,
    hidden_size=1024,
    intermediate_size=3072,
    max_position_embeddings=40960,
    num_attention_heads=16,
    num_hidden_layers=28,
    num_key_value_heads=8,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
    vocab_size=151936,
)
QWEN_3_30B_A3B = _config(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    decoder_sparse_step=1,
    head_dim=128,
    hidden_size=2048,
    intermediate_size=6144,
    max_position_embeddings=40960,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    sliding_window=None,
    tie_word_embeddings=False,
    use_sliding_window=False,
    vocab_size=151936,
)
MIXTRAL_8X7B = _config(
    "MixtralForCausalLM",
    "mixtral",
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=32768,
    num_attention_heads=32,
    num_experts_per_tok=2,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_local_experts=8,
    sliding_window=None,
    vocab_size=32000,
)
MISTRAL_7B = _config(
    "MistralForCausalLM",
    "mistral",
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=32768,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    sliding_window=4096,
    vocab_size=32000,
)
GEMMA_2_9B = _config(
    "Gemma2ForCausalLM",
    "gemma2",
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=3584,
    intermediate_size=14336,
    max_position_embeddings=8192,
    num_attention_heads=16,
    num_hidden_layers=42,
    num_key_value_heads=8,
    sliding_window=4096,
    vocab_size=256000,
)
GEMMA_3_1B = _config(
    "Gemma3ForCausalLM",
    "gemma3_text",
    head_dim=256,
    hidden_size=1152,
    intermediate_size=6912,
    max_position_embeddings=32768,
    num_attention_heads=4,
    num_hidden_layers=26,
    num_key_value_heads=1,
    sliding_window=512,
    sliding_window_pattern=6,
    vocab_size=262144,
)
# What is left out are the defaults of the family.
GEMMA_3_4B = _config(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    text_config={
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    vision_config={"hidden_size": 1152, "num_hidden_layers": 27},
    torch_dtype="bfloat16",
)
PHI_3_MINI = _config(
    "Phi3ForCausalLM",
    "phi3",
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    sliding_window=2047,
    tie_word_embeddings=False,
    vocab_size=32064,
)
OPT_125M = _config(
    "OPTForCausalLM",
    "opt",
    activation_function="relu",
    ffn_dim=3072,
    hidden_size=768,
    max_position_embeddings=2048,
    num_attention_heads=12,
    num_hidden_layers=12,
    vocab_size=50272,
    word_embed_proj_dim=768,
)
OPT_350M = {
    **OPT_125M,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}
GPT_2 = _config(
    "GPT2LMHeadModel",
    "gpt2",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    n_ctx=1024,
    n_embd=768,
    n_head=12,
    n_inner=None,
    n_layer=12,
    n_positions=1024,
    vocab_size=50257,
)
GPT_OSS_20B = _config(
    "GptOssForCausalLM",
    "gpt_oss",
    attention_bias=True,
    experts_per_token=4,
    head_dim=64,
    hidden_size=2880,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    num_attention_heads=64,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    sliding_window=128,
    tie_word_embeddings=False,
    vocab_size=201088,
    quantization_config={
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
)
DEEPSEEK_V2_LITE = _config(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    first_k_dense_replace=1,
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_routed_experts=64,
    n_shared_experts=2,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=102400,
)
DEEPSEEK_V3 = {
    **DEEPSEEK_V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}

PUBLISHED = {
    "llama-3-8b": Published(LLAMA_3_8B, 8030261248, 131072),
    "qwen2.5-7b": Published(QWEN_25_7B, 7615616512, 57344),
    "qwen3-0.6b": Published(QWEN_3_06B, 596049920, 114688),
    "qwen3-30b-a3b": Published(QWEN_3_30B_A3B, 30532122624, 98304),
    "mixtral-8x7b": Published(MIXTRAL_8X7B, 46702792704, 131072),
    "mistral-7b": Published(MISTRAL_7B, 7241732096, 131072),
    "gemma-2-9b": Published(GEMMA_2_9B, 9241705984, 344064),
    "gemma-3-1b": Published(GEMMA_3_1B, 999885952, 26624),
    "gemma-3-4b": Published(GEMMA_3_4B, 3880263168, 139264),
    "phi-3-mini": Published(PHI_3_MINI, 3821079552, 393216),
    "opt-125m": Published(OPT_125M, 125239296, 36864),
    "opt-350m": Published(OPT_350M, 331196416, 98304),
    "gpt2": Published(GPT_2, 124439808, 36864),
    "gpt-oss-20b": Published(GPT_OSS_20B, 20914757184, 49152),
    "deepseek-v2-lite": Published(DEEPSEEK_V2_LITE, 15706484224, 31104),
    "deepseek-v3": Published(DEEPSEEK_V3, 671026404352, 70272),
}
