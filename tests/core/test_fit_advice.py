from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from octavo_core.fit_advice import FitAdvice, advise
from octavo_core.gguf import read_gguf_header
from octavo_core.memory_planner import PlanSettings, plan_memory
from octavo_core.model_spec import ModelSpec, spec_from_config, spec_from_gguf
from support.gguf_writer import llama_metadata, write_gguf
from support.model_configs import DEEPSEEK_V3, LLAMA_3_8B, PUBLISHED, QWEN_25_7B

GIB = 1 << 30
LLAMA = spec_from_config(LLAMA_3_8B)


def settings(gib: float, **changes: object) -> PlanSettings:
    values = {"device": "test", "device_memory": int(gib * GIB), **changes}
    return PlanSettings(**values)  # type: ignore[arg-type]


def advice(spec: ModelSpec, wanted: PlanSettings) -> dict[str, FitAdvice]:
    return {entry.setting: entry for entry in advise(spec, wanted)}


def test_nothing_is_advised_where_it_fits() -> None:
    assert advise(LLAMA, settings(80)) == []


def test_each_setting_has_its_own_value() -> None:
    # 15.82 GiB to use, less 14.96 of weights and 0.32 of activations: 0.55 GiB, and one request
    # of 8,192 tokens needs 1 GiB.
    found = advice(LLAMA, settings(17.2))
    assert {name: entry.value for name, entry in found.items()} == {
        "max_model_len": 4496,
        "gpu_memory_utilization": 0.95,
        "kv_cache_dtype": "fp8",
        "quantization": "fp8",
        "tensor_parallel_size": 2,
    }
    assert found["gpu_memory_utilization"].flag == "--gpu-memory-utilization 0.95"
    assert found["max_model_len"].max_concurrency == 1


SITUATIONS = [
    settings(gib, **changes)
    for gib in (1, 8, 13, 16, 17.2, 24, 40, 80)
    for changes in (
        {},
        {"is_host": True},
        {"kv_cache_memory": GIB // 8},
        {"non_kv_memory": 7 * GIB},
        {"max_num_batched_tokens": 16384, "gpu_memory_utilization": 0.5},
        {"max_model_len": "auto"},
        {"pipeline_parallel_size": 2},
    )
]


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-4b", "gpt-oss-20b", "mixtral-8x7b"])
def test_all_advice_works_and_is_the_smallest_change(name: str) -> None:
    spec = spec_from_config(PUBLISHED[name].config)
    for wanted in SITUATIONS:
        for entry in advise(spec, wanted):
            changed = msgspec.structs.replace(wanted, **{entry.setting: entry.value})
            plan = plan_memory(spec, changed)
            assert plan.fits, (wanted, entry)
            assert plan.kv_cache.max_concurrency == entry.max_concurrency
            assert not plan_memory(spec, wanted).fits
            _assert_less_is_not_enough(spec, wanted, entry)


def _assert_less_is_not_enough(spec: ModelSpec, wanted: PlanSettings, entry: FitAdvice) -> None:
    less: dict[str, float | int] = {
        "max_model_len": int(entry.value) + 1 if entry.setting == "max_model_len" else 0,
        "gpu_memory_utilization": round(float(entry.value) - 0.01, 2)
        if entry.setting == "gpu_memory_utilization"
        else 0,
        "kv_cache_memory": int(entry.value) - 1 if entry.setting == "kv_cache_memory" else 0,
    }
    if not less.get(entry.setting):
        return
    changed = msgspec.structs.replace(wanted, **{entry.setting: less[entry.setting]})
    assert not plan_memory(spec, changed).fits, (wanted, entry)


def test_more_kv_cache_than_there_is_becomes_all_there_is() -> None:
    wanted = settings(24, kv_cache_memory=100 * GIB)
    plan = plan_memory(LLAMA, wanted)
    assert not plan.fits
    entry = advice(LLAMA, wanted)["kv_cache_memory"]
    block_bytes = plan.kv_cache.block_bytes
    assert plan.left_bytes - block_bytes < int(entry.value) <= plan.left_bytes
    stages = settings(24, kv_cache_memory=100 * GIB, pipeline_parallel_size=2)
    value = advice(LLAMA, stages)["kv_cache_memory"].value
    assert plan_memory(LLAMA, msgspec.structs.replace(stages, kv_cache_memory=value)).fits
    assert "kv_cache_memory" not in advice(LLAMA, settings(16, kv_cache_memory=100 * GIB))


def test_requests_and_stages_are_tried_where_nothing_else_helps() -> None:
    # Logits of 200,000 requests take 191 GiB.
    assert advice(LLAMA, settings(80, max_num_seqs=200_000))["max_num_seqs"].value == 50_000
    # 31 heads can't be split in two.
    odd = {**LLAMA_3_8B, "num_attention_heads": 31, "num_key_value_heads": 31}
    small = settings(5, quantization="int4", max_num_batched_tokens=256, max_model_len=64)
    (entry,) = advise(spec_from_config(odd), small)
    assert (entry.setting, entry.value) == ("pipeline_parallel_size", 2)


def test_weights_that_are_too_large_need_fewer_bytes_or_more_devices() -> None:
    found = advice(LLAMA, settings(12))
    assert set(found) == {"quantization", "tensor_parallel_size"}
    assert advice(LLAMA, settings(8))["quantization"].value == "int4"
    large = advice(spec_from_config(DEEPSEEK_V3), settings(141))
    assert large["tensor_parallel_size"].value == 8
    assert "quantization" not in advice(LLAMA, settings(12, quantization="awq", non_kv_memory=None))


def test_devices_are_a_power_of_two_that_divides_the_heads() -> None:
    qwen = spec_from_config(QWEN_25_7B)  # 28 heads
    assert advice(qwen, settings(6))["tensor_parallel_size"].value == 4
    assert "tensor_parallel_size" not in advice(qwen, settings(3))


def test_a_cpu_is_told_of_its_own_settings() -> None:
    spec = spec_from_config({**LLAMA_3_8B, "max_position_embeddings": 131072})
    found = advice(spec, settings(128, is_host=True))
    assert found["kv_cache_memory"].value == 16 * GIB
    assert found["max_model_len"].value == 32768
    assert "gpu_memory_utilization" not in found
    assert "tensor_parallel_size" not in found


def test_nothing_helps_everywhere() -> None:
    assert advise(spec_from_config(DEEPSEEK_V3), settings(4)) == []


def test_a_gguf_file(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": ((100, 32), 0, bytes(12800))}
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors))
    spec = spec_from_gguf(header)
    wanted = msgspec.structs.replace(
        settings(1), device_memory=3_500_000, max_num_seqs=1, gpu_memory_utilization=0.3
    )
    assert plan_memory(spec, wanted, header).weights_bytes == 12800
    found = {entry.setting for entry in advise(spec, wanted, header)}
    assert "gpu_memory_utilization" in found


@examples(deadline=None, max_examples=150)
@given(
    kinds=st.lists(st.sampled_from(["full", "sliding", "none"]), min_size=1, max_size=9),
    heads=st.sampled_from([(8, 8), (8, 2), (12, 1)]),
    memory=st.integers(1, 3_000_000),
    changes=st.fixed_dictionaries(
        {
            "max_model_len": st.sampled_from([None, "auto", 1, 17, 300]),
            "tensor_parallel_size": st.sampled_from([1, 2, 4]),
            "kv_cache_memory": st.sampled_from([None, 1, 50_000]),
            "non_kv_memory": st.sampled_from([None, 0, 100_000]),
            "is_host": st.booleans(),
            "block_size": st.sampled_from([1, 16]),
            "max_num_batched_tokens": st.sampled_from([1, 64, 4096]),
        }
    ),
)
def test_any_model_can_be_planned_and_its_advice_holds(
    kinds: list[str], heads: tuple[int, int], memory: int, changes: dict[str, object]
) -> None:
    spec = ModelSpec(
        architecture="TinyForCausalLM",
        num_hidden_layers=len(kinds),
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=8,
        vocab_size=50,
        max_position_embeddings=512,
        sliding_window=40,
        layer_kinds=tuple(kinds),  # type: ignore[arg-type]
    )
    if set(kinds) == {"none"}:
        return
    wanted = settings(0, device_memory=memory, max_num_seqs=1, **changes)
    plan = plan_memory(spec, wanted)
    cache = plan.kv_cache
    asked = wanted.kv_cache_memory
    has_room = asked is None or asked <= plan.left_bytes
    assert plan.fits == (has_room and cache.blocks_per_request <= cache.num_blocks)
    assert plan.fits == (has_room and cache.max_concurrency >= 1)
    assert cache.num_blocks * cache.block_bytes <= max(plan.available_bytes, 0)
    for entry in advise(spec, wanted):
        changed = msgspec.structs.replace(wanted, **{entry.setting: entry.value})
        assert plan_memory(spec, changed).fits
