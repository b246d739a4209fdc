"""What a model is for, as its files say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError, ModelError
from octavo_core.memory_planner import longest_model_len, plan_kv_cache, resolve_max_model_len
from octavo_core.model_spec import read_model_spec
from octavo_core.pooler_spec import PoolerSpec, read_pooler_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
BERT = {**LLAMA, "architectures": ["BertModel"], "model_type": "bert"}
POOLING = "sentence_transformers.models.Pooling"
NORMALIZE = "sentence_transformers.models.Normalize"


def write(folder: Path, config: dict[str, Any], *modules: str, **pooling: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if modules:
        listed = [{"type": kind, "path": "1_Pooling"} for kind in modules]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def read(folder: Path, **settings: Any) -> PoolerSpec | None:
    config = EngineConfig().replace("the test", model_path=str(folder), **settings)
    return read_pooler_spec(config, read_model_spec(folder))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"architectures": ["LlamaModel"]}, PoolerSpec()),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            PoolerSpec(labels=("LABEL_0", "LABEL_1")),
        ),
        (
            {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "yes"}},
            PoolerSpec(labels=("yes",), activation="sigmoid"),
        ),
    ],
)
def test_an_architecture_says_what_it_is_for(
    tmp_path: Path, changes: dict[str, Any], expected: PoolerSpec | None
) -> None:
    assert read(write(tmp_path, {**LLAMA, **changes})) == expected


def test_a_decoder_with_modules_makes_embeddings(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, POOLING, NORMALIZE, pooling_mode_lasttoken=True)
    assert read(tmp_path) == PoolerSpec(pooling="last")
    assert read(tmp_path, runner="generate") is None
    assert read(tmp_path, pooling_type="mean") == PoolerSpec(pooling="mean")


def test_an_encoder_makes_embeddings(tmp_path: Path) -> None:
    assert read(write(tmp_path, BERT)) == PoolerSpec(is_encoder=True, pooling="cls")
    write(tmp_path, BERT, POOLING, pooling_mode="mean")
    assert read(tmp_path) == PoolerSpec(is_encoder=True, pooling="mean", normalize=False)
    with pytest.raises(ConfigError, match="BertModel has no language-model head"):
        read(tmp_path, runner="generate")


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            "sigmoid",
        ),
    ],
)
def test_activations_of_scores(tmp_path: Path, changes: dict[str, Any], activation: str) -> None:
    config = {**BERT, "architectures": ["BertForSequenceClassification"], **changes}
    found = read(write(tmp_path, config))
    assert found is not None
    assert found.activation == activation


@pytest.mark.parametrize(
    ("config", "modules", "pooling", "message"),
    [
        (BERT, [POOLING], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (
            BERT,
            [POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_cls_token, pooling_mode_mean_tokens",
        ),
        (BERT, [POOLING, "sentence_transformers.models.Dense"], {}, "models.Dense"),
        ({**BERT, "position_embedding_type": "relative_key"}, [], {}, "relative_key"),
        ({**LLAMA, "architectures": ["LlamaModel"], "is_causal": False}, [], {}, "is_causal"),
        (
            {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"7": "x"}},
            [],
            {},
            "'7'",
        ),
        (
            {
                **BERT,
                "architectures": ["BertForSequenceClassification"],
                "sbert_ce_default_activation_function": "my.own.Function",
            },
            [],
            {},
            "my.own.Function",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, config: Any, modules: list[str], pooling: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(write(tmp_path, config, *modules, **pooling))


def test_a_modules_path_leads_nowhere_else(tmp_path: Path) -> None:
    write(tmp_path, BERT)
    modules = [{"type": POOLING, "path": "../1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="1_Pooling"):
        read(tmp_path)


def test_several_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs on one worker"):
        read(write(tmp_path, BERT), tensor_parallel_size=2)


def test_an_encoders_context_and_plan(tmp_path: Path) -> None:
    """RoBERTa counts positions from behind its padding's number, and nothing is cached."""
    write(tmp_path, {**BERT, "model_type": "roberta", "max_position_embeddings": 514})
    spec = read_model_spec(tmp_path)
    config = EngineConfig()
    assert resolve_max_model_len(spec, config) == 512
    assert plan_kv_cache(spec, config, 0, "float32").num_blocks == 0
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    spec = read_model_spec(tmp_path)
    assert resolve_max_model_len(spec, config) == longest_model_len(spec, config) == 128
    # A flag may ask for all positions that there are, and for no more.
    longer = config.replace("the test", max_model_len=512)
    assert resolve_max_model_len(spec, longer) == 512
    with pytest.raises(ConfigError, match="the model's context has 512"):
        resolve_max_model_len(spec, config.replace("the test", max_model_len=513))


def test_a_name_that_ends_in_model_may_still_generate(tmp_path: Path) -> None:
    """GPT-2's causal model is the only one that does not say so in the way of the others."""
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 512,
    }
    assert read(write(tmp_path, gpt2)) is None
