import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo_core.errors import ModelError
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.layer_spec import LayerSpec
from octavo_core.model_spec import ModelSpec, read_model_spec, spec_from_config
from support.gguf_writer import llama_metadata, write_gguf
from support.model_configs import (
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GEMMA_3_1B,
    GEMMA_3_4B,
    GPT_OSS_20B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    PUBLISHED,
    QWEN_3_30B_A3B,
    QWEN_25_7B,
)

EMBEDDING = {"token_embd.weight": ((100, 32), 0, bytes(100 * 32 * 4))}

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}


def test_config_json() -> None:
    spec = spec_from_config(LLAMA_3_8B)
    assert spec.head_dim == 128
    assert spec.dtype == "bfloat16"
    assert spec.eos_token_ids == (128001,)
    assert spec.kv_bytes_per_token(2) == 131072


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_old_and_new_names_of_the_dtype(key: str) -> None:
    config = {**LLAMA_3_8B, "torch_dtype": None, key: "float16"}
    assert spec_from_config(config).dtype == "float16"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
        },
    ],
)
def test_old_and_new_spelling_of_rope(changes: dict[str, Any]) -> None:
    spec = spec_from_config({**LLAMA_3_8B, **changes})
    assert spec.rope_theta == 500000.0
    assert spec.rope_parameters == {"rope_type": "linear", "factor": 2.0}


def test_default_rope_is_empty() -> None:
    rope = {"rope_type": "default", "rope_theta": 7.0}
    spec = spec_from_config({**LLAMA_3_8B, "rope_parameters": rope})
    assert (spec.rope_theta, spec.rope_parameters) == (7.0, {})


def test_generation_config_names_every_end() -> None:
    spec = spec_from_config(LLAMA_3_8B, {"eos_token_id": [128001, 128009]})
    assert spec.eos_token_ids == (128001, 128009)


def test_no_kv_heads_means_as_many_as_heads() -> None:
    config = {key: value for key, value in LLAMA_3_8B.items() if key != "num_key_value_heads"}
    assert spec_from_config(config).num_key_value_heads == 32


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": 5}, "architectures is 5; it must be a list"),
        ({"architectures": [5]}, r"architectures is \[5\]; it must be a list"),
        ({"layer_types": "foo"}, 'layer_types is "foo"; it must be a list'),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear"; it must be an object'),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be positive"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"quantization_config": "x"}, "quantization_config is 'x'; it must be an object"),
        ({"num_local_experts": 8, "moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({"num_local_experts": 8, "n_shared_experts": -9}, "shared_expert_intermediate_size"),
        ({"quantization_config": {"quant_method": "gptq", "bits": -100}}, "bits=-100"),
        ({"quantization_config": {"quant_method": "awq", "w_bit": 0}}, "bits=0"),
    ],
)
def test_wrong_entries_are_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelError, match=name) as raised:
        spec_from_config({**LLAMA_3_8B, **changes})
    assert not raised.value.message.endswith("..")


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_model_spec(tmp_path).eos_token_ids == (5,)


def test_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), EMBEDDING)
    spec = read_model_spec(path)
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.vocab_size, spec.head_dim, spec.num_key_value_heads) == (100, 8, 2)
    assert spec.tie_word_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.rms_norm_eps == pytest.approx(1e-5)


def test_an_unknown_gguf_architecture_keeps_its_name_and_can_be_planned(tmp_path: Path) -> None:
    metadata = {
        key.replace("llama.", "novel."): value
        for key, value in llama_metadata(**{"general.architecture": "novel"}).items()
    }
    spec = read_model_spec(write_gguf(tmp_path / "m.gguf", metadata, EMBEDDING))
    assert (spec.architecture, spec.num_hidden_layers) == ("novel", 2)


@pytest.mark.parametrize(
    ("changes", "tensors", "word"),
    [
        ({"general.architecture": "mamba"}, "embedding", "hidden"),
        ({"general.architecture": 3}, "embedding", "general.architecture"),
        ({"llama.block_count": 0}, "embedding", "num_hidden_layers"),
        ({"llama.attention.head_count_kv": [2, 3]}, "embedding", "num_key_value_heads"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "embedding", "layer_num_kv_heads"),
        ({}, "none", "token_embd.weight"),
    ],
)
def test_what_a_gguf_file_misses_is_named(
    tmp_path: Path, changes: dict[str, Any], tensors: str, word: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_metadata(**changes), EMBEDDING if tensors == "embedding" else {})
    with pytest.raises(ModelError, match=word) as raised:
        read_model_spec(path)
    assert str(path) in raised.value.message


def gguf_spec(tmp_path: Path, name: str, **entries: Any) -> ModelSpec:
    """Read a GGUF file of another architecture with 6 layers."""
    metadata = {
        "general.architecture": name,
        f"{name}.block_count": 6,
        f"{name}.context_length": 8192,
        f"{name}.embedding_length": 32,
        f"{name}.feed_forward_length": 64,
        f"{name}.attention.head_count": 4,
        **{f"{name}.{key.replace('__', '.')}": value for key, value in entries.items()},
    }
    return read_model_spec(write_gguf(tmp_path / "m.gguf", metadata, EMBEDDING))


def test_gguf_windows(tmp_path: Path) -> None:
    window = {"attention__sliding_window": 128}
    for name, kinds in [
        ("gemma2", ("sliding", "full") * 3),
        ("gemma3", ("sliding",) * 5 + ("full",)),
        ("gpt-oss", ("sliding", "full") * 3),
        ("phi3", ("sliding",) * 6),
    ]:
        spec = gguf_spec(tmp_path, name, **window)
        assert tuple(layer.kind for layer in spec.layers) == kinds
        assert {layer.window for layer in spec.layers if layer.kind == "sliding"} == {128}
    spec = gguf_spec(
        tmp_path, "novel", **window, attention__sliding_window_pattern=[True] * 4 + [False] * 2
    )
    assert [layer.window for layer in spec.layers] == [128] * 4 + [None] * 2


def test_gguf_mixture(tmp_path: Path) -> None:
    spec = gguf_spec(
        tmp_path,
        "qwen3moe",
        expert_count=8,
        expert_used_count=2,
        expert_feed_forward_length=16,
        attention__key_length=16,
    )
    assert (spec.architecture, spec.model_type) == ("Qwen3MoeForCausalLM", "qwen3_moe")
    assert (spec.num_experts, spec.num_experts_per_tok, spec.moe_intermediate_size) == (8, 2, 16)
    assert (spec.moe_layers, spec.head_dim) == (tuple(range(6)), 16)
    spec = gguf_spec(tmp_path, "llama", expert_count=8, expert_used_count=2)
    assert (spec.architecture, spec.moe_intermediate_size) == ("MixtralForCausalLM", 64)


@pytest.mark.parametrize(
    "lengths",
    [
        {"key_length": 24, "value_length": 16},
        {"key_length": 40, "value_length": 32, "key_length_mla": 24, "value_length_mla": 16},
    ],
)
def test_gguf_latent_attention(tmp_path: Path, lengths: dict[str, int]) -> None:
    spec = gguf_spec(
        tmp_path,
        "deepseek2",
        **{f"attention__{key}": value for key, value in lengths.items()},
        attention__head_count_kv=1,
        attention__kv_lora_rank=32,
        rope__dimension_count=8,
        leading_dense_block_count=1,
        expert_count=4,
        expert_feed_forward_length=16,
        expert_shared_count=2,
    )
    assert (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.qk_nope_head_dim) == (32, 8, 16)
    assert (spec.head_dim, spec.head_dim_v, spec.num_key_value_heads) == (24, 16, 4)
    assert spec.layers[0] == LayerSpec("mla", 1, 40, 0)
    assert (spec.moe_layers, spec.shared_expert_intermediate_size) == ((1, 2, 3, 4, 5), 32)


def test_gguf_heads_by_layer(tmp_path: Path) -> None:
    spec = gguf_spec(tmp_path, "novel", attention__head_count_kv=[2, 2, 1, 1, 0, 4])
    assert [layer.num_kv_heads for layer in spec.layers] == [2, 2, 1, 1, 0, 4]
    assert spec.kv_bytes_per_token(2) == 10 * 2 * 8 * 2
    assert spec.kv_cache_groups() == (KVCacheGroup((0, 1, 2, 3, 5)),)


def test_gguf_rope_tensor_can_be_planned(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 2.5, 8.0]
    tensors = {**EMBEDDING, "rope_freqs.weight": ((4,), 0, struct.pack("<4f", *factors))}
    spec = read_model_spec(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors))
    assert spec.rope_parameters["rope_type"] == "longrope"
    assert spec.rope_parameters["long_factor"] == spec.rope_parameters["short_factor"] == factors


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    published = PUBLISHED[name]
    spec = spec_from_config(published.config)
    assert spec.kv_bytes_per_token(2) == published.kv_bytes_per_token
    assert spec.architecture == published.config["architectures"][0]
    # It crosses to the worker's process.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


def windows(config: dict[str, Any], **changes: Any) -> list[int | None]:
    return [layer.window for layer in spec_from_config({**config, **changes}).layers]


def test_windows_in_every_spelling() -> None:
    alternate = [4096, None] * 21
    assert windows(GEMMA_2_9B, max_position_embeddings=8192) == alternate
    by_name = ["sliding_attention", "full_attention"] * 21
    assert windows(GEMMA_2_9B, layer_types=by_name) == alternate
    assert windows(GPT_OSS_20B) == [128, None] * 12
    assert windows({**GPT_OSS_20B, "layer_types": None}) == [128, None] * 12
    assert windows(GEMMA_3_4B) == ([1024] * 5 + [None]) * 5 + [1024] * 4
    assert windows(GEMMA_3_1B, sliding_window_pattern=2) == [512, None] * 13
    assert windows(MISTRAL_7B) == [4096] * 32
    for off in ({"sliding_window": None}, {"sliding_window": 0}, {"use_sliding_window": False}):
        assert windows(MISTRAL_7B, **off) == [None] * 32
    # A window that is never full is none.
    assert windows(MISTRAL_7B, max_position_embeddings=4096) == [None] * 32


def test_qwen_uses_its_window_only_when_told_to() -> None:
    assert windows(QWEN_25_7B) == [None] * 28
    on = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    assert windows(QWEN_25_7B, **on) == [None] * 20 + [4096] * 8


def test_layers_that_keep_nothing() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    spec = spec_from_config({**LLAMA_3_8B, "layer_types": kinds})
    assert spec.kv_bytes_per_token(2) == 131072 // 4
    assert spec.kv_cache_groups() == (KVCacheGroup(tuple(range(3, 32, 4))),)
    shared = spec_from_config({**LLAMA_3_8B, "num_kv_shared_layers": 8})
    assert shared.kv_bytes_per_token(2) == 131072 * 3 // 4
    with pytest.raises(ModelError, match="layer_types names 2 layers"):
        spec_from_config({**LLAMA_3_8B, "layer_types": ["full_attention"] * 2})


@pytest.mark.parametrize("entries", [{}, {"full_attention_interval": 4}])
def test_linear_layers_by_their_interval(entries: dict[str, int]) -> None:
    spec = spec_from_config({**LLAMA_3_8B, "model_type": "qwen3_next", **entries})
    assert spec.kv_cache_groups() == (KVCacheGroup(tuple(range(3, 32, 4))),)
    assert spec.kv_bytes_per_token(2) == 131072 // 4
    other = spec_from_config({**LLAMA_3_8B, "full_attention_interval": 2})
    assert other.kv_bytes_per_token(2) == 131072 // 2


def test_which_layers_are_mixtures() -> None:
    assert spec_from_config(MIXTRAL_8X7B).moe_layers == tuple(range(32))
    assert spec_from_config(DEEPSEEK_V3).moe_layers == tuple(range(3, 61))
    odd = spec_from_config({**QWEN_3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert odd.moe_layers == tuple(range(3, 48, 2))
    assert spec_from_config(LLAMA_3_8B).moe_layers == ()


def test_latent_attention() -> None:
    spec = spec_from_config(DEEPSEEK_V3)
    assert spec.layers[0] == LayerSpec("mla", 1, 576, 0)
    assert (spec.head_dim, spec.head_dim_v) == (192, 128)


def test_a_nested_language_model() -> None:
    spec = spec_from_config(GEMMA_3_4B)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.max_position_embeddings, spec.vocab_size) == (131072, 262208)
    assert (spec.dtype, spec.tie_word_embeddings) == ("bfloat16", True)
    assert spec.rope_parameters == {"rope_type": "linear", "factor": 8.0}


def test_an_unknown_architecture_with_the_usual_keys_is_read() -> None:
    spec = spec_from_config(
        {**LLAMA_3_8B, "architectures": ["NovelForCausalLM"], "model_type": "novel"}
    )
    assert spec.kv_bytes_per_token(2) == 131072


@pytest.mark.parametrize(
    ("entries", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({}, None),
        ({"dtype": "auto"}, None),
        ({"dtype": "banana"}, "banana"),  # refused where it is used, with the known ones
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_case_c03_dtype_of_the_checkpoint(entries: dict[str, Any], dtype: str | None) -> None:
    config = {key: value for key, value in LLAMA_3_8B.items() if key != "torch_dtype"}
    assert spec_from_config({**config, **entries}).dtype == dtype


def test_case_c03_conflicting_keys_warn(caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_from_config({**LLAMA_3_8B, "torch_dtype": "float32", "dtype": "float16"})
    assert spec.dtype == "float16"
    assert "float32" in caplog.text
    assert "float16" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": "wide"},
        {"sliding_window": -1},
        {"layer_types": "full_attention"},
        {"num_local_experts": 8, "moe_intermediate_size": "x"},
        {"rope_scaling": "linear"},
        {"architectures": 5},
        {"kv_lora_rank": 5, "qk_nope_head_dim": "x"},
    ],
)
def test_entries_of_a_wrong_type_are_no_traceback(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        spec_from_config({**LLAMA_3_8B, **changes})


ODD = [None, -1, 0, 10**12, 1.5, "x", [], [1], {}, {"a": 1}, True]


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-oss-20b", "deepseek-v3", "gpt2", "gemma-3-4b"])
def test_any_entry_may_be_anything(name: str) -> None:
    config = PUBLISHED[name].config
    extra = ("sliding_window", "use_sliding_window", "layer_types", "quantization_config", "dtype")
    for key in {*config, *extra, "rope_parameters", "eos_token_id", "num_kv_shared_layers"}:
        for value in ODD:
            try:
                spec = spec_from_config({**config, key: value})
            except ModelError:
                continue
            assert len(spec.layers) == spec.num_hidden_layers
            assert spec.kv_bytes_per_token(2) >= 0
