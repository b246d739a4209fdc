"""What a model family's config.json leaves unsaid.

Files state sizes; that Qwen2 has biases on q, k and v, or that every other layer of Gemma 2
has a window, stands only in the family's definition. Families without an entry are taken to be
built like Llama, which is right for most, and plans say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# No model has nearly as many; a damaged file may say so, and lists of tensors are made of them.
MAX_LAYERS = 4096
MAX_EXPERTS = 4096


class ModelFamily(NamedTuple):
    """Traits that one ``model_type`` has in common.

    Attributes:
        gated_mlp: Gate, up and down projection; otherwise up and down only.
        qkv_bias: q, k and v have biases whatever ``attention_bias`` says.
        all_bias: Every projection of a layer has one.
        norms_per_layer: Norms of a layer, beside those of heads.
        layer_norm: LayerNorm with a weight and a bias, where others have RMSNorm.
        qk_norm: Each head of q and k is normed.
        learned_positions: Positions are a table, of ``max_position_embeddings`` plus
            this many rows less one; 0 means rotary or none.
        attention_sinks: Each head has a learned logit beside its scores.
        sliding_pattern: Every this many layers one attends to all tokens and the others to a
            window, where the file says nothing; 0 means that all layers are alike.
        is_encoder: Every token attends to all others, and nothing is cached.
        is_guess: Not all that such a model is built of is known here; it is counted as a Llama
            with the other traits.
        defaults: What a left-out key of config.json means.
    """

    gated_mlp: bool = True
    qkv_bias: bool = False
    all_bias: bool = False
    norms_per_layer: int = 2
    layer_norm: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    attention_sinks: bool = False
    sliding_pattern: int = 0
    is_encoder: bool = False
    is_guess: bool = False
    defaults: Mapping[str, Any] = {}


_TIED = {"tie_word_embeddings": True}
_GEMMA_2 = {
    **_TIED,
    "sliding_window": 4096,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_3 = {
    **_TIED,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}

_BERT = ModelFamily(
    gated_mlp=False,
    all_bias=True,
    layer_norm=True,
    learned_positions=1,
    is_encoder=True,
    defaults={
        **_TIED,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "max_position_embeddings": 512,
    },
)
# Positions start behind the number of the padding token, which is 1.
_ROBERTA = _BERT._replace(defaults={**_BERT.defaults, "pad_token_id": 1})

FAMILIES: dict[str, ModelFamily] = {
    "bert": _BERT,
    "camembert": _ROBERTA,
    "deepseek_v2": ModelFamily(defaults={"norm_topk_prob": False}),
    "deepseek_v3": ModelFamily(),
    "falcon": ModelFamily(gated_mlp=False, layer_norm=True, defaults=_TIED),
    "gemma": ModelFamily(defaults=_TIED),
    "gemma2": ModelFamily(norms_per_layer=4, sliding_pattern=2, defaults=_GEMMA_2),
    "gemma3_text": ModelFamily(
        norms_per_layer=4, qk_norm=True, sliding_pattern=6, defaults=_GEMMA_3
    ),
    "gpt2": ModelFamily(
        gated_mlp=False,
        all_bias=True,
        layer_norm=True,
        learned_positions=1,
        defaults={**_TIED, "hidden_act": "gelu_new"},
    ),
    "gpt_neox": ModelFamily(gated_mlp=False, all_bias=True, layer_norm=True),
    "gpt_oss": ModelFamily(
        attention_sinks=True,
        sliding_pattern=2,
        defaults={"sliding_window": 128, "attention_bias": True},
    ),
    "llama": ModelFamily(),
    "mistral": ModelFamily(),
    "mixtral": ModelFamily(),
    "opt": ModelFamily(
        gated_mlp=False,
        all_bias=True,
        layer_norm=True,
        learned_positions=3,  # positions start at 2
        defaults={**_TIED, "hidden_act": "relu"},
    ),
    "phi": ModelFamily(gated_mlp=False, all_bias=True, norms_per_layer=1, layer_norm=True),
    "phi3": ModelFamily(),
    "qwen2": ModelFamily(qkv_bias=True),
    "qwen2_moe": ModelFamily(qkv_bias=True, defaults={"norm_topk_prob": False}),
    "qwen3": ModelFamily(qk_norm=True),
    "qwen3_moe": ModelFamily(qk_norm=True, defaults={"norm_topk_prob": False}),
    # Its layers with linear attention have weights of other shapes.
    "qwen3_next": ModelFamily(qk_norm=True, is_guess=True, defaults={"full_attention_interval": 4}),
    "roberta": _ROBERTA,
    "starcoder2": ModelFamily(gated_mlp=False, all_bias=True, layer_norm=True, defaults=_TIED),
    "xlm-roberta": _ROBERTA,
}


# The outer name of the multimodal ones, for files whose text_config does not say its own.
FAMILIES["gemma3"] = FAMILIES["gemma3_text"]


def family_of(model_type: str) -> ModelFamily:
    """Return the traits of a family; one that is not listed is a guess, at a Llama."""
    return FAMILIES.get(model_type, _LLAMA)


_LLAMA = ModelFamily(is_guess=True)
