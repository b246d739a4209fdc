"""GPTQ, AWQ and float8 checkpoints against transformers' model of the numbers they stand for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo_core.errors import ModelError
from octavo_core.model_spec import read_model_spec
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from support.one_prompt import prompt_logits
from support.tiny_families import FAMILIES, VOCAB_SIZE, make_model
from support.weights import gptq_weight

CPU = torch.device("cpu")
FITTING = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
# What 8-bit activations cost: standard deviation of the errors as a share of that of the logits.
ROUNDING = 0.06


def _gptq(weight, seed, act_order=False):
    qweight, qzeros, scales, index, numbers = gptq_weight(
        weight.shape[1], weight.shape[0], 32, act_order, seed
    )
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": index}
    return tensors, numbers


def _gptq_act_order(weight, seed):
    return _gptq(weight, seed, act_order=True)


def _awq(weight, seed):
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (columns, rows), generator=generator)
    zeros = torch.randint(0, 16, (columns // 32, rows), generator=generator)
    scales = (torch.rand(columns // 32, rows, generator=generator) / 16).half()

    def words(nibbles):
        ordered = nibbles.view(len(nibbles), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        total = (ordered << torch.arange(0, 32, 4)).sum(-1)
        return torch.where(total >= 1 << 31, total - (1 << 32), total).int()

    group = torch.arange(columns) // 32
    numbers = ((values - zeros[group]).float() * scales[group].float()).t().contiguous()
    return {"qweight": words(values), "qzeros": words(zeros), "scales": scales}, numbers


def _fp8(weight, seed, name="weight_scale"):
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, name: scale}, stored.float() * scale


def _fp8_blocks(weight, seed):
    scale = weight.abs().max().view(1, 1) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale}, stored.float() * scale


METHODS = {
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq act-order": (_gptq_act_order, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "fp8": (_fp8, {"quant_method": "compressed-tensors"}),
    "fp8 blocks": (_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def _save(folder, method):
    """Quantize a model's layers; returns the model with the numbers that they stand for now."""
    quantize, config = METHODS[method]
    model = make_model(FAMILIES["llama"], **FITTING)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    modules = dict(model.named_modules())
    for seed, name in enumerate(sorted(tensors)):
        module = name.removesuffix(".weight")
        if "_proj" not in name:
            continue
        stored, numbers = quantize(tensors.pop(name), seed)
        tensors |= {f"{module}.{kind}": value for kind, value in stored.items()}
        modules[module].weight.data = numbers
    path.unlink()
    save_file(tensors, path)
    _change_config(folder, quantization_config=config)
    return model


def _change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _load(folder, quantization):
    spec = read_model_spec(folder)
    form = WeightForm(torch.float32, quantization)
    return load_weights(spec, folder, form, CPU, lambda *_: None), spec


@pytest.mark.parametrize("method", METHODS)
def test_quantized_checkpoints_match_transformers(method, tmp_path):
    reference = _save(tmp_path, method)
    token_ids = torch.randint(0, VOCAB_SIZE, (30,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    for quantization in ("none", "auto"):
        weights, spec = _load(tmp_path, quantization)
        model = resolve_model_class(spec)(spec, weights, 64, CPU)
        found = prompt_logits(model, spec, token_ids)
        if quantization == "none" or method.startswith("fp8"):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        else:
            assert float((found - expected).std() / expected.std()) < ROUNDING
    kinds = {part.kind for parts in weights.values() if isinstance(parts, tuple) for part in parts}
    assert kinds == {"f32", "e4m3" if method.startswith("fp8") else "u4z"}


@pytest.mark.parametrize(
    ("method", "lost"),
    [("gptq", "qzeros"), ("gptq", "scales"), ("awq", "scales"), ("fp8", "weight_scale")],
)
def test_a_missing_part_is_named(method, lost, tmp_path):
    _save(tmp_path, method)
    name = f"model.layers.1.self_attn.k_proj.{lost}"
    path = tmp_path / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items() if key != name}
    path.unlink()
    save_file(tensors, path)
    with pytest.raises(ModelError, match=rf"{name} is missing"):
        _load(tmp_path, "auto")


def test_other_methods_are_refused_by_name(tmp_path):
    make_model(FAMILIES["llama"], **FITTING).save_pretrained(tmp_path)
    _change_config(tmp_path, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ModelError, match="quantized by 'hqq', which is not supported"):
        _load(tmp_path, "auto")
    _change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match="no tensor that ends in _blocks"):
        _load(tmp_path, "auto")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 8},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "novel"},
    ],
)
def test_other_layouts_are_refused_by_name(config, tmp_path):
    _save(tmp_path, "gptq")
    _change_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelError, match=f"quant_method='{config['quant_method']}'.*supported are"):
        _load(tmp_path, "auto")
