from pathlib import Path

import pytest

from octavo_core.gguf import read_gguf_header
from octavo_core.memory_planner import pipeline_stages
from octavo_core.model_spec import spec_from_config
from octavo_core.quantization import QUANTIZATIONS, quantization_from_config
from octavo_core.weight_estimate import estimate_weights, main_type, weights_of_gguf
from support.gguf_writer import llama_metadata, write_gguf
from support.model_configs import GPT_OSS_20B, LLAMA_3_8B, PUBLISHED, QWEN_3_06B

ALL = range(32)
LLAMA = spec_from_config(LLAMA_3_8B)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_counted_exactly(name: str) -> None:
    spec = spec_from_config(PUBLISHED[name].config)
    weights = estimate_weights(spec, 2)
    assert weights.num_parameters == PUBLISHED[name].num_parameters
    one_device = weights.stage_bytes(range(spec.num_hidden_layers))
    if spec.quantization is None:
        assert one_device == 2 * weights.num_parameters


def test_tensor_parallel_splits_matrices_and_repeats_vectors() -> None:
    whole = estimate_weights(LLAMA, 2).stage_bytes(ALL)
    norms = 65 * 4096 * 2
    for size in (2, 4, 8):
        part = estimate_weights(LLAMA, 2, tensor_parallel_size=size).stage_bytes(ALL)
        assert part == (whole - norms) // size + norms
    # 8 heads of K and V on 16 devices: each has one, so they are there twice.
    part = estimate_weights(LLAMA, 2, tensor_parallel_size=16).stage_bytes(ALL)
    kv = 32 * 2 * 8 * 128 * 4096 * 2
    assert part == (whole - norms + kv) // 16 + norms


def test_pipeline_stages_hold_all_layers_once() -> None:
    assert pipeline_stages(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    weights = estimate_weights(LLAMA, 2)
    stages = pipeline_stages(32, 3)
    assert sum(weights.stage_bytes(stage) for stage in stages) == weights.stage_bytes(ALL)


def test_a_tied_embedding_is_there_twice_if_first_and_last_stage_differ() -> None:
    weights = estimate_weights(spec_from_config(QWEN_3_06B), 2)
    table = 151936 * 1024 * 2
    stages = [weights.stage_bytes(stage) for stage in pipeline_stages(28, 2)]
    assert sum(stages) == weights.stage_bytes(range(28)) + table


def test_quantized_linear_layers() -> None:
    embeddings = 2 * 128256 * 4096 * 2
    norms = 65 * 4096 * 2
    linear = 8030261248 - (embeddings + norms) // 2
    for name, size in [("fp8", 1.0), ("awq", 0.5 + 2.5 / 128), ("mxfp4", 0.5 + 1 / 32)]:
        weights = estimate_weights(LLAMA, 2, QUANTIZATIONS[name])
        # Each layer is rounded down to whole bytes.
        assert weights.stage_bytes(ALL) == pytest.approx(linear * size + embeddings + norms, abs=32)
    packed = estimate_weights(LLAMA, 2, QUANTIZATIONS["q4_0"]).stage_bytes(ALL)
    assert packed == pytest.approx((8030261248 - norms // 2) * 18 / 32 + norms, abs=64)


def test_gpt_oss_packs_its_experts_alone() -> None:
    spec = spec_from_config(GPT_OSS_20B)
    assert spec.quantization is not None
    experts = 24 * 3 * 32 * 2880 * 2880
    weights = estimate_weights(spec, 2, spec.quantization).stage_bytes(range(24))
    expected = experts * (0.5 + 1 / 32) + (20914757184 - experts) * 2
    assert weights == pytest.approx(expected, abs=24)
    assert weights < 13.8e9  # the published files have 13.8 GB


@pytest.mark.parametrize(
    ("entry", "method", "size"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", 1.0),
        ({"quant_method": "awq", "w_bit": 4, "group_size": 64}, "awq", 0.5 + 2.5 / 64),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 1.0),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes", 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5625),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
            },
            "compressed-tensors",
            0.5 + 2 / 128,
        ),
        ({"quant_method": "of_tomorrow"}, "of_tomorrow", None),
    ],
)
def test_quantization_configs(entry: dict[str, object], method: str, size: float | None) -> None:
    found = quantization_from_config({"quantization_config": entry})
    assert found is not None
    assert (found.method, found.weight_bytes) == (method, size)
    assert quantization_from_config({}) is None


def test_a_gguf_file_is_counted_as_it_is_packed(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": ((100, 32), 1, bytes(6400)),
        "blk.0.attn_q.weight": ((32, 32), 3, bytes(640)),
        "blk.1.attn_q.weight": ((32, 32), 0, bytes(4096)),
        "blk.1.attn_norm.weight": ((32,), 0, bytes(128)),
        "output_norm.weight": ((32,), 0, bytes(128)),
    }
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors))
    weights = weights_of_gguf(header, 2)
    assert weights.layer_bytes == (640, 4224)
    assert weights.num_parameters == 3200 + 2 * 1024 + 64
    assert weights.stage_bytes(range(2)) == 6400 + 640 + 4224 + 128
    assert weights.stage_bytes(range(1, 2)) == 4224 + 128 + 6400  # tied
    halves = weights_of_gguf(header, 2, tensor_parallel_size=2)
    assert halves.stage_bytes(range(2)) == 3200 + 320 + 2048 + 128 + 128
    assert main_type(header) == "F16"
