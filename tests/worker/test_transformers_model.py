"""What of transformers' models is run, and what is refused by name."""

import json
import sys

import pytest
import torch
import transformers

from octavo_core.errors import ConfigError, ModelError
from octavo_core.model_spec import read_model_spec
from octavo_worker.load_model import load_model
from octavo_worker.loading import WeightForm
from octavo_worker.worker import Worker
from support.one_prompt import prompt_logits
from support.tiny_families import save_family

CPU = torch.device("cpu")
FORM = WeightForm(torch.float32)


def _load(folder):
    return load_model(read_model_spec(folder), folder, FORM, 64, CPU, lambda *_: None).model


def _change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("family", "words"), [("olmo2", "through transformers"), ("llama", "by its own definition")]
)
def test_the_log_says_which_definition_runs(family, words, tmp_path, caplog):
    save_family(family, tmp_path)
    with caplog.at_level("INFO"):
        _load(tmp_path)
    assert any(words in record.message for record in caplog.records)


def test_without_transformers_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    save_family("olmo2", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'octavo-worker\[transformers\]'"):
        _load(tmp_path)


def test_code_that_comes_with_a_model_is_never_run(tmp_path):
    save_family("olmo2", tmp_path)
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('run')")
    auto_map = {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}
    _change_config(tmp_path, architectures=["EvilForCausalLM"], auto_map=auto_map)
    with pytest.raises(ModelError, match=r"'EvilForCausalLM'.*auto_map\) is never run"):
        _load(tmp_path)
    # A class that transformers has is its own, whatever the file offers besides.
    _change_config(tmp_path, architectures=["Olmo2ForCausalLM"])
    _load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    model = save_family("olmo2", tmp_path)
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"tensor model.layers.1.mlp.up_proj.weight is missing"):
        _load(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    save_family("olmo2", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors is damaged: tensor \S+ would end"):
        _load(tmp_path)


def test_a_weight_that_is_not_a_number_is_named(tmp_path):
    model = save_family("olmo2", tmp_path)
    model.model.norm.weight.data[3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"tensor model.norm.weight has numbers that are NaN"):
        _load(tmp_path)


def test_weights_that_do_not_fit_are_refused_with_the_numbers(tmp_path, monkeypatch):
    save_family("olmo2", tmp_path)
    monkeypatch.setattr("octavo_worker.loading.room.free_memory", lambda device: 1 << 10)
    with pytest.raises(ConfigError, match=r"take 0\.00 GiB, but only 0\.00 GiB of cpu .*--dtype"):
        _load(tmp_path)


def test_models_without_positions_are_refused(tmp_path):
    config = transformers.BartConfig(vocab_size=64, d_model=32, decoder_layers=1)
    transformers.BartForCausalLM(config).save_pretrained(tmp_path)
    _change_config(tmp_path, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32)
    with pytest.raises(ModelError, match="takes no positions"):
        _load(tmp_path)


def test_models_whose_attention_stays_their_own_are_found_out(tmp_path):
    """By a prompt's first step, which is the engine's warm-up."""
    save_family("olmo2", tmp_path)
    model = _load(tmp_path)
    model._model.config._attn_implementation = "eager"  # as in one that has no interface
    with pytest.raises(ModelError, match="0 of its 2 layers let transformers' attention be"):
        prompt_logits(model, read_model_spec(tmp_path), [1, 2, 3])


def test_quantizing_is_refused(make_config, tmp_path):
    save_family("olmo2", tmp_path)
    config = make_config(tmp_path, quantization="q8_0")
    with pytest.raises(ConfigError, match=r"quantization is q8_0.*through transformers"):
        Worker(config, read_model_spec(tmp_path)).init_device()
