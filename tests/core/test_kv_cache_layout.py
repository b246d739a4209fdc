import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.block_manager import BlockManager
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.kv_cache_layout import KVCacheLayout, group_layers, lay_out_kv_cache
from octavo_core.layer_spec import LayerSpec
from octavo_core.model_spec import spec_from_config
from support.model_configs import DEEPSEEK_V3, GEMMA_3_1B, GPT_OSS_20B, LLAMA_3_8B

FULL = LayerSpec("full", 2, 64, 64)
SLIDING = LayerSpec("sliding", 2, 64, 64, 100)
NONE = LayerSpec("none", 0, 0, 0)


def layout(layers: list[LayerSpec], **changes: object) -> KVCacheLayout:
    settings = {"block_size": 16, "dtype_bytes": 2, **changes}
    return lay_out_kv_cache(layers, **settings)  # type: ignore[arg-type]


def test_layers_that_are_alike_are_one_group() -> None:
    assert group_layers([FULL] * 5) == (KVCacheGroup((0, 1, 2, 3, 4)),)
    assert group_layers([SLIDING] * 2) == (KVCacheGroup((0, 1), 100),)


def test_the_rarer_kind_sets_the_size_of_groups() -> None:
    layers = [SLIDING, SLIDING, FULL] * 2 + [SLIDING]  # 5 and 2
    assert group_layers(layers) == (
        KVCacheGroup((0, 4), 100),
        KVCacheGroup((1, 6), 100),
        KVCacheGroup((3,), 100),  # padded
        KVCacheGroup((2, 5)),
    )


def test_counts_that_are_nearly_equal_are_one_group_each() -> None:
    # In groups of 4, the fifth layer would need a group of its own with three empty places.
    groups = group_layers([FULL, SLIDING] * 4 + [FULL])
    assert [len(group.layers) for group in groups] == [5, 4]


def test_layers_without_kv_are_in_no_group() -> None:
    assert group_layers([NONE, FULL, NONE]) == (KVCacheGroup((1,)),)
    assert group_layers([NONE]) == ()


@given(st.lists(st.sampled_from([FULL, SLIDING, LayerSpec("sliding", 2, 64, 64, 7), NONE])))
def test_groups_hold_each_layer_once_and_none_is_larger_than_need_be(
    layers: list[LayerSpec],
) -> None:
    groups = group_layers(layers)
    members = [index for group in groups for index in group.layers]
    assert sorted(members) == [i for i, layer in enumerate(layers) if layer.kind != "none"]
    for group in groups:
        assert list(group.layers) == sorted(group.layers)
        assert {layers[index].window for index in group.layers} == {group.window}
    by_window: dict[int | None, list[int]] = {}
    for group in groups:
        by_window.setdefault(group.window, []).append(len(group.layers))
    for sizes in by_window.values():  # dealt out evenly
        assert max(sizes) - min(sizes) <= 1


def test_every_block_of_every_group_has_the_same_bytes() -> None:
    page = 2 * 128 * 2 * 16
    mixed = layout([SLIDING, SLIDING, FULL] * 2 + [SLIDING])
    assert mixed.kv_bytes_per_token == 7 * page // 16
    assert mixed.block_bytes == 2 * page
    wide = LayerSpec("full", 4, 128, 128)  # four times the bytes of a sliding layer
    assert layout([SLIDING, wide]).block_bytes == 4 * page


def test_known_models() -> None:
    llama = lay_out_kv_cache(spec_from_config(LLAMA_3_8B).layers, block_size=16, dtype_bytes=2)
    assert (llama.kv_bytes_per_token, llama.block_bytes) == (131072, 2097152)
    oss = spec_from_config(GPT_OSS_20B).kv_cache_groups()
    assert [(len(group.layers), group.window) for group in oss] == [(12, 128), (12, None)]
    gemma = spec_from_config(GEMMA_3_1B).kv_cache_groups()
    assert [len(group.layers) for group in gemma] == [4, 4, 4, 4, 3, 3, 4]
    assert gemma[-1].layers == (5, 11, 17, 23)


def test_tensor_parallel_splits_heads_to_at_least_one() -> None:
    layers = spec_from_config(LLAMA_3_8B).layers
    sizes = [
        lay_out_kv_cache(
            layers, block_size=16, dtype_bytes=2, tensor_parallel_size=size
        ).kv_bytes_per_token
        for size in (1, 2, 8, 16, 32)
    ]
    assert sizes == [131072, 65536, 16384, 16384, 16384]
    latent = spec_from_config(DEEPSEEK_V3).layers
    for size in (1, 8):
        sized = lay_out_kv_cache(latent, block_size=1, dtype_bytes=2, tensor_parallel_size=size)
        assert sized.block_bytes == 61 * 576 * 2


def test_a_pipeline_stage_has_its_layers_only() -> None:
    page = 2 * 128 * 2 * 16
    layers = [SLIDING, FULL] * 4
    assert layout(layers, stage=range(4)).block_bytes == 2 * page
    assert layout(layers, stage=range(4)).groups == layout(layers).groups
    # All of one kind on a stage: its blocks are sized for that kind.
    assert layout([FULL] * 4 + [SLIDING] * 4, stage=range(4)).block_bytes == 4 * page


@pytest.mark.parametrize(
    ("num_tokens", "num_in_flight", "blocks"),
    [
        (1, 1, 1 + 1),
        (16, 1, 1 + 1),
        (100, 1, 7 + 7),
        (1600, 1, 100 + 8),  # 100 tokens and one of them new: 7 blocks, and one for the edge
        (1600, 32, 100 + 10),  # 131 tokens: 9, and one
        (1600, 5000, 100 + 100),
    ],
)
def test_a_window_bounds_what_a_request_holds(
    num_tokens: int, num_in_flight: int, blocks: int
) -> None:
    assert layout([FULL, SLIDING]).blocks_per_request(num_tokens, num_in_flight) == blocks


@given(st.integers(0, 400), st.integers(1, 3000), st.integers(1, 300))
def test_the_longest_request_fits_and_a_longer_one_does_not(
    num_blocks: int, limit: int, in_flight: int
) -> None:
    mixed = layout([SLIDING, SLIDING, FULL])
    longest = mixed.longest_request(num_blocks, limit, in_flight)
    assert 0 <= longest <= limit
    assert mixed.blocks_per_request(longest, in_flight) <= num_blocks
    if longest < limit:
        assert mixed.blocks_per_request(longest + 1, in_flight) > num_blocks


@given(st.integers(1, 2000), st.integers(1, 300))
def test_the_block_manager_counts_a_request_in_the_same_way(
    num_tokens: int, in_flight: int
) -> None:
    mixed = layout([SLIDING, SLIDING, FULL])
    blocks = BlockManager(1000, 16, groups=mixed.groups, max_step_tokens=in_flight)
    assert blocks.most_blocks_held(num_tokens) == mixed.blocks_per_request(num_tokens, in_flight)


def test_a_window_never_needs_less_than_its_tokens() -> None:
    """Whatever the offset of a window in its blocks, the bound holds it."""
    only = layout([SLIDING])
    for num_tokens in range(1, 400):
        first = max(0, num_tokens - 100)
        touched = (num_tokens - 1) // 16 - first // 16 + 1
        assert touched <= only.blocks_per_request(num_tokens)
