"""Families from GGUF files against transformers' model of the same weights."""

import gguf
import pytest
import torch

from octavo_core.model_spec import read_model_spec
from octavo_kernels import unpack_weight
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from support.gguf_families import write_gguf_family
from support.one_prompt import prompt_logits
from support.tiny_families import VOCAB_SIZE, save_family

CPU = torch.device("cpu")
TOLERANCE = 1e-4
WHOLE_BLOCKS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
GEMMA = {**WHOLE_BLOCKS, "head_dim": 16, "query_pre_attn_scalar": 16}
GEMMA_3 = {**GEMMA, "num_hidden_layers": 6, "layer_types": None}
# (family of `tiny_families`, GGUF's name, changes)
FAMILIES = [
    ("llama", "llama", WHOLE_BLOCKS),
    ("qwen2", "qwen2", WHOLE_BLOCKS),
    ("qwen3", "qwen3", WHOLE_BLOCKS),
    ("gemma", "gemma", WHOLE_BLOCKS),
    ("gemma2", "gemma2", GEMMA),
    ("gemma3", "gemma3", GEMMA_3),
    ("phi3", "phi3", WHOLE_BLOCKS),
    ("mixtral", "llama", {}),
    ("qwen3-moe", "qwen3moe", {"mlp_only_layers": []}),
    ("gpt-oss", "gpt-oss", {}),
    ("deepseek-v2", "deepseek2", {}),
    ("deepseek-v3", "deepseek2", {}),
    ("gpt2", "gpt2", {}),
]


def _logits(path, token_ids, quantization):
    spec = read_model_spec(path)
    form = WeightForm(torch.float32, quantization)
    weights = load_weights(spec, path, form, CPU, lambda *_: None)
    model = resolve_model_class(spec)(spec, weights, 64, CPU)
    return prompt_logits(model, spec, token_ids), weights


@pytest.mark.parametrize(("family", "architecture", "changes"), FAMILIES)
def test_gguf_family_matches_transformers(family, architecture, changes, tmp_path):
    reference = save_family(family, tmp_path / "folder", **changes)
    path = tmp_path / "model.gguf"
    write_gguf_family(path, tmp_path / "folder", architecture)
    token_ids = torch.randint(0, VOCAB_SIZE, (40,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    for quantization in ("none", "auto"):
        found, _ = _logits(path, token_ids, quantization)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_latents_may_be_stored_as_two(tmp_path):
    """As files are since llama.cpp absorbs one of them, with a group of experts."""
    save_family("deepseek-v3", tmp_path / "folder")
    path, other = tmp_path / "one.gguf", tmp_path / "two.gguf"
    write_gguf_family(path, tmp_path / "folder", "deepseek2")
    write_gguf_family(other, tmp_path / "folder", "deepseek2", splits_latents=True)
    token_ids = torch.randint(0, VOCAB_SIZE, (20,)).tolist()
    (expected, _), (found, _) = (_logits(each, token_ids, "none") for each in (path, other))
    assert torch.equal(found, expected)


MOE_BLOCKS = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("mixtral", "llama", {"intermediate_size": 96}),
        ("qwen3-moe", "qwen3moe", {"moe_intermediate_size": 32, "mlp_only_layers": []}),
        ("gpt-oss", "gpt-oss", {"intermediate_size": 96}),
    ],
)
def test_quantized_experts_stay_packed(family, architecture, changes, kind, tmp_path):
    """And have the numbers of the same file unpacked; MXFP4 is kept as Q8_0, exactly."""
    save_family(family, tmp_path / "folder", **{**MOE_BLOCKS, **changes})
    path = tmp_path / "model.gguf"
    wanted = gguf.GGMLQuantizationType[kind]
    write_gguf_family(
        path,
        tmp_path / "folder",
        architecture,
        quantize=lambda name, weights: wanted if "_exps.weight" in name else None,
    )
    token_ids = torch.randint(0, VOCAB_SIZE, (20,)).tolist()
    expected, plain = _logits(path, token_ids, "none")
    found, packed = _logits(path, token_ids, "auto")
    # Activations are rounded to 8 bits for packed weights.
    assert (found - expected).abs().mean() < 0.03 * expected.std()
    names = [name for name in packed if ".experts." in name and name.endswith("_proj.weight")]
    assert len(names) >= 2 * 4
    for name in names:
        (part,) = packed[name]
        assert part.kind == "q8_0"
        assert torch.equal(unpack_weight(part), plain[name])


def test_the_first_mixtures_were_written_expert_by_expert(tmp_path):
    save_family("mixtral", tmp_path / "folder")
    token_ids = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    path, other = tmp_path / "one.gguf", tmp_path / "two.gguf"
    write_gguf_family(path, tmp_path / "folder", "llama")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(other, "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if "_exps" not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        for index, expert in enumerate(tensor.data):
            writer.add_tensor(tensor.name.replace("_exps", f".{index}"), expert)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_tensors_to_file()
    writer.close()
    (expected, _), (found, _) = (_logits(each, token_ids, "none") for each in (path, other))
    assert torch.equal(found, expected)
