import pytest

from octavo_core.config import GROUPS, EngineConfig, options, resolve_config
from octavo_core.errors import ConfigError


def test_a_flag_wins_over_the_environment_and_both_over_the_default() -> None:
    environ = {"OCTAVO_BLOCK_SIZE": "32", "OCTAVO_MAX_NUM_SEQS": "7", "OTHER": "1"}
    config = resolve_config({"block_size": "8", "port": None}, environ)
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (8, 7)
    assert config.source_of("block_size") == "flag --block-size"
    assert config.source_of("max_num_seqs") == "environment OCTAVO_MAX_NUM_SEQS"
    assert config.source_of("port") == "default"
    assert config.server.port == 8000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("123", 123),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("1M", 1 << 20),
    ],
)
def test_quantities(text: str, value: int) -> None:
    assert resolve_config({"kv_cache_memory": text}).cache.kv_cache_memory == value


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"block_size": "0"}, {}, ["block_size", "'0'", "flag --block-size", "at least 1"]),
        ({"block_size": "x"}, {}, ["block_size", "'x'", "a whole number"]),
        ({"block_size": "5.5"}, {}, ["block_size", "'5.5'", "a whole number"]),
        ({"block_size": 5.5}, {}, ["block_size", "5.5", "a whole number"]),
        ({"cpu_threads": "all"}, {}, ["cpu_threads", "'all'", "a whole number"]),
        ({"shutdown_timeout": "soon"}, {}, ["shutdown_timeout", "'soon'", "a number"]),
        ({"enable_prefix_caching": "maybe"}, {}, ["'maybe'", "true or false"]),
        ({"dtype": "int4"}, {}, ["dtype", "'int4'", "auto, bfloat16, float16 or float32"]),
        ({"metrics_prefix": "9"}, {}, ["metrics_prefix", "start with a letter"]),
        ({"ssl_cert_reqs": "7"}, {}, ["ssl_cert_reqs", "0, 1 or 2"]),
        ({"host": 5}, {}, ["host", "a text"]),
        (
            {},
            {"OCTAVO_PORT": "99999"},
            ["port", "99999", "environment OCTAVO_PORT", "at most 65535"],
        ),
        ({"kv_cache_memory": "much"}, {}, ["kv_cache_memory", "much", "GiB"]),
        ({"gpu_memory_utilization": "1.5"}, {}, ["gpu_memory_utilization", "1.5", "1"]),
        ({"no_such_thing": 1}, {}, ["no_such_thing"]),
    ],
)
def test_a_wrong_value_is_named_with_its_source_and_limit(
    flags: dict[str, object], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(flags, environ)
    for word in words:
        assert word in refused.value.message


def test_max_model_len_is_a_number_or_auto() -> None:
    for given, value in [("auto", "auto"), ("8K", 8192), (5, 5), (None, None)]:
        assert resolve_config({"max_model_len": given}).model.max_model_len == value
    assert resolve_config(None, {"OCTAVO_MAX_MODEL_LEN": "auto"}).model.max_model_len == "auto"
    assert resolve_config(keywords={"max_model_len": "auto"}).model.max_model_len == "auto"
    for wrong, words in [("all", "or auto"), ("0", "at least 1"), (1.5, "auto"), ([], "auto")]:
        with pytest.raises(ConfigError, match=words) as refused:
            resolve_config({"max_model_len": wrong})
        assert "max_model_len" in refused.value.message
    with pytest.raises(ConfigError, match="GiB if you like\\."):
        resolve_config({"kv_cache_memory": "auto"})


def test_booleans() -> None:
    for text, value in [("false", False), ("0", False), ("true", True), (False, False)]:
        config = resolve_config({"enable_prefix_caching": text})
        assert config.cache.enable_prefix_caching is value


def test_replace_remembers_where_values_came_from() -> None:
    config = EngineConfig().replace("the model", max_model_len=128, model_path="/m")
    assert config.model.max_model_len == 128
    assert config.model_path == "/m"
    assert config.source_of("max_model_len") == "the model"


def test_every_option_has_a_unique_name_and_a_description() -> None:
    names = [option.name for option in options()]
    assert len(set(names)) == len(names)
    assert all(option.description for option in options())


def test_every_group_of_the_configuration_can_be_set() -> None:
    fields = EngineConfig.__struct_fields__
    assert fields == (*GROUPS, "model_path", "sources")
    assert all(type(getattr(EngineConfig(), name)) is GROUPS[name] for name in GROUPS)
