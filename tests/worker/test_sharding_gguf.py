"""Families from GGUF files divided among workers, whose tensors need more than a slice."""

from __future__ import annotations

import gguf
import pytest
import torch

from octavo_core.model_spec import read_model_spec
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from support.gguf_families import write_gguf_family
from support.one_prompt import prompt_logits
from support.thread_ranks import divided_logits
from support.tiny_families import VOCAB_SIZE, save_family

CPU = torch.device("cpu")
TOKENS = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(21)]
WHOLE_BLOCKS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
FAMILIES = [
    ("qwen2", "qwen2", WHOLE_BLOCKS),  # biases of one dimension
    ("phi3", "phi3", WHOLE_BLOCKS),  # q, k and v in one tensor
    ("gpt2", "gpt2", {}),  # the same, turned around in GGUF
    ("gpt-oss", "gpt-oss", {"hidden_size": 64}),  # gate and up take turns, and are two tensors
    ("deepseek-v3", "deepseek2", {}),
]


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=["TP2", "TP2 x PP2"])
@pytest.mark.parametrize(
    ("family", "architecture", "changes"), FAMILIES, ids=[name for name, _, _ in FAMILIES]
)
def test_workers_together_have_the_logits_of_one(family, architecture, changes, sizes, tmp_path):
    save_family(family, tmp_path / "folder", **changes)
    path = tmp_path / "model.gguf"
    write_gguf_family(path, tmp_path / "folder", architecture)
    for form in ("none", "auto") if sizes == (2, 1) else ("auto",):
        _check(path, WeightForm(torch.float32, form), sizes)


def test_packed_experts_that_take_turns(tmp_path):
    """gpt-oss with MXFP4: pieces of rows of what two tensors make, and whole blocks of inputs."""
    changes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    save_family("gpt-oss", tmp_path / "folder", **changes)
    path = tmp_path / "model.gguf"
    kind = gguf.GGMLQuantizationType.MXFP4
    write_gguf_family(
        path,
        tmp_path / "folder",
        "gpt-oss",
        quantize=lambda name, weights: kind if "_exps.weight" in name else None,
    )
    _check(path, WeightForm(torch.float32, "none"), (2, 1))
    _check(path, WeightForm(torch.float32, "auto"), (2, 1), tolerance=0.2)


def _check(path, form, sizes, tolerance=1e-4):
    spec = read_model_spec(path)
    weights = load_weights(spec, path, form, CPU, lambda *_: None)
    expected = prompt_logits(resolve_model_class(spec)(spec, weights, 128, CPU), spec, TOKENS)
    for found in divided_logits(spec, path, form, sizes, TOKENS):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
