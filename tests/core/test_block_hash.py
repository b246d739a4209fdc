from octavo_core.block_hash import ROOT_HASH, hash_block


def test_every_input_counts() -> None:
    hashes = [
        hash_block(ROOT_HASH, [1, 2]),
        hash_block(ROOT_HASH, [2, 1]),
        hash_block(ROOT_HASH, [1, 2, 0]),
        hash_block(hash_block(ROOT_HASH, [1, 2]), [1, 2]),
        hash_block(ROOT_HASH, [1, 2], [("cache_salt", "x")]),
        hash_block(ROOT_HASH, [1, 2], [("adapter", "x")]),
        hash_block(ROOT_HASH, [1, 2], [("cache_salt", "x"), ("adapter", "x")]),
        hash_block(ROOT_HASH, [1, 2], [("cache_salt", "")]),
    ]
    assert len(set(hashes)) == len(hashes)
    assert all(len(block_hash) == 32 for block_hash in hashes)


def test_equal_inputs_are_equal_in_every_process() -> None:
    # Instances that share a cache have to agree, so this value must not change unnoticed.
    assert hash_block(ROOT_HASH, [1, 2, 3]).hex().startswith("bffff08eb87076a4")
