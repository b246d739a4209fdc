"""Weights from good files, and clear errors from bad ones."""

import json
import time

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo_core.errors import ModelError
from octavo_core.model_spec import read_model_spec
from octavo_worker.loading import WeightForm, load_weights
from support.tiny_families import save_family

CPU = torch.device("cpu")


def _load(path, spec=None, dtype=torch.float32, on_progress=lambda stage, progress: None):
    return load_weights(spec or read_model_spec(path), path, WeightForm(dtype), CPU, on_progress)


@pytest.fixture
def folder(make_llama, tmp_path):
    """A model folder of its own, to be damaged."""
    make_llama().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tied_folder(make_llama, tmp_path):
    make_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    return tmp_path


def _stored(folder):
    """Return a folder's tensors, copied: the library maps the file, and tests change it."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _change(folder, change):
    """Rewrite a folder's tensors."""
    tensors = _stored(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_projections_are_fused_in_order(folder):
    stored = _stored(folder)
    weights = _load(folder)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    expected = torch.cat([stored[name] for name in names])
    assert torch.equal(weights["model.layers.1.self_attn.qkv_proj.weight"], expected)
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    expected = torch.cat([stored[name] for name in names])
    assert torch.equal(weights["model.layers.0.mlp.gate_up_proj.weight"], expected)


def test_weights_are_converted_and_owned(folder):
    weights = _load(folder, dtype=torch.bfloat16)
    stored = _stored(folder)
    (folder / "model.safetensors").write_bytes(b"")  # a mapped tensor would now crash
    for name in ("lm_head.weight", "model.norm.weight"):
        assert torch.equal(weights[name], stored[name].bfloat16())


def test_progress_rises_to_one(folder):
    seen = []
    _load(folder, on_progress=lambda stage, progress: seen.append((stage, progress)))
    assert {stage for stage, _ in seen} == {"loading weights"}
    shares = [progress for _, progress in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_shards(make_llama, tiny_folder, tmp_path):
    make_llama().save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    single = _load(tiny_folder)
    sharded = _load(tmp_path)
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_a_missing_shard_is_named(make_llama, tmp_path):
    make_llama().save_pretrained(tmp_path, max_shard_size="100KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=f"{victim.name} is missing; .*index.json lists it"):
        _load(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/b", 7])
def test_an_index_does_not_lead_out_of_its_folder(folder, shard):
    index = {"weight_map": {"lm_head.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="which is no file name"):
        _load(folder)


def test_an_index_that_is_wrong_about_a_tensor(folder):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    names = list(load_file(folder / "one.safetensors"))
    index = {"weight_map": dict.fromkeys([*names, "model.layers.0.extra"], "one.safetensors")}
    index["weight_map"]["lm_head.weight"] = "two.safetensors"
    save_file({"other": torch.zeros(1)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="extra is no part of LlamaForCausalLM"):
        _load(folder)
    del index["weight_map"]["model.layers.0.extra"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"two.safetensors: tensor lm_head.weight is missing"):
        _load(folder)


def test_only_safetensors_are_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor .*\.bin"):
        _load(folder)


# Case C05: the language-model head, tied or not, stored or not.


def test_tied_and_not_stored(tied_folder):
    assert "lm_head.weight" not in _stored(tied_folder)
    weights = _load(tied_folder)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_tied_and_stored_the_same_is_kept_once(tied_folder):
    def store_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _change(tied_folder, store_head)
    weights = _load(tied_folder)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_tied_but_stored_apart_counts_as_in_transformers(tied_folder):
    from transformers import LlamaForCausalLM

    head = torch.randn(300, 60)
    _change(tied_folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert torch.equal(_load(tied_folder)["lm_head.weight"], head)
    reference = LlamaForCausalLM.from_pretrained(tied_folder, dtype=torch.float32)
    assert torch.equal(reference.lm_head.weight, head)


def test_untied_and_missing_is_an_error(folder):
    _change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head.weight is missing") as caught:
        _load(folder)
    assert caught.value.field == "lm_head.weight"


def test_any_missing_tensor_is_named(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    _change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"{name} is missing"):
        _load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder):
    spec = msgspec.structs.replace(read_model_spec(folder), vocab_size=301)
    with pytest.raises(ModelError, match=r"embed_tokens.weight has shape \[300, 60\].*\[301, 60\]"):
        _load(folder, spec)


def test_a_tensor_of_a_type_without_support_is_named(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    _change(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelError, match=f"{name} has type I8"):
        _load(folder)


def test_what_the_model_would_leave_out_is_refused(folder):
    _change(
        folder,
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
    )
    with pytest.raises(ModelError, match=r"q_norm.weight is no part of LlamaForCausalLM"):
        _load(folder)


def test_old_buffers_and_other_heads_are_skipped(folder):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.layers.7.self_attn.q_norm.weight"] = torch.ones(8)  # of no layer of ours
        tensors["v_head.weight"] = torch.ones(1, 60)

    _change(folder, add)
    _load(folder)


# Case C07: damaged files.


def _damage_cases():
    def cut(data):
        return data[:-1024]

    def long_header(data):
        return (2**62).to_bytes(8, "little") + data[8:]

    def no_json(data):
        return data[:8] + b"[" + data[9:]

    def overlap(data):
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        first, second = [name for name in header if name != "__metadata__"][:2]
        header[first]["data_offsets"] = header[second]["data_offsets"]
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return [
        (cut, r"tensor model\.\S+ would end at byte \d+, but the file has \d+ bytes; it is cut"),
        (long_header, "its header would have 4611686018427387904 bytes"),
        (no_json, "model.safetensors is damaged"),
        (overlap, "model.safetensors is damaged"),
        (lambda data: data[:5], "model.safetensors is damaged"),
        (lambda data: b"", "model.safetensors is damaged"),
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    _damage_cases(),
    ids=["cut", "long header", "no json", "overlap", "five bytes", "empty"],
)
def test_damaged_safetensors(folder, damage, message):
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    started = time.thread_time()  # of this thread, however busy the machine is
    with pytest.raises(ModelError, match=message):
        _load(folder)
    assert time.thread_time() - started < 5


# GGUF


def _permute(weights, num_heads):
    """Bring query and key rows to the order that llama files of GGUF have."""
    halves = weights.reshape(num_heads, 2, -1, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _gguf_name(name):
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"
    return f"{GGUF_NAMES[module]}.{kind}"


def _write_gguf(path, model, kind="F32", leave_out=()):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, tensor in model.state_dict().items():
        if name in leave_out:
            continue
        weights = tensor.numpy()
        if ".q_proj." in name:
            weights = _permute(weights, config.num_attention_heads)
        if ".k_proj." in name:
            weights = _permute(weights, config.num_key_value_heads)
        weights = np.ascontiguousarray(weights)
        if weights.ndim == 1:
            writer.add_tensor(_gguf_name(name), weights)
            continue
        quantization = gguf.GGMLQuantizationType[kind]
        packed = gguf.quantize(weights, quantization)
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def block_llama(make_llama):
    """A model whose rows are whole blocks of 32."""
    return make_llama(hidden_size=64, num_attention_heads=4, intermediate_size=96)


def test_gguf_equals_the_safetensors_of_the_same_model(block_llama, tmp_path):
    block_llama.save_pretrained(tmp_path / "folder")
    _write_gguf(tmp_path / "model.gguf", block_llama)
    expected = _load(tmp_path / "folder")
    weights = _load(tmp_path / "model.gguf")
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("kind", "error"),
    [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2), ("Q4_0", 0.15), ("Q4_1", 0.15)],
)
def test_gguf_types_are_unpacked(block_llama, tmp_path, kind, error):
    """The error is relative to the weights' spread of 0.2; half a step of 15 over a block."""
    _write_gguf(tmp_path / "model.gguf", block_llama, kind)
    weights = _load(tmp_path / "model.gguf")
    stored = block_llama.state_dict()
    for name in ("model.layers.1.self_attn.o_proj.weight", "lm_head.weight"):
        assert (weights[name] - stored[name]).abs().max() < error
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = weights["model.layers.0.self_attn.qkv_proj.weight"]
    assert (fused - torch.cat([stored[name] for name in names])).abs().max() < error


def test_gguf_without_output_is_tied(block_llama, tmp_path):
    _write_gguf(tmp_path / "model.gguf", block_llama, leave_out=["lm_head.weight"])
    weights = _load(tmp_path / "model.gguf")
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_gguf_tensors_of_other_types_are_refused_by_name(block_llama, tmp_path):
    _write_gguf(tmp_path / "model.gguf", block_llama, "Q5_0")
    with pytest.raises(ModelError, match=r"token_embd.weight has type Q5_0.*supported: F32"):
        _load(tmp_path / "model.gguf")


def test_gguf_that_lacks_a_tensor(block_llama, tmp_path):
    _write_gguf(
        tmp_path / "model.gguf", block_llama, leave_out=["model.layers.1.mlp.up_proj.weight"]
    )
    with pytest.raises(ModelError, match=r"model.gguf: tensor \S+up_proj.weight is missing"):
        _load(tmp_path / "model.gguf")


def test_gguf_with_biases_that_its_metadata_does_not_mention(make_llama, tmp_path):
    _write_gguf(tmp_path / "model.gguf", make_llama(attention_bias=True))
    with pytest.raises(ModelError, match=r"q?k?v?o?_proj.bias is no part of"):
        _load(tmp_path / "model.gguf")


def test_gguf_of_another_architecture_is_refused_by_name(block_llama, tmp_path):
    path = tmp_path / "model.gguf"
    _write_gguf(path, block_llama)
    spec = msgspec.structs.replace(read_model_spec(path), architecture="novel")
    with pytest.raises(ModelError, match="architecture 'novel' is not supported"):
        _load(path, spec)


def test_gguf_cut_short(block_llama, tmp_path):
    path = tmp_path / "model.gguf"
    _write_gguf(path, block_llama)
    spec = read_model_spec(path)
    path.write_bytes(path.read_bytes()[:-1024])
    with pytest.raises(ModelError, match=r"tensor '\S+': its data would end at byte"):
        _load(path, spec)


def test_no_such_file(tiny_folder, tmp_path):
    with pytest.raises(ModelError, match="can't be read"):
        _load(tmp_path / "nothing.gguf", read_model_spec(tiny_folder))


# Tied or not, by the family's own default where config.json doesn't say (case C05).


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt", "gemma", "mistral"])
@pytest.mark.parametrize("tied", ["says tied", "says untied", "says nothing"])
def test_heads_of_families(family, tied, tmp_path):
    changes = {} if tied == "says nothing" else {"tie_word_embeddings": tied == "says tied"}
    is_tied_by_default = family in ("gpt2", "opt", "gemma")
    is_tied = changes.get("tie_word_embeddings", is_tied_by_default)
    model = save_family(family, tmp_path, tie_word_embeddings=is_tied)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps(config | changes))
    weights = _load(tmp_path)
    embedding = model.get_input_embeddings().weight
    head = embedding if is_tied else model.lm_head.weight
    assert torch.equal(weights["lm_head.weight"], head)
    if is_tied:
        return
    _change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head.weight is missing"):
        _load(tmp_path)
