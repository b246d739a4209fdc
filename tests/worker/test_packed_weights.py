"""Weights that stay packed: what is loaded, what it takes, and what the model makes of it."""

import gguf
import numpy as np
import pytest
import torch

from octavo_core.config import resolve_config
from octavo_core.errors import ConfigError
from octavo_core.model_spec import read_model_spec
from octavo_kernels import unpack_weight
from octavo_worker.device import resolve_kv_cache_dtype, resolve_weight_form
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.model_runner import ModelRunner
from octavo_worker.models import KVCache, resolve_model_class

CPU = torch.device("cpu")
# Sizes that fill the kernels' vectors, so that all layers are one call.
FITTING = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
# What 8-bit activations cost on random weights: standard deviation of the logits' errors, as a
# share of that of the logits. Measured: 0.030 to 0.037 over the kinds of weights here.
ROUNDING = 0.06
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def _load(path, quantization="auto", dense_dtype=None):
    form = WeightForm(torch.float32, quantization, dense_dtype)
    return load_weights(read_model_spec(path), path, form, CPU, lambda *_: None)


def _num_bytes(weights):
    kept = {id(weight): weight for weight in weights.values()}.values()
    return sum(
        weight.nbytes
        if isinstance(weight, torch.Tensor)
        else sum(part.num_bytes for part in weight)
        for weight in kept
    )


def _logits(path, weights, token_ids):
    spec = read_model_spec(path)
    model = resolve_model_class(spec)(spec, weights, 128, CPU)
    runner = ModelRunner(model, max_num_seqs=2, block_size=16, device=CPU)
    shape = (8, spec.num_key_value_heads, 16, spec.head_dim)
    caches = [KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in spec.layers]
    lengths = np.array([len(token_ids)])
    model_input = runner.to_device(
        input_ids=np.array(token_ids, np.int32),
        positions=np.arange(len(token_ids)),
        query_start_loc=np.array([0, len(token_ids)]),
        seq_lens=lengths,
        slot_mappings=[np.arange(len(token_ids))],
        block_tables=[np.arange(8, dtype=np.int32).reshape(1, 8)],
    )
    with torch.inference_mode():
        return model.compute_logits(runner.forward(model_input, caches)), model


@pytest.fixture(scope="module")
def folder(make_llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("fitting")
    make_llama(**FITTING).bfloat16().save_pretrained(path)
    return path


TOKENS = [5, 17, 250, 3, 3, 99, 128, 7, 64, 31, 2, 200]


def test_what_the_file_has_is_kept_and_is_exact(folder):
    weights = _load(folder)
    assert {part.kind for part in weights[QKV]} == {"bf16"}
    assert len(weights[QKV]) == 1  # q, k and v are one product
    exact, model = _logits(folder, _load(folder, "none"), TOKENS)
    assert model._decoder is None
    found, model = _logits(folder, weights, TOKENS)
    assert model._decoder is not None
    # bfloat16 times float32, summed in float32 either way; logits are of order one.
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("quantization", "bits"), [("q8_0", 8.5), ("q4_0", 4.5), ("w8a8", 8.5)])
def test_quantized_while_loading(folder, quantization, bits):
    weights = _load(folder, quantization)
    (qkv,) = weights[QKV]
    assert qkv.kind == quantization
    assert 8 * qkv.num_bytes / (qkv.shape[0] * qkv.shape[1]) <= bits
    head = weights["lm_head.weight"][0].kind
    assert head == ("q8_0" if quantization == "q4_0" else quantization)
    _check_only_activations_are_rounded(folder, weights)


def _check_only_activations_are_rounded(path, weights):
    """Compare packed weights with the same numbers as float32."""
    unpacked = {
        name: weight
        if isinstance(weight, torch.Tensor)
        else torch.cat([unpack_weight(part) for part in weight])
        for name, weight in weights.items()
    }
    exact, _ = _logits(path, unpacked, TOKENS)
    found, model = _logits(path, weights, TOKENS)
    assert model._decoder is not None
    assert 0 < float((found - exact).std() / exact.std()) < ROUNDING


def test_dtype_says_what_unquantized_weights_become(folder):
    (qkv,) = _load(folder, dense_dtype=torch.float16)[QKV]
    assert qkv.kind == "f16"


@pytest.mark.parametrize(
    ("changes", "fits"), [({"mlp_bias": True}, True), ({"hidden_size": 60}, False)]
)
def test_a_model_that_does_not_fit_one_call_runs_by_operations(make_llama, tmp_path, changes, fits):
    make_llama(**(FITTING | changes)).save_pretrained(tmp_path)
    found, model = _logits(tmp_path, _load(tmp_path), TOKENS)
    assert (model._decoder is not None) == fits
    exact, _ = _logits(tmp_path, _load(tmp_path, "none"), TOKENS)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", ["auto", "q8_0"])
def test_one_call_is_its_operations_bit_for_bit(folder, monkeypatch, quantization):
    weights = _load(folder, quantization)
    found, model = _logits(folder, weights, TOKENS)
    assert model._decoder is not None
    monkeypatch.setattr("octavo_worker.models.llama.fits_one_call", lambda *_: False)
    by_operations, model = _logits(folder, weights, TOKENS)
    assert model._decoder is None
    assert torch.equal(found, by_operations)


def test_the_twins_give_the_same_logits(folder, monkeypatch):
    weights = _load(folder, "q8_0")
    found, _ = _logits(folder, weights, TOKENS)
    monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    twins, model = _logits(folder, weights, TOKENS)
    assert model._decoder is None
    # 3e-7 here; one activation that rounds the other way elsewhere would make it about 1e-3.
    assert float((found - twins).std() / twins.std()) < ROUNDING / 10


def test_sizes_that_have_no_blocks_are_refused_by_name(make_llama, tmp_path):
    make_llama(hidden_size=60).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"multiples of 32.*has 60; use --quantization auto"):
        _load(tmp_path, "q8_0")


@pytest.fixture(scope="module")
def mixed_gguf(make_llama, tmp_path_factory):
    """A GGUF file whose values have more bits than queries and keys, as K mixtures have."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    model = make_llama(**FITTING, tie_word_embeddings=True)
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    kinds = {"attn_v": gguf.GGMLQuantizationType.Q8_0, "embd": gguf.GGMLQuantizationType.Q8_0}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem, _, kind = name.rpartition(".")
        data = tensor.float().numpy()
        stored = f"{names.get_name(stem)}.{kind}"
        if data.ndim == 1:
            writer.add_tensor(stored, data)
            continue
        quantized = next(
            (value for part, value in kinds.items() if part in stored),
            gguf.GGMLQuantizationType.Q4_1,
        )
        writer.add_tensor(stored, gguf.quantize(data, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_parts_of_other_kinds_stay_apart(mixed_gguf):
    weights = _load(mixed_gguf)
    assert [part.kind for part in weights[QKV]] == ["q4_1", "q4_1", "q8_0"]
    exact = _load(mixed_gguf, "none")[QKV]
    assert torch.equal(torch.cat([unpack_weight(part) for part in weights[QKV]]), exact)
    _check_only_activations_are_rounded(mixed_gguf, weights)


def test_the_starter_model_takes_the_memory_of_its_file(starter_path):
    weights = _load(starter_path)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    # The file has its tokenizer as well, some 2 MB.
    assert 0.85 < _num_bytes(weights) / starter_path.stat().st_size < 1.15


def test_quantizing_is_for_cpus():
    config = resolve_config({"quantization": "q8_0"})
    with pytest.raises(ConfigError, match=r"quantization is q8_0.*for a CPU only"):
        resolve_weight_form(config, torch.device("cuda", 0), torch.bfloat16)
    assert not resolve_weight_form(resolve_config(), torch.device("cuda", 0), torch.half).is_packed


def test_kv_cache_dtype_follows_the_path():
    assert resolve_kv_cache_dtype("auto", False, torch.bfloat16) == torch.bfloat16
    assert resolve_kv_cache_dtype("auto", True, torch.float32) == torch.float16
    assert resolve_kv_cache_dtype("float32", True, torch.float32) == torch.float32
