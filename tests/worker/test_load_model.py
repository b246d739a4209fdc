"""Which tensors a model gets: under other names, and random ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo_core.model_spec import read_model_spec
from octavo_worker.load_model import load_model
from octavo_worker.loading import WeightForm
from support.one_prompt import prompt_logits
from support.tiny_families import VOCAB_SIZE, save_family

CPU = torch.device("cpu")
TOKENS = [5, 17, 101, 3, 3, 99, 128, 7, 64, 31, 2]


def _load(folder, quantization="none", **options):
    spec = read_model_spec(folder)
    form = WeightForm(torch.float32, quantization)
    return load_model(spec, folder, form, 64, CPU, lambda *_: None, **options).model, spec


def _rename(folder, rename):
    path = folder / "model.safetensors"
    tensors = {rename(name): tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        # GPT-2 on the hub was saved without its head.
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        ("opt", lambda name: name.removeprefix("model.")),
        # A language model within a multimodal one, in its old and its new spelling.
        ("gemma3", lambda name: f"language_model.{name}"),
        ("gemma3", lambda name: name.replace("model.", "model.language_model.")),
    ],
)
def test_weights_are_found_under_other_names(family, rename, tmp_path):
    reference = save_family(family, tmp_path)
    _rename(tmp_path, rename)
    model, spec = _load(tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(prompt_logits(model, spec, TOKENS), expected, rtol=0, atol=1e-4)


def test_what_is_beside_the_language_model_is_skipped(tmp_path):
    """Layers of an image encoder have numbers as well."""
    save_family("gemma3", tmp_path)
    _rename(tmp_path, lambda name: f"language_model.{name}")
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file({**tensors, "vision_tower.layers.0.fc1.weight": torch.ones(2, 2)}, path)
    _load(tmp_path)


def test_the_language_model_of_a_multimodal_one(tmp_path):
    reference = save_family("gemma3", tmp_path)
    _rename(tmp_path, lambda name: f"language_model.{name}")
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    del text["architectures"]
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    path.write_text(json.dumps({**outer, "text_config": text, "vision_config": {}}))
    model, spec = _load(tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(prompt_logits(model, spec, TOKENS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt-oss", "olmo2"])
def test_dummy_weights_need_no_files(family, tmp_path):
    save_family(family, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model, spec = _load(tmp_path, load_format="dummy")
    logits = prompt_logits(model, spec, TOKENS)
    assert logits.shape == (len(TOKENS), VOCAB_SIZE)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


@pytest.mark.parametrize("quantization", ["auto", "q8_0"])
def test_dummy_weights_can_be_packed_and_are_the_same_each_time(quantization, tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    save_family("llama", tmp_path, **sizes)
    first, spec = _load(tmp_path, quantization, load_format="dummy")
    second, _ = _load(tmp_path, quantization, load_format="dummy")
    assert torch.equal(prompt_logits(first, spec, TOKENS), prompt_logits(second, spec, TOKENS))
