"""Models divided among workers: what each reads, and that together they are the model."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo_core.errors import ConfigError, ModelError
from octavo_core.model_spec import read_model_spec
from octavo_kernels import unpack_weight
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.loading.safetensors import SafetensorsCheckpoint
from octavo_worker.models import resolve_model_class
from octavo_worker.parallel_state import ParallelPlace
from octavo_worker.sharding import check_division, spec_of_rank
from support.one_prompt import prompt_logits
from support.thread_ranks import divided_logits
from support.tiny_families import FAMILIES, VOCAB_SIZE, save_family

CPU = torch.device("cpu")
TOKENS = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(21)]
EXACT = WeightForm(torch.float32)
# The same numbers, summed in another order; logits are of order one.
TOLERANCE = 1e-4
TENSOR = [name for name in FAMILIES if name not in ("llama dynamic", "llama yarn", "mistral")]
STAGES = [
    *("llama", "qwen2 window", "mixtral", "phi3", "gemma", "gemma2", "gemma3", "gpt-oss", "opt"),
    *("opt projected", "gpt2", "deepseek-v2", "deepseek-v3"),
]
BOTH = ["llama", "qwen3-moe", "gemma3", "gpt-oss", "deepseek-v3", "gpt2"]


def _whole_logits(path, form):
    spec = read_model_spec(path)
    weights = load_weights(spec, path, form, CPU, lambda *_: None)
    return prompt_logits(resolve_model_class(spec)(spec, weights, 128, CPU), spec, TOKENS)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders of families, with the logits of one worker."""
    found = {}
    for name in {*TENSOR, *STAGES, *BOTH}:
        path = tmp_path_factory.mktemp("family")
        save_family(name, path)
        found[name] = path, _whole_logits(path, EXACT)
    return found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, (2, 1)) for name in TENSOR),
        *((name, (1, 2)) for name in STAGES),
        *((name, (2, 2)) for name in BOTH),
    ],
)
def test_workers_together_have_the_logits_of_one(families, name, sizes):
    path, expected = families[name]
    for found in divided_logits(read_model_spec(path), path, EXACT, sizes, TOKENS):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_key_value_heads_that_are_fewer_than_workers_are_on_several(tmp_path):
    save_family("llama", tmp_path, intermediate_size=96)
    expected = _whole_logits(tmp_path, EXACT)
    for found in divided_logits(read_model_spec(tmp_path), tmp_path, EXACT, (6, 1), TOKENS):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("quantization", ["auto", "q8_0", "q4_0"])
def test_packed_weights(tmp_path, quantization):
    """Pieces of 32 inputs and more leave the blocks, and what activations are rounded to."""
    save_family("llama", tmp_path, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    form = WeightForm(torch.float32, quantization)
    expected = _whole_logits(tmp_path, form)
    for found in divided_logits(read_model_spec(tmp_path), tmp_path, form, (2, 1), TOKENS):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tie", [True, False])
def test_each_worker_reads_its_share_and_no_more(tmp_path, monkeypatch, tie):
    save_family("llama", tmp_path, tie_word_embeddings=tie)
    spec = read_model_spec(tmp_path)
    read = []
    whole_read = SafetensorsCheckpoint._read

    def note(checkpoint, name, piece):
        tensor = whole_read(checkpoint, name, piece)
        read.append((name, tensor.numel()))
        return tensor

    monkeypatch.setattr(SafetensorsCheckpoint, "_read", note)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    shapes = [checkpoint.shape(name) for name in checkpoint.names]
    matrices = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    counts = []
    for rank in range(4):
        read.clear()
        load_weights(spec, tmp_path, EXACT, CPU, lambda *_: None, place=ParallelPlace(rank, 2, 2))
        counts.append(sum(count for name, count in read if "norm" not in name))
    embedding = VOCAB_SIZE * spec.hidden_size
    # A tied embedding is needed at both ends.
    assert sum(counts) == matrices + (embedding if tie else 0)


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    """A Llama of two layers in Q8_0 and Q4_1, with 4 heads and 2 of keys."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    hidden, width, heads, kv_heads, vocab = 64, 128, 4, 2, VOCAB_SIZE
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    writer.add_token_list([f"t{index}" for index in range(vocab)])
    generator = np.random.default_rng(0)

    def add(name, *shape, kind=None):
        values = generator.standard_normal(shape, np.float32) * 0.2
        if kind is None:
            writer.add_tensor(name, 1 + values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    q8, q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
    head_dim = hidden // heads
    add("token_embd.weight", vocab, hidden, kind=q8)
    add("output_norm.weight", hidden)
    for index in range(2):
        layer = f"blk.{index}"
        add(f"{layer}.attn_norm.weight", hidden)
        add(f"{layer}.attn_q.weight", hidden, hidden, kind=q4)
        add(f"{layer}.attn_k.weight", kv_heads * head_dim, hidden, kind=q4)
        add(f"{layer}.attn_v.weight", kv_heads * head_dim, hidden, kind=q8)
        add(f"{layer}.attn_output.weight", hidden, hidden, kind=q4)
        add(f"{layer}.ffn_norm.weight", hidden)
        add(f"{layer}.ffn_gate.weight", width, hidden, kind=q4)
        add(f"{layer}.ffn_up.weight", width, hidden, kind=q4)
        add(f"{layer}.ffn_down.weight", hidden, width, kind=q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("form", [EXACT, WeightForm(torch.float32, "auto")], ids=["none", "auto"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_gguf(gguf_path, form, sizes):
    """Rows, whole blocks of columns, and heads whose rows GGUF has in another order."""
    expected = _whole_logits(gguf_path, form)
    for found in divided_logits(read_model_spec(gguf_path), gguf_path, form, sizes, TOKENS):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_packed_pieces_are_the_bytes_of_the_file(gguf_path):
    spec = read_model_spec(gguf_path)
    form = WeightForm(torch.float32, "auto")
    name = "model.layers.1.mlp.down_proj.weight"
    whole = load_weights(spec, gguf_path, form, CPU, lambda *_: None)[name]
    pieces = [
        load_weights(spec, gguf_path, form, CPU, lambda *_: None, place=ParallelPlace(rank, 2))[
            name
        ]
        for rank in range(2)
    ]
    assert {part.kind for piece in pieces for part in piece} == {"q4_1"}
    unpacked = torch.cat([unpack_weight(piece[0]) for piece in pieces], dim=1)
    assert torch.equal(unpacked, unpack_weight(whole[0]))


def test_blocks_that_would_be_cut_are_refused(gguf_path):
    with pytest.raises(ModelError, match=r"blk\.0\.attn_output.*blocks of 32.*inputs 0 to 16"):
        load_weights(
            read_model_spec(gguf_path),
            gguf_path,
            WeightForm(torch.float32, "auto"),
            CPU,
            lambda *_: None,
            place=ParallelPlace(0, 4),
        )


@pytest.mark.parametrize(
    ("name", "changes", "sizes", "message"),
    [
        ("llama", {}, (4, 1), r"tensor_parallel_size is 4.*6 attention heads; .* 1, 2, 3, 6"),
        ("llama", {}, (3, 1), "tensor_parallel_size is 3.*2 key-value heads"),
        ("llama", {"intermediate_size": 89}, (2, 1), "intermediate_size of 89"),
        ("llama", {}, (1, 3), "pipeline_parallel_size is 3, but the model has only 2 layers"),
        ("olmo2", {}, (2, 1), "Olmo2ForCausalLM can't be divided: .*through transformers"),
        ("olmo2", {}, (1, 2), "Olmo2ForCausalLM can't be divided: .*LlamaForCausalLM"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, (1, 2), "layers counted from the"),
    ],
)
def test_refusals(tmp_path, name, changes, sizes, message):
    save_family(name, tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        check_division(read_model_spec(tmp_path), ParallelPlace(0, *sizes))


def test_a_stage_has_the_groups_of_the_whole_model(tmp_path):
    """Block tables come from the scheduler, which knows of no stages."""
    save_family("gemma3", tmp_path)  # three layers with windows, and the last one without
    spec = read_model_spec(tmp_path)
    stages = [spec_of_rank(spec, ParallelPlace(rank, 1, 2)) for rank in range(2)]
    whole = spec.kv_cache_groups()
    for stage in stages:
        assert [group.window for group in stage.kv_cache_groups()] == [g.window for g in whole]
        layers = [layer for group in stage.kv_cache_groups() for layer in group.layers]
        assert sorted(layers) == [0, 1]


def test_sizes_of_a_worker(families):
    spec = read_model_spec(families["qwen3-moe"][0])
    mine = spec_of_rank(spec, ParallelPlace(3, 2, 2))
    assert mine.num_attention_heads == spec.num_attention_heads // 2
    assert mine.num_hidden_layers == 1
    assert mine.hidden_size == spec.hidden_size
    assert set(mine.moe_layers) <= {0}
