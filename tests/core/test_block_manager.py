from typing import Any

from octavo_core.block_manager import HOLE, BlockManager
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from octavo_core.request import Request
from octavo_core.wire import MediaSpan
from support.engine_fakes import make_request


def request(request_id: str, prompt: list[int] | int, **fields: Any) -> Request:
    return Request(make_request(request_id, prompt, **fields), max_model_len=1000)


def admit(manager: BlockManager, new: Request, others_run: bool = False) -> int:
    """Admit a whole prompt and register its blocks; return the cached tokens, or -1."""
    cached = manager.find_cached_prefix(new)
    if not manager.admit(new, cached, new.num_tokens, others_run=others_run):
        return -1
    new.num_computed_tokens = new.num_tokens
    manager.register_full_blocks(new)
    return cached.num_tokens


def table(of: Request, group: int = 0) -> list[int]:
    return of.block_tables[group]


def test_a_prompt_that_starts_alike_shares_its_full_blocks() -> None:
    manager = BlockManager(10, block_size=4)
    first, second = request("a", list(range(10))), request("b", [*range(8), 77, 78, 79])
    assert admit(manager, first) == 0
    assert admit(manager, second) == 8
    assert table(second)[:2] == table(first)[:2]
    assert table(second)[2] != table(first)[2]


def test_one_token_is_always_left_to_compute() -> None:
    manager = BlockManager(10, block_size=4)
    admit(manager, request("a", list(range(8))))
    assert admit(manager, request("b", list(range(8)))) == 4


def test_freed_blocks_are_still_found() -> None:
    manager = BlockManager(10, block_size=4)
    first = request("a", list(range(9)))
    admit(manager, first)
    manager.free(first)
    assert manager.pool.num_used == 0
    assert admit(manager, request("b", list(range(9)))) == 8


def test_the_end_of_a_sequence_is_evicted_before_its_start() -> None:
    manager = BlockManager(3, block_size=4)
    first = request("a", list(range(12)))
    admit(manager, first)
    manager.free(first)
    other = request("b", 4)
    assert admit(manager, other) == 0
    manager.free(other)
    assert admit(manager, request("c", list(range(12)))) == 8


def test_salts_keep_tenants_apart() -> None:
    manager = BlockManager(20, block_size=4)
    prompt = list(range(9))
    assert admit(manager, request("a", prompt, cache_salt="x")) == 0
    assert admit(manager, request("b", prompt)) == 0
    assert admit(manager, request("c", prompt, cache_salt="y")) == 0
    assert admit(manager, request("d", prompt, cache_salt="x")) == 8


def test_caching_can_be_off() -> None:
    manager = BlockManager(10, block_size=4, enable_prefix_caching=False)
    admit(manager, request("a", list(range(9))))
    assert admit(manager, request("b", list(range(9)))) == 0
    assert manager.num_prefix_queries == 0


def test_admission_wants_room_for_the_whole_prompt() -> None:
    manager = BlockManager(4, block_size=4)
    admit(manager, request("a", 8))
    big = request("b", 9)
    assert not manager.admit(big, manager.find_cached_prefix(big), 1, others_run=True)
    assert big.block_tables == []
    assert manager.pool.num_free == 2


def test_cached_blocks_that_are_free_count_as_room_taken() -> None:
    manager = BlockManager(4, block_size=4)
    first = request("a", list(range(12)))
    admit(manager, first)
    manager.free(first)
    hold = request("hold", 4)
    admit(manager, hold)
    # Two hits and two new blocks: but only three blocks are free, the hits among them.
    assert admit(manager, request("b", [*range(8), 90, 91, 92, 93, 94])) == -1


def test_a_failed_step_leaves_nothing_to_find() -> None:
    manager = BlockManager(10, block_size=4)
    first = request("a", list(range(9)))
    admit(manager, first)
    manager.forget(manager.take_effects())
    manager.free(first)
    assert admit(manager, request("b", list(range(9)))) == 0


def test_counters_are_in_tokens() -> None:
    manager = BlockManager(10, block_size=4)
    admit(manager, request("a", list(range(9))))
    admit(manager, request("b", list(range(9))))
    assert (manager.num_prefix_queries, manager.num_prefix_hits) == (18, 8)


def test_an_adapter_and_a_salt_of_one_name_are_kept_apart() -> None:
    """Case K05."""
    manager = BlockManager(20, block_size=4)
    prompt = list(range(9))
    assert admit(manager, request("a", prompt, adapter="x")) == 0
    assert admit(manager, request("b", prompt, cache_salt="x")) == 0
    assert admit(manager, request("c", prompt)) == 0
    assert admit(manager, request("d", prompt, adapter="x")) == 8


def test_placeholders_of_other_media_are_other_tokens() -> None:
    manager = BlockManager(40, block_size=4)
    prompt = [1, 2, 3, 4, 0, 0, 0, 0, 9, 9, 9, 9, 5]

    def with_picture(name: str, digest: str) -> Request:
        return request(name, prompt, media=[MediaSpan(digest, 4, 3)])

    assert admit(manager, with_picture("a", "cat")) == 0
    assert admit(manager, with_picture("b", "dog")) == 4  # what comes before the picture
    assert admit(manager, with_picture("c", "cat")) == 12


def test_blocks_behind_the_window_are_given_back() -> None:
    manager = BlockManager(8, 4, groups=[KVCacheGroup((0,), window=6)], max_step_tokens=8)
    sliding = request("a", 8, max_tokens=100)
    admit(manager, sliding)
    for position in range(8, 60):
        sliding.token_ids.append(position)
        assert manager.grow(sliding, position + 1) is not None
        sliding.num_computed_tokens = position + 1
        held = [block for block in table(sliding) if block != HOLE]
        assert len(held) == manager.pool.num_used <= 3
    assert manager.most_blocks_held(1000) == 5
    manager.free(sliding)
    assert manager.pool.num_used == 0


def test_a_window_needs_only_the_end_of_a_cached_prefix() -> None:
    groups = [KVCacheGroup((0,)), KVCacheGroup((1,), window=5)]
    manager = BlockManager(40, 4, groups=groups, max_step_tokens=100)
    prompt = list(range(21))
    first = request("a", prompt)
    admit(manager, first)
    # The sliding group's early blocks are gone; the last one before the end is enough.
    manager.pool.forget(table(first, 1)[:4])
    second = request("b", prompt)
    assert admit(manager, second) == 20
    assert table(second, 1)[:4] == [HOLE] * 4
    assert table(second, 1)[4] == table(first, 1)[4]
    # Without that one, both groups have to agree on a shorter prefix; none is left.
    manager.pool.forget([table(first, 1)[4]])
    assert admit(manager, request("c", prompt)) == 0


def test_evicted_blocks_come_back_from_the_host() -> None:
    manager = BlockManager(3, block_size=4, num_host_blocks=8)
    first = request("a", list(range(12)))
    admit(manager, first)
    blocks = list(table(first))
    manager.free(first)
    manager.take_effects()
    other = request("b", 12)
    admit(manager, other)
    out = manager.take_effects().swap_out
    assert [block for block, _ in out] == list(reversed(blocks))
    manager.free(other)
    again = request("c", list(range(12)))
    assert admit(manager, again) == 8
    effects = manager.take_effects()
    # Two blocks come back, in order, from where they were put.
    places = dict(out)
    assert effects.swap_in == list(
        zip([places[blocks[0]], places[blocks[1]]], table(again)[:2], strict=True)
    )
    assert manager.num_host_hits == 8


def test_what_a_step_copies_in_is_not_overwritten_by_what_it_copies_out() -> None:
    manager = BlockManager(2, block_size=4, num_host_blocks=1)
    first = request("a", list(range(5)))
    admit(manager, first)
    manager.free(first)
    other = request("b", 8)
    admit(manager, other)  # pushes the first one's block to the host
    manager.free(other)
    manager.take_effects()
    again = request("c", list(range(5)))
    assert admit(manager, again) == 4  # evicts blocks of the other, with nowhere to go
    effects = manager.take_effects()
    assert len(effects.swap_in) == 1
    assert effects.swap_out == []


def test_a_failed_step_takes_its_copies_back() -> None:
    manager = BlockManager(2, block_size=4, num_host_blocks=4)
    first = request("a", list(range(5)))
    admit(manager, first)
    manager.free(first)
    manager.take_effects()
    other = request("b", 8)
    admit(manager, other)
    manager.forget(manager.take_effects())
    manager.free(other)
    assert manager.host.num_used == 0
    assert admit(manager, request("c", list(range(5)))) == 0


def test_a_reset_forgets_everything_but_takes_nothing_away() -> None:
    manager = BlockManager(10, block_size=4, num_host_blocks=4)
    first = request("a", list(range(9)))
    admit(manager, first)
    manager.reset_prefix_cache()
    assert manager.pool.num_used == 3
    assert admit(manager, request("b", list(range(9)))) == 0
    manager.free(first)


def test_events_tell_what_can_be_found() -> None:
    manager = BlockManager(2, block_size=2, record_events=True, num_host_blocks=4)
    first = request("a", [1, 2, 3, 4], adapter="french")
    admit(manager, first)
    one, two = manager.take_events()
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert (one.token_ids, one.parent_block_hash, one.adapter) == ([1, 2], None, "french")
    assert (two.token_ids, two.parent_block_hash) == ([3, 4], one.block_hashes[0])
    manager.free(first)
    admit(manager, request("b", [7]))
    removed, stored = manager.take_events()
    assert removed == BlockRemoved(two.block_hashes, "gpu")
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.medium) == (two.block_hashes, "cpu")
    manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]
    assert manager.take_events() == []


def test_events_are_not_kept_unless_somebody_wants_them() -> None:
    manager = BlockManager(2, block_size=2)
    admit(manager, request("a", [1, 2, 3]))
    assert manager.take_events() == []
