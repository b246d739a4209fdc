from octavo_core.block_pool import BlockPool


def test_unhashed_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    (cached, plain), _ = pool.allocate(2)
    pool.register(cached, b"a")
    pool.free([plain, cached])
    assert pool.allocate(2) == ([plain, 2], [])
    assert pool.lookup(b"a") == cached


def test_the_least_recently_used_cached_block_is_evicted_first() -> None:
    pool = BlockPool(2)
    (first, second), _ = pool.allocate(2)
    pool.register(first, b"first")
    pool.register(second, b"second")
    pool.free([first])
    pool.free([second])
    pool.touch([first])  # used again, so the other one is older now
    pool.free([first])
    assert pool.allocate(1) == ([second], [(second, b"second")])
    assert pool.lookup(b"second") is None
    assert pool.lookup(b"first") == first


def test_a_hit_holds_a_block_that_others_hold() -> None:
    pool = BlockPool(2)
    (block,), _ = pool.allocate(1)
    pool.register(block, b"a")
    pool.touch([block])
    assert pool.ref_count(block) == 2
    pool.free([block])
    assert pool.num_used == 1
    pool.free([block])
    assert pool.num_used == 0


def test_equal_contents_are_found_once() -> None:
    pool = BlockPool(2)
    (first, second), _ = pool.allocate(2)
    assert pool.register(first, b"a")
    assert not pool.register(second, b"a")
    assert pool.lookup(b"a") == first
    pool.free([second, first])
    assert pool.allocate(1) == ([second], [])  # had no key, so nothing is lost


def test_forgotten_blocks_are_not_found() -> None:
    pool = BlockPool(1)
    (block,), _ = pool.allocate(1)
    pool.register(block, b"a")
    assert pool.forget([block]) == [b"a"]
    assert pool.forget([block]) == []
    assert pool.lookup(b"a") is None
    assert pool.key_of(block) is None


def test_a_forgotten_block_that_is_free_is_reused_before_cached_ones() -> None:
    pool = BlockPool(2)
    (kept, lost), _ = pool.allocate(2)
    pool.register(kept, b"kept")
    pool.register(lost, b"lost")
    pool.free([kept, lost])
    pool.forget([lost])
    assert pool.allocate(1) == ([lost], [])
    assert pool.lookup(b"kept") == kept


def test_forgetting_all_takes_nothing_from_those_who_hold_blocks() -> None:
    pool = BlockPool(2)
    (block,), _ = pool.allocate(1)
    pool.register(block, b"a")
    pool.forget_all()
    assert pool.lookup(b"a") is None
    assert (pool.num_used, pool.num_cached) == (1, 0)
    pool.free([block])
    assert pool.num_free == 2
