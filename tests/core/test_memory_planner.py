import pytest

from octavo_core.config import EngineConfig, resolve_config
from octavo_core.errors import ConfigError
from octavo_core.memory_planner import format_bytes, plan_kv_cache
from octavo_core.model_spec import ModelSpec

GIB = 1 << 30

LLAMA_3_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=8192,
)


def test_worked_example() -> None:
    available = int(80 * GIB * 0.92) - 17 * GIB
    plan = plan_kv_cache(LLAMA_3_8B, EngineConfig(), available, "bfloat16")
    assert plan.kv_bytes_per_token == 131072
    assert plan.block_bytes == 2097152
    assert plan.num_blocks == 28979
    assert plan.kv_cache_tokens == 463664
    assert f"{plan.max_concurrency:.2f}" == "56.60"


def test_a_context_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_kv_cache(LLAMA_3_8B, EngineConfig(), GIB // 2, "bfloat16")
    message = refused.value.message
    assert "8192" in message
    assert "1.00 GiB" in message
    assert "--max-model-len 4096" in message
    assert "--kv-cache-memory 1073741824" in message


@pytest.mark.parametrize("advice", [{"max_model_len": "4096"}, {"num_gpu_blocks_override": "512"}])
def test_the_advice_works(advice: dict[str, str]) -> None:
    plan_kv_cache(LLAMA_3_8B, resolve_config(advice), GIB // 2, "bfloat16")


def test_more_than_the_model_was_made_for_is_refused() -> None:
    config = resolve_config({"max_model_len": "16K"})
    with pytest.raises(ConfigError, match=r"16384 \(from flag --max-model-len\).* 8192 tokens"):
        plan_kv_cache(LLAMA_3_8B, config, 80 * GIB, "bfloat16")


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1536, 3 * GIB, 5 << 40)] == [
        "0 B",
        "1.50 KiB",
        "3.00 GiB",
        "5.00 TiB",
    ]
