"""MXFP4, as gpt-oss is published, against transformers' way to unpack it."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo_core.errors import ModelError
from octavo_core.model_spec import read_model_spec
from octavo_kernels import unpack_weight
from octavo_worker.layers.piece import Piece
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.loading.mxfp4 import pack_mxfp4, read_halves, read_neighbours, widen
from octavo_worker.loading.mxfp4_checkpoint import Mxfp4Checkpoint
from octavo_worker.models import resolve_model_class
from octavo_worker.parallel_state import ParallelPlace
from support.one_prompt import prompt_logits
from support.thread_ranks import divided_logits
from support.tiny_families import VOCAB_SIZE, save_family

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def _random(*shape):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
    return blocks, scales


def test_numbers_and_scales_of_every_size():
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for byte in (0x21, 0x7F, 0x90):
        low, high = byte & 15, byte >> 4
        for scale in (1, 100, 127, 200, 252):
            block = torch.full((1, 1, 16), byte, dtype=torch.uint8)
            found = widen(read_neighbours(block), torch.tensor([[scale]], dtype=torch.uint8))
            signed = [(-1) ** (code >> 3) * numbers[code & 7] for code in (low, high)]
            expected = torch.tensor(signed, dtype=torch.float64) * 2.0 ** (scale - 127)
            assert torch.equal(found[0, :2].double(), expected)


def test_unpacking_is_that_of_transformers():
    blocks, scales = _random(3, 5, 2)  # three experts
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for index in range(3):
        found = widen(read_neighbours(blocks[index]), scales[index])
        assert torch.equal(found, expected[index].t())


def test_unpacking_is_that_of_gguf():
    numbers = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    raw = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.MXFP4)
    blocks = torch.from_numpy(raw.reshape(8, 2, 17))
    found = widen(read_halves(blocks[..., 1:]), blocks[..., 0])
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(found, torch.from_numpy(expected))


def test_packing_loses_nothing():
    blocks, scales = _random(9, 3)
    doubled = read_neighbours(blocks)
    packed = pack_mxfp4(doubled, scales)
    assert packed.kind == "q8_0"
    assert torch.equal(unpack_weight(packed), widen(doubled, scales))
    # Zeros need no scale, and others may need one that is no float16.
    blocks[2, 1], scales[2, 1] = 0x80, 0
    doubled = read_neighbours(blocks)
    assert pack_mxfp4(doubled, scales).kind == "q8_0"
    for scale in (100, 150):
        scales[3, 0] = scale
        packed = pack_mxfp4(doubled, scales)
        assert packed.kind == "bf16"
        assert torch.equal(unpack_weight(packed), widen(doubled, scales))


@pytest.fixture
def published(tmp_path):
    """A gpt-oss with its experts in MXFP4, and one with the same numbers written out."""
    folder, plain = tmp_path / "mxfp4", tmp_path / "plain"
    reference = save_family("gpt-oss", plain, **SIZES)
    tensors = {
        name: tensor.clone() for name, tensor in load_file(plain / "model.safetensors").items()
    }
    packed = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_proj") or ".experts." not in name:
            continue
        experts, inputs, outputs = tensor.shape
        blocks, scales = _random(experts, outputs, inputs // 32)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    folder.mkdir()
    save_file(packed, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    reference.load_state_dict(tensors)
    return folder, reference


def _load(folder, quantization):
    spec = read_model_spec(folder)
    form = WeightForm(torch.float32, quantization)
    weights = load_weights(spec, folder, form, CPU, lambda *_: None)
    return spec, weights


def test_a_published_checkpoint_matches_transformers(published):
    folder, reference = published
    spec, weights = _load(folder, "none")
    model = resolve_model_class(spec)(spec, weights, 64, CPU)
    token_ids = torch.randint(0, VOCAB_SIZE, (20,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    found = prompt_logits(model, spec, token_ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    _, packed = _load(folder, "auto")
    for name, weight in weights.items():
        if ".experts." in name and name.endswith("weight"):
            assert packed[name][0].kind == "q8_0"
            assert torch.equal(unpack_weight(packed[name][0]), weight)


def test_divided_among_workers(published):
    """Rows, and whole blocks of inputs: 96 of them are three, which two workers can't have."""
    folder, _ = published
    spec, weights = _load(folder, "none")
    token_ids = list(range(20))
    expected = prompt_logits(resolve_model_class(spec)(spec, weights, 64, CPU), spec, token_ids)
    exact = WeightForm(torch.float32, "none")
    for found in divided_logits(spec, folder, exact, (2, 1), token_ids):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    packed = WeightForm(torch.float32, "auto")
    with pytest.raises(ModelError, match=r"down_proj\.weight is stored in blocks.*inputs 0 to 48"):
        load_weights(spec, folder, packed, CPU, lambda *_: None, place=ParallelPlace(0, 2))
    name = "model.layers.0.mlp.experts.1.gate_up_proj.weight"
    checkpoint = Mxfp4Checkpoint(folder)
    piece = checkpoint.read_packed(name, None, Piece(0, 96, 192))
    assert torch.equal(unpack_weight(piece), weights[name][96:])
    piece = checkpoint.read_packed(name, None, Piece(1, 32, 64))
    assert torch.equal(unpack_weight(piece), weights[name][:, 32:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "down_proj_scales is missing"),
        (lambda tensors, name: tensors[f"{name}_scales"].fill_(255), "NaN or infinite"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": torch.ones(4, 64)}),
            r"has shape .* of F32 and U8",
        ),
    ],
)
def test_damage_is_named(published, damage, message):
    folder, _ = published
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    damage(tensors, "model.layers.1.mlp.experts.down_proj")
    path.unlink()
    save_file(tensors, path)
    for form in ("none", "auto"):
        with pytest.raises(ModelError, match=message):
            _load(folder, form)
