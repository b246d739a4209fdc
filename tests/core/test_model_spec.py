import json
from pathlib import Path
from typing import Any

import pytest

from octavo_core.errors import ModelError
from octavo_core.model_spec import read_model_spec, spec_from_config
from support.gguf_writer import llama_metadata, write_gguf

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
        ({"architectures": None}, "architecture"),
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
    tensors = {"token_embd.weight": ((100, 32), 0, bytes(100 * 32 * 4))}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors)
    spec = read_model_spec(path)
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.vocab_size, spec.head_dim, spec.num_key_value_heads) == (100, 8, 2)
    assert spec.tie_word_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.rms_norm_eps == pytest.approx(1e-5)


def test_unknown_gguf_architecture_is_refused_by_name(tmp_path: Path) -> None:
    metadata = llama_metadata(**{"general.architecture": "mamba"})
    with pytest.raises(ModelError, match=r"'mamba' is not supported; supported: llama"):
        read_model_spec(write_gguf(tmp_path / "m.gguf", metadata, {}))
