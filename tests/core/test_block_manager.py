from octavo_core.block_manager import BlockManager
from octavo_core.request import Request
from support.engine_fakes import make_request


def request(request_id: str, prompt: list[int] | int, cache_salt: str | None = None) -> Request:
    return Request(make_request(request_id, prompt, cache_salt=cache_salt), max_model_len=1000)


def admit(manager: BlockManager, new: Request, others_run: bool = False) -> int:
    """Admit a whole prompt and register its blocks; return the cached tokens, or -1."""
    cached = manager.find_cached_prefix(new)
    if not manager.admit(new, cached, new.num_tokens, others_run=others_run):
        return -1
    manager.register_full_blocks(new, new.num_tokens)
    return len(cached) * manager.block_size


def test_a_prompt_that_starts_alike_shares_its_full_blocks() -> None:
    manager = BlockManager(10, block_size=4)
    first, second = request("a", list(range(10))), request("b", [*range(8), 77, 78, 79])
    assert admit(manager, first) == 0
    assert admit(manager, second) == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]


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
    assert not manager.admit(big, [], 1, others_run=True)
    assert big.block_ids == []
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
    manager.admit(first, [], 9, others_run=False)
    manager.forget(manager.register_full_blocks(first, 9))
    manager.free(first)
    assert admit(manager, request("b", list(range(9)))) == 0


def test_counters_are_in_tokens() -> None:
    manager = BlockManager(10, block_size=4)
    admit(manager, request("a", list(range(9))))
    admit(manager, request("b", list(range(9))))
    assert (manager.num_prefix_queries, manager.num_prefix_hits) == (18, 8)
